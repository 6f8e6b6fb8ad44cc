//! Bytes of events in memory: one owner, one limit.
//!
//! An event weighs its message until Pub/Sub has stored it, and its record until the dispatch row
//! is durable. When the budget is spent nothing more is read from PostgreSQL until half of it is
//! free again: in between there is time for full requests instead of a trickle of small ones.

use crate::lanes::Event;

/// What a waiting event weighs beside its message: its place in a lane, its share of the lane's
/// own memory, and its message in the buffers of the connection.
const WAITING_OVERHEAD: usize = 300;

/// What an event weighs until it is recorded: ids, times, Pub/Sub's message id.
const RECORD: usize = 200;

#[derive(Debug)]
pub(super) struct Budget {
    used: usize,
    limit: usize,
    spent: bool,
}

/// What an event weighs from its arrival until Pub/Sub has stored it.
pub(super) fn weight(event: &Event) -> usize {
    event.message.len() + WAITING_OVERHEAD + RECORD
}

impl Budget {
    pub(super) fn new(limit: usize) -> Self {
        Self {
            used: 0,
            limit,
            spent: false,
        }
    }

    /// An event has come into memory.
    pub(super) fn take(&mut self, event: &Event) {
        self.used += weight(event);
        self.spent |= self.used >= self.limit;
    }

    /// An event has come into memory without a message.
    pub(super) fn take_record(&mut self) {
        self.used += RECORD;
        self.spent |= self.used >= self.limit;
    }

    /// A second message of an event has come into memory.
    pub(super) fn take_message(&mut self, event: &Event) {
        self.used += event.message.len() + WAITING_OVERHEAD;
        self.spent |= self.used >= self.limit;
    }

    /// So many messages, of so many bytes in all, are not needed any more.
    pub(super) fn give_back_messages(&mut self, messages: usize, bytes: usize) {
        self.give_back(bytes + messages * WAITING_OVERHEAD);
    }

    /// So many events are recorded.
    pub(super) fn give_back_records(&mut self, events: usize) {
        self.give_back(events * RECORD);
    }

    fn give_back(&mut self, bytes: usize) {
        self.used = self.used.saturating_sub(bytes);
        self.spent &= self.used >= self.limit / 2;
    }

    pub(super) fn used(&self) -> usize {
        self.used
    }

    /// What may be used in all.
    pub(super) fn limit(&self) -> usize {
        self.limit
    }

    /// Whether there is any room at all.
    pub(super) fn has_room(&self) -> bool {
        self.used < self.limit
    }

    /// Whether nothing more may be read for now. One event may always come, however large.
    pub(super) fn is_spent(&self) -> bool {
        self.spent
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spent_budget_stays_spent_until_half_of_it_is_free() {
        let mut budget = Budget::new(1_000);
        budget.used = 900;
        budget.take(&Event::for_tests(0));
        assert!(budget.is_spent());
        budget.give_back_records(2);
        assert!(budget.is_spent());
        budget.give_back_messages(1, 500);
        assert!(!budget.is_spent());
    }
}
