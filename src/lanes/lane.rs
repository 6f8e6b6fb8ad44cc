//! One lane: a queue, at most one request on its way, and the search for an event that is refused.
//!
//! Pub/Sub stores a request whole or not at all, so one bad event refuses its whole request, and
//! the answer does not say which one. The search sends ever smaller parts of it from the front,
//! in order: what is stored was not it, what is refused holds it, and what is refused alone is it.
//! Order is kept all the while, nothing is sent twice that was stored, and a bad event among `n`
//! costs about `log2(n)` requests.

use std::collections::VecDeque;
use std::time::Instant;

use super::event::{Event, LaneKey, Request};
use super::{MAX_BYTES, MAX_MESSAGES, MESSAGE_FRAMING, WORTHWHILE_BYTES, WORTHWHILE_MESSAGES};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    Ready,
    /// Ready, but its topic may not have another request on its way.
    Parked,
    InFlight,
    /// A failed request goes again at this time.
    Waiting(Instant),
}

#[derive(Debug)]
pub(super) struct Lane {
    pub(super) key: LaneKey,
    pub(super) state: State,
    queue: VecDeque<Event>,
    /// Bytes of the messages in `queue`, with their framing.
    bytes: usize,
    /// A request that failed; goes unchanged before all else. Few lanes have one, and lanes are many.
    again: Option<Box<Request>>,
    /// So many events at the front hold at least one that Pub/Sub refuses; 0 when none is known.
    suspects: usize,
}

impl Lane {
    pub(super) fn new(key: LaneKey) -> Self {
        Self {
            key,
            state: State::Ready,
            queue: VecDeque::new(),
            bytes: 0,
            again: None,
            suspects: 0,
        }
    }

    /// Puts an event at the end.
    pub(super) fn push(&mut self, event: Event) {
        if self.queue.capacity() == 0 {
            // Where every event has a key of its own, a usual queue's first four places are most
            // of what a lane takes.
            self.queue.reserve_exact(1);
        }
        self.bytes += bytes_in_request(&event);
        self.queue.push_back(event);
    }

    /// Whether nothing waits in it.
    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty() && self.again.is_none()
    }

    /// Whether it is worth a request also while more input is at hand. What waits is enough for one
    /// that costs hardly more than it has to; and a search is not put off.
    pub(super) fn is_worthwhile(&self) -> bool {
        self.queue.len() >= WORTHWHILE_MESSAGES
            || self.bytes >= WORTHWHILE_BYTES
            || self.suspects > 0
            || self.again.is_some()
    }

    /// The next request; the lane must be ready and not be empty.
    pub(super) fn next_request(&mut self, place: usize) -> Request {
        self.state = State::InFlight;
        if let Some(again) = self.again.take() {
            return *again;
        }
        let most = match self.suspects {
            0 => MAX_MESSAGES,
            suspects => (suspects / 2).max(1),
        };
        let events = match self.queue.len() <= most && self.bytes <= MAX_BYTES {
            // The usual case: the memory goes along, nothing is copied.
            true => self.all(),
            false => self.front(most),
        };
        Request {
            lane: place,
            key: self.key.clone(),
            events,
            failed_attempts: 0,
        }
    }

    fn all(&mut self) -> Vec<Event> {
        self.bytes = 0;
        std::mem::take(&mut self.queue).into()
    }

    /// The first events, at most so many, as far as they fit into a request; one in any case.
    fn front(&mut self, most: usize) -> Vec<Event> {
        let mut bytes = 0;
        let fitting = self.queue.iter().take(most).take_while(|event| {
            bytes += bytes_in_request(event);
            bytes <= MAX_BYTES
        });
        let count = fitting.count().max(1);
        let events: Vec<Event> = self.queue.drain(..count).collect();
        self.bytes -= events.iter().map(bytes_in_request).sum::<usize>();
        events
    }

    /// So many events from the front were stored.
    pub(super) fn stored(&mut self, events: usize) {
        self.state = State::Ready;
        self.suspects = self.suspects.saturating_sub(events);
    }

    /// The request failed and goes again.
    pub(super) fn wait(&mut self, until: Instant, request: Request) {
        self.state = State::Waiting(until);
        self.again = Some(Box::new(request));
    }

    /// The request was refused for good: its only event, which is the bad one, or `None` while
    /// the search goes on.
    pub(super) fn refused(&mut self, mut events: Vec<Event>) -> Option<Event> {
        self.state = State::Ready;
        if events.len() == 1 {
            // Whether the others are good is not known any more.
            self.suspects = 0;
            return events.pop();
        }
        self.suspects = events.len();
        self.bytes += events.iter().map(bytes_in_request).sum::<usize>();
        for event in events.into_iter().rev() {
            self.queue.push_front(event);
        }
        None
    }

    /// All that waits, in order.
    pub(super) fn into_events(self) -> impl Iterator<Item = Event> {
        let again = self.again.map(|request| request.events);
        again.into_iter().flatten().chain(self.queue)
    }
}

fn bytes_in_request(event: &Event) -> usize {
    event.message.len() + MESSAGE_FRAMING
}
