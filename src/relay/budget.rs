//! Bytes of events in memory: one owner, one limit.
//!
//! An event weighs its message until Pub/Sub has stored it, and its record until the dispatch row
//! is durable. When the budget is spent nothing more is read from PostgreSQL for a while. If it is
//! messages that spend it, until they fit into two thirds of it. Only what is too much for that is sent, and a
//! little more, so that one late answer does not hold all up; what is on its way already counts. The lanes
//! that have waited longest give it: they have the most, and what stays goes on to grow. Were all lanes
//! emptied instead, requests would have half as many messages. If it is the records of what is delivered, or they have a quarter of it,
//! nothing is read until an eighth is free and they are down to an eighth (to three sixteenths when
//! messages had spent it), and lanes go on as before.
//! Where hardly two messages share a lane, requests do not fill up, and go from half of it on.

use crate::lanes::{EVENT_OVERHEAD, Event};

/// What a waiting event weighs beside its message: its place in a lane, its share of the lane's
/// own memory, and a small message once more in the buffers of the connection.
const WAITING_OVERHEAD: usize = EVENT_OVERHEAD - RECORD;

/// What a lane weighs: its key, its entry in the index, its queue. Where every event has a key of
/// its own that is a quarter of all.
const LANE: usize = 300;

/// What an event weighs until it is recorded: ids, times, Pub/Sub's message id. Texts that may be long
/// count beside that, once they are not in its message any more, or never were.
const RECORD: usize = 200;

#[derive(Debug)]
pub(super) struct Budget {
    limit: usize,
    /// Messages that wait or are on their way, and their bytes.
    messages: usize,
    message_bytes: usize,
    /// Lanes that have them.
    lanes: usize,
    /// Events without their dispatch row, and the texts of those without a message of their own.
    records: usize,
    text_bytes: usize,
    /// What the events in requests on their way weigh.
    on_its_way: usize,
    spent: Option<By>,
}

/// What has spent it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum By {
    Messages,
    Records,
}

/// What an event weighs from its arrival until Pub/Sub has stored it.
pub(super) fn weight(event: &Event) -> usize {
    event.message.len() + EVENT_OVERHEAD
}

impl Budget {
    pub(super) fn new(limit: usize) -> Self {
        Self {
            limit,
            messages: 0,
            message_bytes: 0,
            lanes: 0,
            records: 0,
            text_bytes: 0,
            on_its_way: 0,
            spent: None,
        }
    }

    /// An event has come into memory.
    pub(super) fn take(&mut self, event: &Event) {
        self.records += 1;
        self.take_message(event);
    }

    /// An event has come into memory without a message.
    pub(super) fn take_record(&mut self) {
        self.records += 1;
        self.changed();
    }

    /// A second message of an event has come into memory.
    pub(super) fn take_message(&mut self, event: &Event) {
        self.messages += 1;
        self.message_bytes += event.message.len();
        self.changed();
    }

    /// So many messages, of so many bytes in all, are not needed any more.
    pub(super) fn give_back_messages(&mut self, messages: usize, bytes: usize) {
        self.messages = self.messages.saturating_sub(messages);
        self.message_bytes = self.message_bytes.saturating_sub(bytes);
        self.changed();
    }

    /// A request with these is on its way.
    pub(super) fn sent(&mut self, events: &[Event]) {
        self.on_its_way += events.iter().map(weight).sum::<usize>();
        debug_assert!(self.on_its_way <= self.undelivered() + self.messages * RECORD);
    }

    /// It is not any more: it was stored, or has failed.
    pub(super) fn answered(&mut self, events: &[Event]) {
        let weight = events.iter().map(weight).sum();
        debug_assert!(self.on_its_way >= weight);
        self.on_its_way = self.on_its_way.saturating_sub(weight);
    }

    /// So many bytes of text wait for a dead letter, or to be written with their outcome.
    pub(super) fn take_texts(&mut self, bytes: usize) {
        self.text_bytes += bytes;
        self.changed();
    }

    /// They wait no longer.
    pub(super) fn give_back_texts(&mut self, bytes: usize) {
        self.text_bytes = self.text_bytes.saturating_sub(bytes);
        self.changed();
    }

    /// So many events are recorded.
    pub(super) fn give_back_records(&mut self, events: usize) {
        self.records = self.records.saturating_sub(events);
        self.changed();
    }

    /// So many lanes have work now.
    pub(super) fn weigh_lanes(&mut self, lanes: usize) {
        self.lanes = lanes;
        self.changed();
    }

    fn changed(&mut self) {
        let to_record = self.to_record();
        let is_full = match self.spent {
            None => self.used() >= self.limit || to_record >= self.limit / 4,
            Some(By::Messages) => {
                self.to_deliver() >= self.limit / 3 * 2 || to_record >= self.limit / 16 * 3
            }
            Some(By::Records) => {
                self.used() >= self.limit - self.limit / 8 || to_record >= self.limit / 8
            }
        };
        let by = match self.undelivered() >= self.limit / 2 {
            true => By::Messages,
            false => self.spent.unwrap_or(By::Records),
        };
        self.spent = is_full.then_some(by);
    }

    pub(super) fn used(&self) -> usize {
        self.undelivered() + self.records * RECORD + self.text_bytes
    }

    /// What is used for messages.
    fn undelivered(&self) -> usize {
        self.message_bytes + self.messages * WAITING_OVERHEAD + self.lanes * LANE
    }

    /// What is used for events that are delivered, until they are recorded.
    fn to_record(&self) -> usize {
        self.records.saturating_sub(self.messages) * RECORD + self.text_bytes
    }

    /// What is used for all others.
    fn to_deliver(&self) -> usize {
        self.used() - self.to_record()
    }

    /// What may be used in all.
    pub(super) fn limit(&self) -> usize {
        self.limit
    }

    /// Whether there is any room at all.
    pub(super) fn has_room(&self) -> bool {
        self.used() < self.limit
    }

    /// Whether requests grow by waiting for more: there is room for more, or will be, and it comes to
    /// lanes that have something already.
    pub(super) fn fills_requests(&self) -> bool {
        let shared = self.messages > self.lanes + self.lanes / 8;
        let stays = self.to_deliver().saturating_sub(self.on_its_way);
        let has_to_send = self.is_spent_by_messages() && stays > self.limit / 8 * 5;
        !has_to_send && (shared || self.undelivered() < self.limit / 2)
    }

    /// Whether that is because of messages. Records are written soon, whatever lanes do.
    pub(super) fn is_spent_by_messages(&self) -> bool {
        self.spent == Some(By::Messages)
    }

    /// Whether nothing more may be read for now. One event may always come, however large.
    pub(super) fn is_spent(&self) -> bool {
        self.spent.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spent_budget_stays_spent_until_a_third_of_it_is_free() {
        let mut budget = Budget::new(1_000);
        budget.message_bytes = 900;
        budget.take(&Event::for_tests(0));
        assert!(budget.is_spent());
        budget.give_back_records(2);
        assert!(budget.is_spent());
        budget.give_back_messages(1, 200);
        assert!(budget.is_spent());
        budget.give_back_messages(0, 100);
        assert!(!budget.is_spent());
    }

    #[test]
    fn of_what_spends_it_little_more_than_a_third_is_on_its_way_then_and_failures_are_made_up_for()
    {
        let event = Event::for_tests(0);
        let mut budget = Budget::new(96 * weight(&event));
        let some = |n| (0..n).map(Event::for_tests).collect::<Vec<_>>();
        budget.weigh_lanes(1);
        (0..90).for_each(|_| budget.take(&event));
        budget.sent(&some(10));
        (0..6).for_each(|_| budget.take(&event));
        assert!(budget.is_spent_by_messages() && !budget.fills_requests());
        budget.sent(&some(26));
        assert!(!budget.fills_requests(), "the lane weighs something, too");
        budget.sent(&some(1));
        assert!(budget.fills_requests() && budget.is_spent());
        budget.answered(&some(2));
        assert!(!budget.fills_requests(), "they go again");
        budget.sent(&some(2));
        budget.take(&event);
        assert!(!budget.fills_requests());
        budget.sent(&some(1));
        assert!(budget.fills_requests());
        budget.answered(&some(34));
        budget.give_back_messages(34, 34 * event.message.len());
        assert!(!budget.is_spent(), "four of those sent may come later");
    }

    #[test]
    fn a_spent_budget_stays_spent_until_the_records_of_what_is_delivered_have_three_sixteenths() {
        let mut budget = Budget::new(80 * RECORD);
        let event = Event::for_tests(0);
        (0..80).for_each(|_| budget.take(&event));
        budget.give_back_messages(80, 80 * event.message.len());
        budget.give_back_records(65);
        assert!(budget.used() < budget.limit() / 2 && budget.is_spent());
        budget.give_back_records(1);
        assert!(!budget.is_spent());
        (0..5).for_each(|_| budget.take_record());
        assert!(!budget.is_spent(), "it was not spent again");
    }

    #[test]
    fn records_spend_it_with_a_quarter_until_they_have_an_eighth_and_lanes_fill_up_meanwhile() {
        let mut budget = Budget::new(80 * RECORD);
        (0..20).for_each(|_| budget.take_record());
        assert!(budget.is_spent());
        assert!(budget.fills_requests(), "messages have room");
        budget.give_back_records(10);
        assert!(budget.is_spent());
        budget.give_back_records(1);
        assert!(!budget.is_spent());
    }

    #[test]
    fn messages_that_come_while_records_spend_it_spend_it_themselves() {
        let mut budget = Budget::new(80 * RECORD);
        (0..20).for_each(|_| budget.take_record());
        assert!(budget.is_spent() && !budget.is_spent_by_messages());
        budget.message_bytes = budget.limit;
        budget.changed();
        budget.give_back_records(20);
        assert!(budget.is_spent_by_messages() && !budget.fills_requests());
    }

    #[test]
    fn requests_fill_up_while_there_is_room_and_beyond_half_of_it_only_where_lanes_are_shared() {
        let event = Event::for_tests(0);
        let mut budget = Budget::new(100 * (weight(&event) + LANE - RECORD));
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
        budget.give_back_messages(160, 160 * event.message.len());
        budget.weigh_lanes(0);
        budget.records = 2 * budget.limit / 3 / RECORD;
        budget.changed();
        budget.spent = None;
        assert!(budget.fills_requests(), "records take nothing of it");
    }

    #[test]
    fn texts_of_what_is_being_written_spend_it_as_its_records_do() {
        let mut budget = Budget::new(80 * RECORD);
        budget.take_record();
        budget.take_texts(20 * RECORD);
        assert!(budget.is_spent() && !budget.is_spent_by_messages());
        budget.give_back_texts(20 * RECORD);
        budget.give_back_records(1);
        assert_eq!((budget.used(), budget.is_spent()), (0, false));
    }

    #[test]
    fn a_lane_weighs_as_long_as_it_has_work() {
        let mut budget = Budget::new(10 * LANE);
        budget.weigh_lanes(10);
        assert!(budget.is_spent());
        budget.weigh_lanes(7);
        assert!(budget.is_spent());
        budget.weigh_lanes(2);
        assert_eq!((budget.used(), budget.is_spent()), (2 * LANE, false));
    }
}
