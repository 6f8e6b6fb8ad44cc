//! Events and requests as the lanes hold them.

use std::sync::Arc;

use bytes::Bytes;
use decoder::PgTimestamp;

use crate::map::{EventId, OrderingKey};
use crate::watermark::CommitLsn;

/// Whether an event has a row in `outbox.dispatch`, and needs one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// It has no row yet; its outcome adds one.
    New,
    /// It gets no new row. Either published events get none (`dispatch = exceptions`), or it already
    /// has one that says published, and is sent again only because its neighbours without a row are.
    Repeated,
    /// Released from quarantine: its row exists, and the event has counted as resolved since then.
    Released,
}

/// What the relay remembers of an event until its outcome is recorded.
#[derive(Debug, Clone)]
pub struct EventRef {
    /// Commit LSN: the first half of the event's identity.
    pub commit: CommitLsn,
    /// Place of the insert in its transaction, from 1: the second half.
    pub ordinal: u32,
    /// Whether it has a row already.
    pub standing: Standing,
    /// Failed requests that carried it.
    pub failed_attempts: u32,
    /// When its transaction was committed.
    pub commit_time: PgTimestamp,
    /// The id in the dispatch table.
    pub event_id: EventId,
}

impl EventRef {
    /// A new event: not sent yet, and without a row.
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
        let commit = CommitLsn::new(decoder::Lsn::new(1));
        let origin = EventRef::new(commit, ordinal, PgTimestamp::from_micros(0), event_id);
        Self {
            origin,
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

/// Names a lane.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct LaneKey {
    /// Full topic name.
    pub topic: Arc<str>,
    /// Ordering key; empty for messages without order.
    pub ordering_key: OrderingKey,
    /// Number of the lane, among the topic's lanes for messages without order.
    pub(super) unordered: u32,
}

/// A request to publish. The lanes hand it out, and get it back through
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
    /// Counts one more failed attempt.
    pub(super) fn count_failure(&mut self) {
        self.failed_attempts += 1;
        for event in &mut self.events {
            event.origin.failed_attempts += 1;
        }
    }
}
