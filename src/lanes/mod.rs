//! Lanes: one queue per (topic, ordering key), because order matters only within a key.
//!
//! A lane has at most one request in flight. The next request takes everything that waits in the
//! lane, in order. A failed request stays whole and is retried before anything later. If Pub/Sub
//! refuses a request for good, the lane bisects it to find the bad event (`lane`). Lanes take turns
//! under one global limit on requests in flight, plus one limit per throttled topic (`concurrency`).
//! A lane exists only while it has work, so memory grows with the events in the lanes, not with the
//! number of keys.
//!
//! Messages without an ordering key have no order to keep: each topic has a few lanes for them, so
//! that they can be sent in parallel.
//!
//! The lanes are a state machine without IO; the caller passes in the time.

mod concurrency;
mod lane;
mod limits;
mod request;
mod survey;

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

pub(crate) use limits::EVENT_OVERHEAD;
pub use limits::{Load, Serve};
pub use request::{LaneKey, Request};
pub use survey::LaneStanding;

use crate::event::{Event, OrderingKey};
use concurrency::{Concurrency, SlowTopics};
use lane::{Lane, LaneState};
use limits::{LONGEST_WAIT, UNORDERED_LANES};

/// A place for a lane, reused after the lane ends.
#[derive(Debug, Default)]
struct LaneSlot {
    lane: Option<Lane>,
    /// Whether this place is in `ready`, which contains each place at most once.
    listed: bool,
    /// When this place was added to `ready`, if known.
    listed_at: Option<Instant>,
    /// Whether this place is in `worthwhile`.
    listed_as_worthwhile: bool,
}

/// All lanes.
#[derive(Debug)]
pub struct Lanes {
    places: Vec<LaneSlot>,
    free: Vec<usize>,
    /// Uses a fast hash, because every event is looked up here.
    index: HashMap<LaneKey, usize, foldhash::fast::RandomState>,
    /// Places whose lane may have something to send, in the order of their turns.
    ready: VecDeque<usize>,
    /// Places whose lane has become worthwhile or was unparked since it was last served.
    worthwhile: VecDeque<usize>,
    waiting: BTreeSet<(Instant, usize)>,
    in_flight: usize,
    concurrency: Concurrency,
    slow_topics: SlowTopics,
    next_unordered: u32,
    /// Whether full lanes, and whether due retries, had the first choice at the last turn.
    full_lane_was_last: bool,
    failed_was_last: bool,
    /// The time of the last call of [`next_request`](Self::next_request).
    clock: Option<Instant>,
}

impl Lanes {
    /// Creates the lanes, without events and with at most `max_in_flight` requests in flight.
    pub fn new(max_in_flight: usize) -> Self {
        Self {
            places: Vec::new(),
            free: Vec::new(),
            index: HashMap::default(),
            ready: VecDeque::new(),
            worthwhile: VecDeque::new(),
            waiting: BTreeSet::new(),
            in_flight: 0,
            concurrency: Concurrency::new(max_in_flight),
            slow_topics: SlowTopics::default(),
            next_unordered: 0,
            full_lane_was_last: false,
            failed_was_last: false,
            clock: None,
        }
    }

    /// Appends an event to its lane.
    pub fn push(&mut self, topic: Arc<str>, ordering_key: OrderingKey, event: Event) {
        let unordered = if ordering_key.is_unordered() {
            self.next_unordered = (self.next_unordered + 1) % UNORDERED_LANES;
            self.next_unordered
        } else {
            0
        };
        let key = LaneKey {
            topic,
            ordering_key,
            unordered,
        };
        let place = match self.index.get(&key) {
            Some(place) => *place,
            None => self.open(key),
        };
        self.lane(place).push(event);
        self.list_if_worthwhile(place);
    }

    /// The lane in use at `place`.
    fn lane(&mut self, place: usize) -> &mut Lane {
        let lane = self.places[place].lane.as_mut();
        lane.expect("invariant: a lane that is indexed, in flight or waiting exists")
    }

    fn open(&mut self, key: LaneKey) -> usize {
        let lane = Lane::new(key.clone());
        let place = self.free.pop().unwrap_or_else(|| {
            self.places.push(LaneSlot::default());
            self.places.len() - 1
        });
        self.places[place].lane = Some(lane);
        self.index.insert(key, place);
        self.list(place);
        place
    }

    /// The next request to send at `now`, if there is one and the limit allows it.
    pub fn next_request(&mut self, now: Instant, serve: Serve) -> Option<Request> {
        self.clock = Some(now);
        if self.in_flight >= self.concurrency.limit() {
            return None;
        }
        // Alternate between retries and new requests. Otherwise, while the limit is one, a few lanes
        // that keep failing would use up the limit, and no success of another lane could raise the
        // limit.
        self.failed_was_last = !self.failed_was_last;
        if self.failed_was_last {
            self.due(now).or_else(|| self.fresh(now, serve))
        } else {
            self.fresh(now, serve).or_else(|| self.due(now))
        }
    }

    /// The next request that is not a timed retry.
    fn fresh(&mut self, now: Instant, serve: Serve) -> Option<Request> {
        loop {
            let place = match serve {
                Serve::Worthwhile => match self.next_overdue(now) {
                    Some(place) => place,
                    None => self.next_worthwhile()?,
                },
                Serve::All => self.next_place()?,
            };
            if let Some(request) = self.take(place) {
                return Some(request);
            }
        }
    }

    /// The place whose turn it is. Alternates between full lanes and all others, so that lanes that
    /// are always full leave room for small ones.
    fn next_place(&mut self) -> Option<usize> {
        self.full_lane_was_last = !self.full_lane_was_last;
        if self.full_lane_was_last
            && let Some(place) = self.next_worthwhile()
        {
            return Some(place);
        }
        match self.ready.pop_front() {
            Some(place) => {
                self.places[place].listed = false;
                Some(place)
            }
            None => self.next_worthwhile(),
        }
    }

    /// The place at the front of the queue, if it has waited there for [`LONGEST_WAIT`].
    fn next_overdue(&mut self, now: Instant) -> Option<usize> {
        let place = *self.ready.front()?;
        let listed_at = *self.places[place].listed_at.get_or_insert(now);
        if now.saturating_duration_since(listed_at) < LONGEST_WAIT {
            return None;
        }
        self.ready.pop_front();
        self.places[place].listed = false;
        Some(place)
    }

    /// The request of a lane whose retry is due.
    fn due(&mut self, now: Instant) -> Option<Request> {
        while let Some((_, place)) = self.waiting.first().copied().filter(|(at, _)| *at <= now) {
            self.waiting.pop_first();
            self.lane(place).state = LaneState::Ready;
            if let Some(request) = self.take(place) {
                return Some(request);
            }
        }
        None
    }

    /// Returns a request with everything that waits in the lane, as far as it fits. `None` when the
    /// lane is not ready, may not send, or is gone. A place can be in both `ready` and `worthwhile`,
    /// so its lane may have been served through the other list.
    fn take(&mut self, place: usize) -> Option<Request> {
        let lane = self.places[place].lane.as_mut()?;
        if lane.state != LaneState::Ready || lane.is_empty() {
            return None;
        }
        if !self.slow_topics.admit(&lane.key.topic, place) {
            lane.state = LaneState::Parked;
            return None;
        }
        self.in_flight += 1;
        Some(lane.next_request(place))
    }

    /// Notes that a request was published. Its lane continues, or ends when no event waits in it.
    pub fn finished(&mut self, request: &Request) {
        self.concurrency.succeeded();
        let max = self.concurrency.max();
        self.slow_topics.succeeded(&request.key.topic, max);
        self.lane(request.lane).stored(request.events.len());
        self.ended(&request.key.topic);
        self.go_on(request.lane);
        self.shrink_when_empty();
    }

    /// Notes that a request failed. The request is retried unchanged at `again_at`, before
    /// everything else in its lane.
    pub fn failed(&mut self, mut request: Request, again_at: Instant, load: Load) {
        request.count_failure();
        let (place, topic) = (request.lane, request.key.topic.clone());
        self.waiting.insert((again_at, place));
        self.lane(place).wait(again_at, request);
        match load {
            Load::Reduce => self.concurrency.failed(),
            Load::ReduceTopic => self.throttled(&topic),
            Load::Keep => {}
        }
        self.ended(&topic);
    }

    /// Notes that Pub/Sub has refused a request for good. If the request had a single event, removes this
    /// bad event from its lane and returns it. Otherwise returns `None`: the events are sent again in
    /// smaller requests, before everything else in their lane.
    pub fn refused(&mut self, mut request: Request) -> Option<Event> {
        request.count_failure();
        let place = request.lane;
        let bad = self.lane(place).refused(request.events);
        self.ended(&request.key.topic);
        self.go_on(place);
        bad
    }

    /// Removes a lane, which must have no request in flight, and returns its events.
    pub fn close(&mut self, key: &LaneKey) -> Vec<Event> {
        let Some(place) = self.index.remove(key) else {
            return Vec::new();
        };
        let lane = self.places[place].lane.take();
        let lane = lane.expect("invariant: an indexed lane exists");
        debug_assert!(
            lane.state != LaneState::InFlight,
            "its request would be lost"
        );
        if let LaneState::Waiting(at) = lane.state {
            self.waiting.remove(&(at, place));
        }
        self.free.push(place);
        lane.into_events().collect()
    }

    /// Notes that a request of `topic` is no longer in flight, and unparks lanes of the topic that may send
    /// now.
    fn ended(&mut self, topic: &str) {
        self.in_flight -= 1;
        for place in self.slow_topics.ended(topic) {
            // The lane may have ended in the meantime.
            if let Some(lane) = self.places.get_mut(place).and_then(|p| p.lane.as_mut())
                && lane.state == LaneState::Parked
            {
                lane.state = LaneState::Ready;
                self.list_as_worthwhile(place);
            }
        }
    }

    /// Lists a lane again after its request has ended, or removes it when it is empty.
    fn go_on(&mut self, place: usize) {
        let lane = self.lane(place);
        if lane.is_empty() {
            let key = lane.key.clone();
            self.index.remove(&key);
            self.places[place].lane = None;
            self.free.push(place);
            return;
        }
        self.list_if_worthwhile(place);
        self.list(place);
    }

    fn throttled(&mut self, topic: &Arc<str>) {
        let lanes = self.places.iter().filter_map(|place| place.lane.as_ref());
        let in_flight =
            lanes.filter(|lane| lane.state == LaneState::InFlight && lane.key.topic == *topic);
        // Add the failed request, which still counts as in flight.
        self.slow_topics.throttled(topic, || in_flight.count() + 1);
    }

    /// Retries the failed requests of `topic` at `at`, if that is sooner than planned, because the reason
    /// to wait is gone.
    pub fn hasten(&mut self, topic: &str, at: Instant) {
        for place in 0..self.places.len() {
            let Some(lane) = self.places[place].lane.as_mut() else {
                continue;
            };
            if let LaneState::Waiting(until) = &mut lane.state
                && &*lane.key.topic == topic
                && *until > at
            {
                self.waiting.remove(&(*until, place));
                self.waiting.insert((at, place));
                *until = at;
            }
        }
    }

    /// When the next retry is due. `None` if no lane waits for a retry, or if the global limit allows no
    /// request, because a retry then has to wait for an answer first.
    pub fn next_due(&self) -> Option<Instant> {
        if self.in_flight >= self.concurrency.limit() {
            return None;
        }
        self.waiting.first().map(|(at, _)| *at)
    }

    fn list(&mut self, place: usize) {
        if !self.places[place].listed {
            self.places[place].listed = true;
            self.places[place].listed_at = self.clock;
            self.ready.push_back(place);
        }
    }

    fn list_if_worthwhile(&mut self, place: usize) {
        let lane = self.lane(place);
        if lane.state == LaneState::Ready && lane.is_worthwhile() {
            self.list_as_worthwhile(place);
        }
    }

    fn list_as_worthwhile(&mut self, place: usize) {
        if !self.places[place].listed_as_worthwhile {
            self.places[place].listed_as_worthwhile = true;
            self.worthwhile.push_back(place);
        }
    }

    fn next_worthwhile(&mut self) -> Option<usize> {
        let place = self.worthwhile.pop_front()?;
        self.places[place].listed_as_worthwhile = false;
        Some(place)
    }

    /// Frees the memory of the large tables that a burst of many keys has left empty.
    fn shrink_when_empty(&mut self) {
        const KEPT: usize = 1 << 14;
        if self.index.is_empty() && self.places.len() > KEPT {
            *self = Self {
                concurrency: self.concurrency,
                slow_topics: std::mem::take(&mut self.slow_topics),
                next_unordered: self.next_unordered,
                clock: self.clock,
                ..Self::new(self.concurrency.max())
            };
        }
    }
}

#[cfg(test)]
mod tests;
