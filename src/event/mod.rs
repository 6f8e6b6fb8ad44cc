//! Defines the types for events that all other modules share.
//!
//! The relay identifies an [`Event`] by its [position](EventPosition), which is usually its place in the WAL.
//! Consumers identify the event by its [id](EventId). Events with the same topic and [`OrderingKey`] form a
//! [`Group`]. If they have a key, the relay keeps their order. Once Pub/Sub has stored an event's message,
//! the relay keeps only the [`EventRef`] until the outcome is recorded.
//!
//! **Invariant.** All types here are plain values. Nothing here does IO, or depends on where an event
//! comes from or goes to.
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
pub(crate) use position::RECORD_ALIGNMENT;
pub use position::{CommittedAt, EventPosition};

/// Whether an event has a row in `outbox.dispatch`, and whether it needs one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// The event has no row yet; its outcome adds one.
    New,
    /// The event gets no new row, for one of two reasons:
    ///
    /// - This session records no published events.
    /// - A row already says that the event is published. The relay publishes the event again, because other events
    ///   of its key may have been published without a row. To keep the order, the relay repeats the whole key.
    NeedsNoRow,
    /// The event was released from quarantine, or is being replayed. It has a row already, and its
    /// outcome changes that row. The event does not hold back the confirmed position, because its row is
    /// durable.
    Released,
}

/// The part of an event that the relay keeps until the event's outcome is recorded.
#[derive(Debug, Clone)]
pub struct EventRef {
    /// The event's position, which identifies it.
    pub position: EventPosition,
    /// Whether the event has a dispatch row already, and whether it needs one.
    pub standing: Standing,
    /// Number of failed requests that contained the event, except requests that were never sent.
    pub failed_attempts: u32,
    /// How many of these requests got no definite answer. Each of them may have stored the event.
    pub unknown_outcomes: u32,
    /// When the event's transaction was committed.
    pub commit_time: PgTimestamp,
    /// The event's id in the dispatch table.
    pub event_id: EventId,
}

impl EventRef {
    /// Creates a new event, which has not been sent yet and has no record.
    pub fn new(at: CommittedAt, event_id: EventId) -> Self {
        Self {
            position: at.position,
            standing: Standing::New,
            failed_attempts: 0,
            unknown_outcomes: 0,
            commit_time: at.time,
            event_id,
        }
    }
}

/// One event to publish.
#[derive(Debug)]
pub struct Event {
    /// The event without its message.
    pub origin: EventRef,
    /// The encoded `PubsubMessage`.
    pub message: Bytes,
}

#[cfg(test)]
impl Event {
    /// Creates an event with this ordinal and a message of seven bytes.
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

/// A topic and an ordering key. Events of the same group must be published in order.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Group {
    /// Full topic name; empty when the topic cannot be read from the row.
    pub topic: Arc<str>,
    /// Ordering key; empty for events without order.
    pub ordering_key: OrderingKey,
}

impl Group {
    /// Whether the events of this group have an order to keep.
    pub fn is_ordered(&self) -> bool {
        !self.topic.is_empty() && !self.ordering_key.is_unordered()
    }
}
