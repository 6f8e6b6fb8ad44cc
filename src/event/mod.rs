//! Defines the vocabulary of events, which every other part shares.
//!
//! An [`Event`] has an identity that PostgreSQL gave it: its [position](EventPosition) in the log.
//! It also has an [id](EventId) by which consumers and `outbox.dispatch` know it. Events with the
//! same topic and [`OrderingKey`] are a [`Group`], and share an order. Once Pub/Sub has stored an
//! event's message, the relay keeps only the [`EventRef`] until the outcome is recorded.
//!
//! **Invariant.** Plain values: nothing here does IO, and nothing here depends on where an event came
//! from or where it goes.
//!
//! Not here: how a row becomes an event (`mapping`), positions that may be confirmed (`watermark`), and
//! outcomes (`store`).

mod id;
mod ordering_key;
mod position;

use std::sync::Arc;

use bytes::Bytes;
use decoder::PgTimestamp;

pub use id::EventId;
pub(crate) use id::{SHOWN_CHARS, UUID_CHARS};
pub use ordering_key::OrderingKey;
pub use position::{CommittedAt, EventPosition};

/// Whether an event has a row in `outbox.dispatch`, and needs one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// The event has no row yet; its outcome adds one.
    New,
    /// The event gets no new row. Either this session records no published events, or the event's row
    /// already says `published`, and the event is sent again only to keep the order with neighbours that
    /// have no row.
    Repeated,
    /// The event was released from quarantine, or is replayed. Its row exists, and its outcome
    /// changes that row. For the confirmed position, the event has been resolved since its row was
    /// written.
    Released,
}

/// What the relay remembers of an event until its outcome is recorded.
#[derive(Debug, Clone)]
pub struct EventRef {
    /// The event's position, which identifies it.
    pub position: EventPosition,
    /// Whether the event has a row already, and needs one.
    pub standing: Standing,
    /// Number of failed requests that contained the event.
    pub failed_attempts: u32,
    /// When its transaction was committed.
    pub commit_time: PgTimestamp,
    /// The event's id in the dispatch table.
    pub event_id: EventId,
}

impl EventRef {
    /// A new event: not sent yet, and without a record.
    pub fn new(at: CommittedAt, event_id: EventId) -> Self {
        Self {
            position: at.position,
            standing: Standing::New,
            failed_attempts: 0,
            commit_time: at.time,
            event_id,
        }
    }
}

/// One event to publish.
#[derive(Debug)]
pub struct Event {
    /// Identifies the event.
    pub origin: EventRef,
    /// The encoded `PubsubMessage`.
    pub message: Bytes,
}

#[cfg(test)]
impl Event {
    /// The event with this ordinal and a message of seven bytes.
    pub(crate) fn for_tests(ordinal: u32) -> Self {
        let event_id = EventId {
            uuid: [0; 16],
            source_id: None,
        };
        let at = CommittedAt {
            position: EventPosition::for_tests(1, ordinal),
            ..CommittedAt::default()
        };
        Self {
            origin: EventRef::new(at, event_id),
            message: Bytes::from_static(b"message"),
        }
    }
}

/// A topic and an ordering key: the events that share an order.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Group {
    /// Full topic name; empty when the topic cannot be read from the row.
    pub topic: Arc<str>,
    /// Ordering key; empty for events without order.
    pub ordering_key: OrderingKey,
}

impl Group {
    /// Whether there is an order to keep.
    pub fn is_ordered(&self) -> bool {
        !self.topic.is_empty() && !self.ordering_key.is_unordered()
    }
}
