//! Events and requests as the lanes hold them.

use std::sync::Arc;

use bytes::Bytes;
use decoder::PgTimestamp;

use crate::map::{EventId, OrderingKey};
use crate::watermark::CommitLsn;

/// Whether an event's outcome is its first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// It has no row in `outbox.dispatch` yet.
    New,
    /// It gets no row: published events get none, or there is one that says published, and it goes
    /// again since those around it do that have none.
    Repeated,
    /// Released from quarantine: its row is there, and it counts as resolved since.
    Released,
}

/// What is kept of an event until its outcome is recorded.
#[derive(Debug, Clone)]
pub struct EventRef {
    /// Commit LSN: the first half of the event's identity.
    pub commit: CommitLsn,
    /// Place of the insert in its transaction, from 1: the second half.
    pub ordinal: u32,
    /// Whether it has an outcome already.
    pub standing: Standing,
    /// Attempts that carried it and failed.
    pub failed_attempts: u32,
    /// When its transaction was committed.
    pub commit_time: PgTimestamp,
    /// The id in the dispatch table.
    pub event_id: EventId,
}

impl EventRef {
    /// An event without an outcome that was not sent yet.
    pub fn new(
        commit: CommitLsn,
        ordinal: u32,
        commit_time: PgTimestamp,
        event_id: EventId,
    ) -> Self {
        Self {
            commit,
            ordinal,
            standing: Standing::New,
            failed_attempts: 0,
            commit_time,
            event_id,
        }
    }
}

/// One event to publish.
#[derive(Debug)]
pub struct Event {
    /// Which event it is.
    pub origin: EventRef,
    /// The encoded `PubsubMessage`.
    pub message: Bytes,
}

#[cfg(test)]
impl Event {
    /// The event of this ordinal, with seven bytes of message.
    pub(crate) fn for_tests(ordinal: u32) -> Self {
        let event_id = EventId {
            uuid: [0; 16],
            source_id: None,
        };
        let commit = CommitLsn::new(decoder::Lsn::new(1));
        let origin = EventRef::new(commit, ordinal, PgTimestamp::from_micros(0), event_id);
        Self {
            origin,
            message: Bytes::from_static(b"message"),
        }
    }
}

/// Events with one order: a topic and an ordering key.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Group {
    /// Full topic name; empty when a row does not tell its topic.
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

/// Names a lane.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct LaneKey {
    /// Full topic name.
    pub topic: Arc<str>,
    /// Ordering key; empty for messages without order.
    pub ordering_key: OrderingKey,
    /// Which of the lanes for messages without order.
    pub(super) unordered: u32,
}

/// A request to publish. It is out of the lanes until it comes back through
/// [`finished`](super::Lanes::finished), [`failed`](super::Lanes::failed) or
/// [`refused`](super::Lanes::refused).
#[derive(Debug)]
pub struct Request {
    pub(super) lane: usize,
    /// Topic and key of all its events.
    pub key: LaneKey,
    /// The events, in order; at least one.
    pub events: Vec<Event>,
    /// Attempts made before this one.
    pub failed_attempts: u32,
}

impl Request {
    /// One more attempt has failed.
    pub(super) fn count_failure(&mut self) {
        self.failed_attempts += 1;
        for event in &mut self.events {
            event.origin.failed_attempts += 1;
        }
    }
}
