//! Bytes of events in memory: one owner, one limit.
//!
//! An event weighs its message until Pub/Sub has stored it, and its record until the dispatch row
//! is durable. When the budget is spent nothing more is read from PostgreSQL:
//!
//! - spent by messages, until they fit into two thirds of it;
//! - spent by the records of what is delivered, or when these have a quarter of it, until an eighth is
//!   free and they are down to an eighth (to three sixteenths when messages had spent it).
//!
//! While the stream is behind, lanes wait until requests are filled (`backlog`), but for what waits
//! beyond measure: then those that have waited longest, and so have most, are served until that is on
//! its way. What stays goes on to grow; were all lanes emptied, requests would have half as many
//! messages. Beyond measure is
//!
//! - of a budget spent by messages what is over five eighths: a little more than has to go, so that one
//!   late answer does not hold all up;
//! - what is over a quarter of the budget, or a sixteenth of all that has come with this backlog if that is
//!   more, from there down to five eighths of that. What waits when a backlog ends has still to be sent,
//!   and of a short one that would be a good part;
//! - what is over half of the budget where hardly two messages share a lane: requests do not fill up.

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
    /// What has come since the stream was caught up with last.
    taken: usize,
    /// More waits than a quarter of the limit and a sixteenth of that, or did, and not enough has been
    /// sent since.
    sheds: bool,
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
            taken: 0,
            sheds: false,
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

    /// The stream has been caught up with, for now.
    pub(super) fn caught_up(&mut self) {
        self.taken = 0;
    }

    /// A second message of an event has come into memory.
    pub(super) fn take_message(&mut self, event: &Event) {
        self.taken = self.taken.saturating_add(weight(event));
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
        let answered = events.iter().map(weight).sum();
        debug_assert!(self.on_its_way >= answered);
        self.on_its_way = self.on_its_way.saturating_sub(answered);
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
        let may_wait = (self.taken / 16).max(self.limit / 4);
        self.sheds = match self.sheds {
            false => self.waits() > may_wait,
            true => self.waits() > may_wait / 8 * 5,
        };
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

    /// What is used for events that are not on their way, and for all lanes.
    fn waits(&self) -> usize {
        self.to_deliver().saturating_sub(self.on_its_way)
    }

    /// What may be used in all.
    pub(super) fn limit(&self) -> usize {
        self.limit
    }

    /// Whether there is any room at all.
    pub(super) fn has_room(&self) -> bool {
        self.used() < self.limit
    }

    /// Whether lanes are to wait for more: there is room for more, or will be, it comes to lanes that have
    /// something already, and not too much waits. `all_may_go` unless lanes wait for something else.
    pub(super) fn fills_requests(&self, all_may_go: bool) -> bool {
        let shared = self.messages > self.lanes + self.lanes / 8;
        let sheds = all_may_go && self.sheds;
        let has_to_send = self.is_spent_by_messages() && self.waits() > self.limit / 8 * 5;
        !(has_to_send || sheds) && (shared || self.undelivered() < self.limit / 2)
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
mod tests;
