//! One lane: a queue, at most one request in flight, and the bisection that finds an event that
//! Pub/Sub refuses.
//!
//! Pub/Sub stores a request whole or not at all, so one bad event makes Pub/Sub refuse the whole request, and
//! the answer does not say which event is bad. To bisect, the lane sends ever smaller parts from the front,
//! in order. If Pub/Sub stores a part, the part was good. If Pub/Sub refuses a part, the part contains a bad
//! event. An event that is refused alone is bad. Order is kept throughout, no stored event is sent twice, and
//! finding one bad event among `n` takes about `log2(n)` requests.

use std::collections::VecDeque;
use std::time::Instant;

use decoder::PgTimestamp;

use super::limits::{
    MAX_BYTES, MAX_MESSAGES, MESSAGE_FRAMING, WORTHWHILE_BYTES, WORTHWHILE_MESSAGES,
};
use super::request::{LaneKey, Request};
use crate::event::Event;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LaneState {
    Ready,
    /// Ready, but its topic already has as many requests in flight as the topic's limit allows.
    Parked,
    InFlight,
    /// The lane waits until this time to retry a failed request.
    Waiting(Instant),
}

#[derive(Debug)]
pub(super) struct Lane {
    pub(super) key: LaneKey,
    pub(super) state: LaneState,
    queue: VecDeque<Event>,
    /// Bytes of the messages in `queue`, with their framing.
    bytes: usize,
    /// A failed request, retried unchanged before everything else. Boxed, because there are many
    /// lanes and few of them have a failed request.
    again: Option<Box<Request>>,
    /// The number of suspects; 0 if there is no bisection. At least one of the first `suspects` events of the lane is
    /// bad, counting from the events in flight and in `again`.
    suspects: usize,
    /// Number of events in the request in flight.
    in_flight: u32,
    /// Commit time of the first event in the request in flight.
    first_in_flight: PgTimestamp,
    /// Whether the last request failed and still waits for a successful retry.
    pub(super) is_failing: bool,
}

impl Lane {
    pub(super) fn new(key: LaneKey) -> Self {
        Self {
            key,
            state: LaneState::Ready,
            queue: VecDeque::new(),
            bytes: 0,
            again: None,
            suspects: 0,
            in_flight: 0,
            first_in_flight: PgTimestamp::default(),
            is_failing: false,
        }
    }

    pub(super) fn push(&mut self, event: Event) {
        if self.queue.capacity() == 0 {
            // Reserve room for one event. By default a `VecDeque` reserves room for four events, which would be most
            // of a lane's memory when every event has its own key.
            self.queue.reserve_exact(1);
        }
        self.bytes += bytes_in_request(&event);
        self.queue.push_back(event);
    }

    /// Whether no event waits in the lane. A request may be in flight.
    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty() && self.again.is_none()
    }

    /// Whether the lane should send now instead of lingering. It should if it has enough events for an
    /// efficient request, or if it has a retry or a bisection.
    pub(super) fn is_worthwhile(&self) -> bool {
        self.queue.len() >= WORTHWHILE_MESSAGES
            || self.bytes >= WORTHWHILE_BYTES
            || self.suspects > 0
            || self.again.is_some()
    }

    /// Returns the next request. The lane must be ready and not empty; `index` is the index of the lane.
    pub(super) fn next_request(&mut self, index: usize) -> Request {
        self.state = LaneState::InFlight;
        let request = match self.again.take() {
            Some(again) => *again,
            None => self.new_request(index),
        };
        self.in_flight = u32::try_from(request.events.len()).unwrap_or(u32::MAX);
        if let Some(first) = request.events.first() {
            self.first_in_flight = first.origin.commit_time;
        }
        request
    }

    fn new_request(&mut self, index: usize) -> Request {
        let most = match self.suspects {
            0 => MAX_MESSAGES,
            suspects => (suspects / 2).max(1),
        };
        let events = if self.queue.len() <= most && self.bytes <= MAX_BYTES {
            // The usual case: the request takes over the queue's memory, and nothing is copied.
            self.all()
        } else {
            self.front(most)
        };
        Request {
            lane: index,
            key: self.key.clone(),
            events,
            failed_attempts: 0,
        }
    }

    fn all(&mut self) -> Vec<Event> {
        self.bytes = 0;
        std::mem::take(&mut self.queue).into()
    }

    /// Takes events from the front: at least one, at most `most`, and only as many as fit into a request.
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

    /// Notes that Pub/Sub has stored the request in flight, which had this many events.
    pub(super) fn stored(&mut self, events: usize) {
        self.state = LaneState::Ready;
        (self.in_flight, self.is_failing) = (0, false);
        self.suspects = self.suspects.saturating_sub(events);
    }

    /// Notes that the request failed and will be retried at `until`.
    pub(super) fn wait(&mut self, until: Instant, request: Request) {
        self.state = LaneState::Waiting(until);
        (self.in_flight, self.is_failing) = (0, true);
        self.again = Some(Box::new(request));
    }

    /// Notes that Pub/Sub permanently refused a request with these events. If there is only one event, it is
    /// bad, and this method returns it. If there are several, they go back to the front of the queue and are
    /// bisected, and this method returns `None`.
    pub(super) fn refused(&mut self, mut events: Vec<Event>) -> Option<Event> {
        self.state = LaneState::Ready;
        (self.in_flight, self.is_failing) = (0, false);
        if events.len() == 1 {
            // The bad event is found, so end the bisection. The suspects behind it may all be good, so the lane sends
            // large requests again.
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

    /// How many events have not been stored yet, including those in flight.
    pub(super) fn events(&self) -> u64 {
        let again = self
            .again
            .as_ref()
            .map_or(0, |request| request.events.len());
        (self.queue.len() + again) as u64 + u64::from(self.in_flight)
    }

    /// Commit time of the first event that is not stored yet; `None` if the lane has no event.
    pub(super) fn oldest(&self) -> Option<PgTimestamp> {
        if self.in_flight > 0 {
            return Some(self.first_in_flight);
        }
        let again = self.again.as_ref().and_then(|again| again.events.first());
        let first = again.or_else(|| self.queue.front());
        first.map(|event| event.origin.commit_time)
    }

    /// The events that wait in the lane, except those of the request in flight.
    pub(super) fn waiting_events(&self) -> impl Iterator<Item = &Event> {
        let again = self.again.iter().flat_map(|request| &request.events);
        again.chain(&self.queue)
    }

    /// All waiting events, in the order in which they would be sent.
    pub(super) fn into_events(self) -> impl Iterator<Item = Event> {
        let again = self.again.map(|request| request.events);
        again.into_iter().flatten().chain(self.queue)
    }
}

fn bytes_in_request(event: &Event) -> usize {
    event.message.len() + MESSAGE_FRAMING
}
