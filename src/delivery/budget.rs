//! Keeps the budget of bytes in flight, with one owner and one limit. Backpressure begins here.
//!
//! An event counts with its message until Pub/Sub has stored it, and with its record until its
//! dispatch row is durable. When the budget is spent, the session stops reading from PostgreSQL:
//!
//! - If messages have spent the budget, reading resumes when messages take less than two thirds of it,
//!   and records of delivered events less than three sixteenths.
//! - If records of delivered events have spent the budget, or take a quarter of it, reading resumes when
//!   an eighth of the budget is free and these records take less than an eighth.
//!
//! While the stream is behind, lanes linger until their requests are full (`backlog`). If too many bytes
//! wait in lanes, lanes send anyway until the excess is in flight. Lanes that have waited longest, and so
//! hold most, send first, and the other lanes continue to fill. If all lanes were emptied, requests would
//! have half as many messages. Too many bytes wait when they are more than:
//!
//! - five eighths of the budget, if messages have spent it. Lanes then send a little more than the third
//!   that has to go, so that one late answer does not keep reading stopped.
//! - the larger of a quarter of the budget and a sixteenth of everything that this backlog has brought.
//!   Lanes then send until five eighths of this limit remain. Events that wait when a backlog ends must
//!   still be sent, and without this limit they would be a large part of a short backlog.
//! - half of the budget, counting messages in flight, if hardly any messages share a lane: lingering
//!   then does not fill requests.

use crate::event::Event;
use crate::lanes::EVENT_OVERHEAD;

/// Overhead of a waiting event in addition to its message: its place in a lane, its share of the
/// lane's own memory, and a second copy of a small message in the buffers of the connection.
const WAITING_OVERHEAD: usize = EVENT_OVERHEAD - RECORD;

/// Memory of a lane: its key, its entry in the index, its queue. If every event has a key of its own,
/// lanes take a quarter of all memory.
const LANE: usize = 300;

/// Memory of an event until it is recorded: ids, times, Pub/Sub's message id. Long ids, keys and
/// errors are counted separately once the event's message has left memory.
const RECORD: usize = 200;

#[derive(Debug)]
pub(super) struct Budget {
    limit: usize,
    /// Messages that wait or are in flight, and their bytes.
    messages: usize,
    message_bytes: usize,
    /// Number of lanes with work.
    lanes: usize,
    /// Events without a durable dispatch row, and the bytes of long texts that
    /// [`take_texts`](Self::take_texts) has counted.
    records: usize,
    text_bytes: usize,
    /// Weight of the events in requests in flight.
    on_its_way: usize,
    /// Weight of everything that arrived since the stream last caught up.
    taken: usize,
    /// Whether too much waits: more than a quarter of the limit and more than a sixteenth of `taken`.
    /// Stays true until enough has been sent.
    sheds: bool,
    spent: Option<By>,
}

/// What has spent the budget.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum By {
    Messages,
    Records,
}

/// The weight of an event from its arrival until Pub/Sub has stored it.
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

    /// Counts a new event with its message.
    pub(super) fn take(&mut self, event: &Event) {
        self.records += 1;
        self.take_message(event);
    }

    /// Counts a new event without a message.
    pub(super) fn take_record(&mut self) {
        self.records += 1;
        self.changed();
    }

    /// Notes that the stream has caught up: the backlog has ended.
    pub(super) fn caught_up(&mut self) {
        self.taken = 0;
    }

    /// Counts a message of an event whose record is counted already: the event's own message, or its
    /// dead letter.
    pub(super) fn take_message(&mut self, event: &Event) {
        self.taken = self.taken.saturating_add(weight(event));
        self.messages += 1;
        self.message_bytes += event.message.len();
        self.changed();
    }

    /// Gives back `messages` messages, `bytes` bytes in all.
    pub(super) fn give_back_messages(&mut self, messages: usize, bytes: usize) {
        self.messages = self.messages.saturating_sub(messages);
        self.message_bytes = self.message_bytes.saturating_sub(bytes);
        self.changed();
    }

    /// Notes that a request with these events is in flight.
    pub(super) fn sent(&mut self, events: &[Event]) {
        self.on_its_way += events.iter().map(weight).sum::<usize>();
        debug_assert!(self.on_its_way <= self.undelivered() + self.messages * RECORD);
    }

    /// Notes that a request with these events was answered, with success or failure. The request is
    /// no longer in flight.
    pub(super) fn answered(&mut self, events: &[Event]) {
        let answered = events.iter().map(weight).sum();
        debug_assert!(self.on_its_way >= answered);
        self.on_its_way = self.on_its_way.saturating_sub(answered);
    }

    /// Counts the bytes of an event's long texts: its id while its dead letter is unsent, and the
    /// ids, key and error of a record until its rows are durable.
    pub(super) fn take_texts(&mut self, bytes: usize) {
        self.text_bytes += bytes;
        self.changed();
    }

    /// Gives back texts that [`take_texts`](Self::take_texts) has counted.
    pub(super) fn give_back_texts(&mut self, bytes: usize) {
        self.text_bytes = self.text_bytes.saturating_sub(bytes);
        self.changed();
    }

    /// Gives back the records of `events` events.
    pub(super) fn give_back_records(&mut self, events: usize) {
        self.records = self.records.saturating_sub(events);
        self.changed();
    }

    /// Sets the number of lanes with work.
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
        let by = if self.undelivered() >= self.limit / 2 {
            By::Messages
        } else {
            self.spent.unwrap_or(By::Records)
        };
        self.spent = is_full.then_some(by);
        let may_wait = (self.taken / 16).max(self.limit / 4);
        self.sheds = if self.sheds {
            self.waits() > may_wait / 8 * 5
        } else {
            self.waits() > may_wait
        };
    }

    pub(super) fn used(&self) -> usize {
        self.undelivered() + self.records * RECORD + self.text_bytes
    }

    /// Bytes used for messages and lanes.
    fn undelivered(&self) -> usize {
        self.message_bytes + self.messages * WAITING_OVERHEAD + self.lanes * LANE
    }

    /// Bytes used for delivered events that are not recorded yet.
    fn to_record(&self) -> usize {
        self.records.saturating_sub(self.messages) * RECORD + self.text_bytes
    }

    /// Bytes used for events that are not delivered yet, and for lanes.
    fn to_deliver(&self) -> usize {
        self.used() - self.to_record()
    }

    /// Bytes used for events that are not in flight, and for all lanes.
    fn waits(&self) -> usize {
        self.to_deliver().saturating_sub(self.on_its_way)
    }

    /// The limit in bytes.
    pub(super) fn limit(&self) -> usize {
        self.limit
    }

    /// Whether any byte of the budget is free.
    pub(super) fn has_room(&self) -> bool {
        self.used() < self.limit
    }

    /// Whether lanes should linger. They should not if too many bytes wait, or if messages take half
    /// of the budget and hardly any messages share a lane. While some lanes wait for a retry or for
    /// their topic, `all_may_go` is false, and the limit of a quarter (or a sixteenth) does not
    /// apply.
    pub(super) fn fills_requests(&self, all_may_go: bool) -> bool {
        let shared = self.messages > self.lanes + self.lanes / 8;
        let sheds = all_may_go && self.sheds;
        let has_to_send = self.is_spent_by_messages() && self.waits() > self.limit / 8 * 5;
        !(has_to_send || sheds) && (shared || self.undelivered() < self.limit / 2)
    }

    /// Whether messages have spent the budget. If records have spent it, nothing needs to be sent: the
    /// records are written soon.
    pub(super) fn is_spent_by_messages(&self) -> bool {
        self.spent == Some(By::Messages)
    }

    /// Whether nothing more may be read for now. An empty budget accepts one event of any size.
    pub(super) fn is_spent(&self) -> bool {
        self.spent.is_some()
    }
}

#[cfg(test)]
mod tests;
