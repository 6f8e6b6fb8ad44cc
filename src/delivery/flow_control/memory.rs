//! Counts the bytes of all events in memory, in one place.
//!
//! An event has two parts that count separately. Its message counts until Pub/Sub has stored the message, or until
//! the event is set aside. Its record counts until the event is resolved.
//!
//! Not here: the decisions that depend on these counts (`flow_control`).

use crate::event::Event;
use crate::lanes::EVENT_OVERHEAD;

/// Memory of a queued event in addition to its message and its record: its entry in the lane's queue, its
/// share of the lane's own memory, and a second copy of a small message in the buffers of the connection.
const QUEUED_OVERHEAD: usize = EVENT_OVERHEAD - RECORD;

/// Memory of a lane: its key, its entry in the index, its queue. If every event has its own key and messages
/// are small, lanes use a large part of all memory, so they must count.
pub(super) const LANE: usize = 300;

/// Memory of an event until it is resolved, in addition to its message: ids, times, Pub/Sub's message id. Long
/// ids, keys and errors are counted separately (`text_bytes`) once the event's message has left memory.
pub(super) const RECORD: usize = 200;

/// Number of bytes that an event counts as, from its arrival until Pub/Sub has stored it.
pub(in crate::delivery) fn weight(event: &Event) -> usize {
    event.message.len() + EVENT_OVERHEAD
}

/// The memory in use. All sizes are in bytes.
#[derive(Debug, Default)]
pub(super) struct EventMemory {
    /// Number of messages that are queued or in flight.
    pub(super) messages: usize,
    pub(super) message_bytes: usize,
    /// Number of lanes with work.
    pub(super) lanes: usize,
    /// Number of events that are not resolved yet.
    pub(super) records: usize,
    /// Bytes of long ids, keys and errors. They count while an event waits for the answer to its dead letter, or for
    /// its dispatch row to become durable.
    pub(super) text_bytes: usize,
    /// Bytes of moved rows (`capture::moved`) that wait for the outcome of their original insert.
    pub(super) waiting: usize,
    /// Weight of the events in requests in flight.
    pub(super) in_flight: usize,
}

impl EventMemory {
    /// All bytes in use.
    pub(super) fn used(&self) -> usize {
        self.messages() + self.records * RECORD + self.text_bytes + self.waiting
    }

    /// Bytes of messages and lanes, without the records of their events.
    pub(super) fn messages(&self) -> usize {
        self.message_bytes + self.messages * QUEUED_OVERHEAD + self.lanes * LANE
    }

    /// Bytes of delivered events that are not recorded yet.
    pub(super) fn unrecorded(&self) -> usize {
        self.records.saturating_sub(self.messages) * RECORD + self.text_bytes
    }

    /// Bytes of the events that are not delivered yet, plus the bytes of all lanes.
    pub(super) fn undelivered(&self) -> usize {
        self.used() - self.unrecorded()
    }

    /// Bytes of the events that are neither delivered nor in flight, plus the bytes of all lanes.
    pub(super) fn queued(&self) -> usize {
        self.undelivered().saturating_sub(self.in_flight)
    }

    /// Whether many lanes have more than one message. If so, lingering makes the requests fuller.
    pub(super) fn lanes_are_shared(&self) -> bool {
        self.messages > self.lanes + self.lanes / 8
    }
}
