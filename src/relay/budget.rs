//! Bytes of events in memory: one owner, one limit.
//!
//! An event weighs its message until Pub/Sub has stored it, and its record until the dispatch row
//! is durable. When the budget is spent nothing more is read from PostgreSQL until half of it is
//! free again: in between there is time for full requests instead of a trickle of small ones.
//! Where hardly two messages share a lane, requests do not fill up, and go from half of it on.

use crate::lanes::Event;

/// What a waiting event weighs beside its message: its place in a lane, its share of the lane's
/// own memory, and its message in the buffers of the connection.
const WAITING_OVERHEAD: usize = 300;

/// What a lane weighs: its key, its entry in the index, its queue. Where every event has a key of
/// its own that is a quarter of all.
const LANE: usize = 300;

/// What an event weighs until it is recorded: ids, times, Pub/Sub's message id.
const RECORD: usize = 200;

#[derive(Debug)]
pub(super) struct Budget {
    used: usize,
    limit: usize,
    spent: bool,
    /// Messages that wait or are on their way.
    messages: usize,
    /// Lanes that have them.
    lanes: usize,
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
            messages: 0,
            lanes: 0,
        }
    }

    /// An event has come into memory.
    pub(super) fn take(&mut self, event: &Event) {
        self.messages += 1;
        self.grow(weight(event));
    }

    /// An event has come into memory without a message.
    pub(super) fn take_record(&mut self) {
        self.grow(RECORD);
    }

    /// A second message of an event has come into memory.
    pub(super) fn take_message(&mut self, event: &Event) {
        self.messages += 1;
        self.grow(event.message.len() + WAITING_OVERHEAD);
    }

    /// So many lanes have work now.
    pub(super) fn weigh_lanes(&mut self, lanes: usize) {
        self.grow(lanes.saturating_sub(self.lanes) * LANE);
        self.give_back(self.lanes.saturating_sub(lanes) * LANE);
        self.lanes = lanes;
    }

    /// So many messages, of so many bytes in all, are not needed any more.
    pub(super) fn give_back_messages(&mut self, messages: usize, bytes: usize) {
        self.messages = self.messages.saturating_sub(messages);
        self.give_back(bytes + messages * WAITING_OVERHEAD);
    }

    /// So many events are recorded.
    pub(super) fn give_back_records(&mut self, events: usize) {
        self.give_back(events * RECORD);
    }

    fn grow(&mut self, bytes: usize) {
        self.used += bytes;
        self.spent |= self.used >= self.limit;
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

    /// Whether requests grow by waiting for more: there is room for more, and it comes to lanes that
    /// have something already.
    pub(super) fn fills_requests(&self) -> bool {
        let shared = self.messages > self.lanes + self.lanes / 8;
        !self.spent && (shared || self.used < self.limit / 2)
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

    #[test]
    fn requests_fill_up_while_there_is_room_and_beyond_half_of_it_only_where_lanes_are_shared() {
        let event = Event::for_tests(0);
        let mut budget = Budget::new(100 * (weight(&event) + LANE));
        let mut take = |events, lanes| {
            for _ in 0..events {
                budget.take(&event);
            }
            budget.weigh_lanes(lanes);
            budget.fills_requests()
        };
        assert!(take(49, 49), "there is room");
        assert!(!take(11, 60), "each has a lane of its own");
        assert!(take(0, 50), "a few lanes are shared");
        assert!(!take(100, 50), "spent");
    }

    #[test]
    fn a_lane_weighs_as_long_as_it_has_work() {
        let mut budget = Budget::new(10 * LANE);
        budget.weigh_lanes(10);
        assert!(budget.is_spent());
        budget.weigh_lanes(6);
        assert!(budget.is_spent());
        budget.weigh_lanes(2);
        assert_eq!((budget.used(), budget.is_spent()), (2 * LANE, false));
    }
}
