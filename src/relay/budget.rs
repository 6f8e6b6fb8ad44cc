//! Bytes of events in memory: one owner, one limit.
//!
//! An event weighs its message until Pub/Sub has stored it, and its record until the dispatch row
//! is durable. While the budget is spent nothing more is read from PostgreSQL.

use crate::lanes::Event;

/// What an event weighs beside its message: its place in a lane or a batch, ids, its share of a
/// lane's own memory, and the message's in the buffers of the connection.
const OVERHEAD: usize = 400;

#[derive(Debug)]
pub(super) struct Budget {
    used: usize,
    limit: usize,
}

impl Budget {
    pub(super) fn new(limit: usize) -> Self {
        Self { used: 0, limit }
    }

    /// An event has come into memory.
    pub(super) fn take(&mut self, event: &Event) {
        self.used += event.message.len() + OVERHEAD;
    }

    /// Messages of so many bytes in all are not needed any more.
    pub(super) fn give_back_messages(&mut self, bytes: usize) {
        self.used = self.used.saturating_sub(bytes);
    }

    /// So many events are recorded.
    pub(super) fn give_back_records(&mut self, events: u64) {
        let bytes = usize::try_from(events)
            .unwrap_or(usize::MAX)
            .saturating_mul(OVERHEAD);
        self.used = self.used.saturating_sub(bytes);
    }

    pub(super) fn used(&self) -> usize {
        self.used
    }

    /// Whether more may be read. One event may always come, however large.
    pub(super) fn has_room(&self) -> bool {
        self.used < self.limit
    }

    /// Whether there is time to let requests fill up.
    pub(super) fn is_half_empty(&self) -> bool {
        self.used < self.limit / 2
    }
}
