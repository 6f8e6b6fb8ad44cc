//! Flow control: when to stop reading from PostgreSQL, and when lanes linger.
//!
//! All events in memory share one budget of bytes (`in_flight_mib`). [`memory`] counts these bytes. The watermarks in
//! this module are shares of the budget, except [`BACKLOG_SHARE`] and [`BACKLOG_LOW`].
//!
//! **Reading (backpressure).** The session reads while two gates are open. A gate closes at its high watermark. It
//! opens again only below its low watermark, so that reading does not stop and start for each event:
//!
//! | gate | closes when | opens when |
//! |---|---|---|
//! | queue | events use the whole budget | undelivered events use less than [`QUEUE_LOW`] |
//! | unrecorded | delivered, unrecorded events use [`UNRECORDED_HIGH`] | they use less than [`UNRECORDED_LOW`] |
//!
//! There is one exception. Lanes that wait for a retry or for a throttled topic may keep the queue gate closed for
//! long. While there are such lanes, the session ignores the gates, and reads until the budget is full. Otherwise the
//! events of these lanes would hold up the events of other keys ([`super::Delivery::takes_events`]).
//!
//! **Linger.** A lane lingers if it waits until it has enough events for an efficient request, but at most a second
//! (`lanes`). Lanes linger while the stream is behind, or while a task reads a table ([`backlog`]). At all other times,
//! lanes send their events at once.
//!
//! Lanes stop lingering in three cases:
//!
//! - **The queue gate is closed.** Sending frees memory. Lanes linger again once queued events use at most
//!   [`QUEUE_SENDS_TO`].
//! - **The queue is too long.** The relay has caught up only when it has also sent the queued events. So the queue has
//!   a limit: [`BACKLOG_HIGH`] of the budget, or [`BACKLOG_SHARE`] of everything that has arrived since the stream
//!   last caught up. The larger limit applies. Lanes linger again once the queue has fallen to [`BACKLOG_LOW`] of the
//!   limit. This case does not apply while some lanes wait for a retry or for a throttled topic
//!   ([`FlowControl::may_linger`]).
//! - **Lingering does not fill requests.** Messages use [`UNSHARED_HIGH`], but nearly every lane has only one message.
//!
//! In each case, the relay alternates between the lanes with enough events for an efficient request and the lanes that
//! have waited longest (`lanes`). Each case ends before the relay has sent the events of all lanes. The remaining lanes
//! then linger again and collect more events. If a case ended only when all lanes are empty, requests would have half
//! as many messages.

pub(crate) mod backlog;
mod memory;

use crate::event::Event;
use memory::EventMemory;
pub(in crate::delivery) use memory::weight;

/// Low watermark of undelivered events: the queue gate opens below it.
const QUEUE_LOW: Share = Share(2, 3);

/// While the queue gate is closed, lanes send events without linger until the queued events use only this share of the
/// budget. It is a little less than [`QUEUE_LOW`], so that the gate opens even if one answer is late.
const QUEUE_SENDS_TO: Share = Share(5, 8);

/// High watermark of delivered events whose dispatch rows are not durable yet. The rest of the budget
/// stays free for messages.
const UNRECORDED_HIGH: Share = Share(1, 4);

/// Low watermark of delivered events whose dispatch rows are not durable yet.
const UNRECORDED_LOW: Share = Share(1, 8);

/// High watermark of queued events while the stream is behind. Above it, lanes do not linger.
const BACKLOG_HIGH: Share = Share(1, 4);

/// Another high watermark of queued events while the stream is behind. It is a share of everything that has arrived
/// since the stream last caught up, not of the budget. The higher of this watermark and [`BACKLOG_HIGH`] applies.
///
/// When the stream has caught up, the relay still has to send the queued events, which delays the end of the backlog.
/// The longer the backlog was, the less this delay matters. So after a long backlog, more events may be queued.
const BACKLOG_SHARE: Share = Share(1, 16);

/// Low watermark of queued events, as a share of their high watermark.
const BACKLOG_LOW: Share = Share(5, 8);

/// Share of the budget at which lanes stop lingering if nearly every lane has only one message.
const UNSHARED_HIGH: Share = Share(1, 2);

/// Share of the budget that released events in lanes may use while reading is stopped. Above it, the relay takes no
/// more released events from quarantine. Otherwise released events that cannot be sent would use up the memory that
/// the stream needs.
const RELEASED_HIGH: Share = Share(1, 2);

/// A fraction of a number of bytes: the numerator and the denominator.
#[derive(Debug, Clone, Copy)]
struct Share(usize, usize);

impl Share {
    fn of(self, bytes: usize) -> usize {
        bytes / self.1 * self.0
    }
}

/// A state with two thresholds: closes at a high watermark, and opens at a low watermark.
#[derive(Debug, Default)]
struct Gate {
    is_closed: bool,
}

impl Gate {
    fn update(&mut self, is_high: bool, is_low: bool) {
        self.is_closed = !is_low && (self.is_closed || is_high);
    }
}

/// The budget, and the decisions that depend on it.
#[derive(Debug)]
pub(super) struct FlowControl {
    budget: usize,
    memory: EventMemory,
    queue: Gate,
    unrecorded: Gate,
    /// Closes when queued events exceed both [`BACKLOG_HIGH`] of the budget and [`BACKLOG_SHARE`] of `backlog_bytes`.
    /// While the gate is closed, lanes send at once instead of lingering. The gate has no effect while some lanes wait
    /// for a retry or for a throttled topic.
    backlog: Gate,
    /// Weight of everything that arrived since the stream last caught up.
    backlog_bytes: usize,
}

impl FlowControl {
    /// Creates the flow control for a budget of this many bytes.
    pub(super) fn new(budget: usize) -> Self {
        Self {
            budget,
            memory: EventMemory::default(),
            queue: Gate::default(),
            unrecorded: Gate::default(),
            backlog: Gate::default(),
            backlog_bytes: 0,
        }
    }

    /// Counts a new event with its message.
    pub(super) fn take(&mut self, event: &Event) {
        self.memory.records += 1;
        self.take_message(event);
    }

    /// Counts a new event without a message.
    pub(super) fn take_record(&mut self) {
        self.memory.records += 1;
        self.update();
    }

    /// Counts a message of an event whose record is counted already: the event's own message, or its
    /// dead letter.
    pub(super) fn take_message(&mut self, event: &Event) {
        self.backlog_bytes = self.backlog_bytes.saturating_add(weight(event));
        self.memory.messages += 1;
        self.memory.message_bytes += event.message.len();
        self.update();
    }

    /// Counts the bytes of texts that may be long. The caller returns these bytes with
    /// [`give_back_texts`](Self::give_back_texts). There are two kinds of such texts:
    ///
    /// - The id of an event whose dead letter was sent. It counts until the dead letter is stored or refused.
    /// - The ids, key and error of a record. They count until the dispatch rows of the record are durable.
    pub(super) fn take_texts(&mut self, bytes: usize) {
        self.memory.text_bytes += bytes;
        self.update();
    }

    /// Returns the memory of messages to the budget. `messages` is their number, `bytes` their total size.
    pub(super) fn give_back_messages(&mut self, messages: usize, bytes: usize) {
        let memory = &mut self.memory;
        memory.messages = memory.messages.saturating_sub(messages);
        memory.message_bytes = memory.message_bytes.saturating_sub(bytes);
        self.update();
    }

    /// Returns the memory of `events` records to the budget.
    pub(super) fn give_back_records(&mut self, events: usize) {
        self.memory.records = self.memory.records.saturating_sub(events);
        self.update();
    }

    /// Returns the memory of texts to the budget, after [`take_texts`](Self::take_texts) has counted them.
    pub(super) fn give_back_texts(&mut self, bytes: usize) {
        self.memory.text_bytes = self.memory.text_bytes.saturating_sub(bytes);
        self.update();
    }

    /// Notes that a request with these events is in flight.
    pub(super) fn sent(&mut self, events: &[Event]) {
        self.memory.in_flight += events.iter().map(weight).sum::<usize>();
        debug_assert!(self.memory.in_flight <= self.memory.undelivered());
    }

    /// Notes that a request with these events was answered, with success or failure. The request is
    /// no longer in flight.
    pub(super) fn answered(&mut self, events: &[Event]) {
        let answered = events.iter().map(weight).sum();
        debug_assert!(self.memory.in_flight >= answered);
        self.memory.in_flight = self.memory.in_flight.saturating_sub(answered);
    }

    /// Sets the number of lanes with work.
    pub(super) fn weigh_lanes(&mut self, lanes: usize) {
        self.memory.lanes = lanes;
        self.update();
    }

    /// Sets the number of bytes of the moved rows that wait for the outcome of their original insert.
    pub(super) fn weigh_waiting(&mut self, bytes: usize) {
        self.memory.waiting = bytes;
        self.update();
    }

    /// Notes that the stream has caught up, so the backlog has ended.
    pub(super) fn caught_up(&mut self) {
        self.backlog_bytes = 0;
    }

    fn update(&mut self) {
        let (budget, memory) = (self.budget, &self.memory);
        let unrecorded = memory.unrecorded();
        self.unrecorded.update(
            unrecorded >= UNRECORDED_HIGH.of(budget),
            unrecorded < UNRECORDED_LOW.of(budget),
        );
        self.queue.update(
            memory.used() >= budget,
            memory.undelivered() < QUEUE_LOW.of(budget),
        );
        let high = BACKLOG_SHARE
            .of(self.backlog_bytes)
            .max(BACKLOG_HIGH.of(budget));
        let queued = memory.queued();
        self.backlog
            .update(queued > high, queued <= BACKLOG_LOW.of(high));
    }

    pub(super) fn used(&self) -> usize {
        self.memory.used()
    }

    /// Number of events that are not resolved yet.
    pub(super) fn events(&self) -> usize {
        self.memory.records
    }

    /// Whether the budget has at least one free byte.
    pub(super) fn has_room(&self) -> bool {
        self.used() < self.budget
    }

    /// Whether the session must stop reading, because the queue gate or the unrecorded gate is closed. While
    /// nothing is in memory both gates are open, so the session reads even an event that is larger than the
    /// budget.
    pub(super) fn stops_reading(&self) -> bool {
        self.queue.is_closed || self.unrecorded.is_closed
    }

    /// Whether more released events may be taken from quarantine. `queued` is the weight of the released
    /// events that are still in lanes.
    pub(super) fn may_release(&self, queued: usize) -> bool {
        !self.stops_reading() || queued < RELEASED_HIGH.of(self.budget)
    }

    /// Whether the queue gate is closed. If so, the caller must free memory, because the gate opens only when
    /// undelivered events use less of it. A closed unrecorded gate does not require this: it opens as soon as the
    /// writer has recorded enough events.
    pub(super) fn queue_is_full(&self) -> bool {
        self.queue.is_closed
    }

    /// Whether lanes may linger. The module's documentation lists the cases in which they may not.
    ///
    /// `all_may_go` is false if some lanes wait for a retry or for a throttled topic. The other lanes may then linger
    /// even if the backlog gate is closed. The events of the waiting lanes may make up most of the queue. So the other
    /// lanes cannot shorten the queue enough by sending early.
    pub(super) fn may_linger(&self, all_may_go: bool) -> bool {
        let memory = &self.memory;
        let opens_queue = self.queue.is_closed && memory.queued() > QUEUE_SENDS_TO.of(self.budget);
        let ends_backlog = self.backlog.is_closed && all_may_go;
        let fills_nothing =
            !memory.lanes_are_shared() && memory.messages() >= UNSHARED_HIGH.of(self.budget);
        !(opens_queue || ends_backlog || fills_nothing)
    }
}

#[cfg(test)]
mod tests;
