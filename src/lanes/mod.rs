//! Lanes: one queue per (topic, ordering key), because order matters only within a key.
//!
//! A lane has at most one request in flight. The next request takes the events that wait in the lane, in order, up to
//! the maximum size of a request. A failed request keeps its events and is retried before anything later. If Pub/Sub
//! permanently refuses a request, the lane bisects it to find the bad event (`lane`). Lanes take turns under one
//! global limit on requests in flight, plus one limit per throttled topic (`concurrency`). A lane exists
//! only while it has work, so memory grows with the number of waiting events, not with the number of
//! keys.
//!
//! Messages without an ordering key can be sent in any order. Each topic has several lanes for them, so
//! that they are sent in parallel.
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
use limits::{LINGER_LIMIT, UNORDERED_LANES};

/// Room for one lane in `entries`. The entry is reused for another lane when its lane ends.
#[derive(Debug, Default)]
struct LaneEntry {
    lane: Option<Lane>,
    /// Whether the index of this entry is in `ready`, which contains each index at most once.
    listed: bool,
    /// When the index was added to `ready`. `None` if this was before the first call of `next_request`.
    listed_at: Option<Instant>,
    /// Whether the index is in `worthwhile`, which also contains each index at most once.
    listed_as_worthwhile: bool,
}

/// All lanes.
#[derive(Debug)]
pub struct Lanes {
    entries: Vec<LaneEntry>,
    free: Vec<usize>,
    /// The index of each lane by its key. Every event is looked up here, so the map uses a fast hash.
    by_key: HashMap<LaneKey, usize, foldhash::fast::RandomState>,
    /// Indexes of lanes that may have something to send, in the order in which they take turns.
    ready: VecDeque<usize>,
    /// Indexes of lanes that should not linger, because they are worthwhile (`Lane::is_worthwhile`) or were unparked.
    worthwhile: VecDeque<usize>,
    waiting: BTreeSet<(Instant, usize)>,
    in_flight: usize,
    concurrency: Concurrency,
    slow_topics: SlowTopics,
    next_unordered: u32,
    /// Whether worthwhile lanes had the first choice at the last turn.
    full_lane_was_last: bool,
    /// Whether due retries had the first choice at the last turn.
    failed_was_last: bool,
    /// The time of the last call of [`next_request`](Self::next_request). `None` before the first call.
    clock: Option<Instant>,
}

impl Lanes {
    /// Creates the lanes, without events and with at most `max_in_flight` requests in flight.
    pub fn new(max_in_flight: usize) -> Self {
        Self {
            entries: Vec::new(),
            free: Vec::new(),
            by_key: HashMap::default(),
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
        let index = match self.by_key.get(&key) {
            Some(index) => *index,
            None => self.open(key),
        };
        self.lane(index).push(event);
        self.list_if_worthwhile(index);
    }

    /// The lane at this index, which must be in use.
    fn lane(&mut self, index: usize) -> &mut Lane {
        let lane = self.entries[index].lane.as_mut();
        lane.expect("invariant: a lane that is listed, in flight or waiting exists")
    }

    fn open(&mut self, key: LaneKey) -> usize {
        let lane = Lane::new(key.clone());
        let index = self.free.pop().unwrap_or_else(|| {
            self.entries.push(LaneEntry::default());
            self.entries.len() - 1
        });
        self.entries[index].lane = Some(lane);
        self.by_key.insert(key, index);
        self.list(index);
        index
    }

    /// Returns the next request to send at `now`, if there is one and the limits allow it.
    pub fn next_request(&mut self, now: Instant, serve: Serve) -> Option<Request> {
        self.clock = Some(now);
        let next_start = self.concurrency.next_start();
        if self.in_flight >= self.concurrency.limit() || next_start.is_some_and(|at| now < at) {
            return None;
        }
        // Alternate between retries and new requests. Otherwise, while the limit is one, a few lanes that keep
        // failing would use up the limit. No other lane could send, so no success could raise the limit.
        self.failed_was_last = !self.failed_was_last;
        let request = if self.failed_was_last {
            self.due(now).or_else(|| self.fresh(now, serve))
        } else {
            self.fresh(now, serve).or_else(|| self.due(now))
        };
        if request.is_some() {
            self.concurrency.started(now);
        }
        request
    }

    /// Returns the next request of a lane that is not waiting for a retry.
    fn fresh(&mut self, now: Instant, serve: Serve) -> Option<Request> {
        loop {
            let index = match serve {
                Serve::Worthwhile => match self.next_overdue(now) {
                    Some(index) => index,
                    None => self.next_worthwhile()?,
                },
                Serve::All => self.next_index()?,
            };
            if let Some(request) = self.take(index) {
                return Some(request);
            }
        }
    }

    /// The index of the lane whose turn it is. Alternates between worthwhile lanes and all lanes, because otherwise
    /// small lanes would never send while some lanes are always full.
    fn next_index(&mut self) -> Option<usize> {
        self.full_lane_was_last = !self.full_lane_was_last;
        if self.full_lane_was_last
            && let Some(index) = self.next_worthwhile()
        {
            return Some(index);
        }
        match self.ready.pop_front() {
            Some(index) => {
                self.entries[index].listed = false;
                Some(index)
            }
            None => self.next_worthwhile(),
        }
    }

    /// The index at the front of `ready`, if its lane has waited there for [`LINGER_LIMIT`].
    fn next_overdue(&mut self, now: Instant) -> Option<usize> {
        let index = *self.ready.front()?;
        let listed_at = *self.entries[index].listed_at.get_or_insert(now);
        if now.saturating_duration_since(listed_at) < LINGER_LIMIT {
            return None;
        }
        self.ready.pop_front();
        self.entries[index].listed = false;
        Some(index)
    }

    /// Returns the request of a lane whose retry is due.
    fn due(&mut self, now: Instant) -> Option<Request> {
        while let Some((_, index)) = self.waiting.first().copied().filter(|(at, _)| *at <= now) {
            self.waiting.pop_first();
            self.lane(index).state = LaneState::Ready;
            if let Some(request) = self.take(index) {
                return Some(request);
            }
        }
        None
    }

    /// Returns the next request of a lane. Returns `None` when the lane is not ready, is empty, is gone, or must
    /// wait because its topic is throttled. An index may be out of date, because a lane can be in both `ready` and
    /// `worthwhile` and may have sent already through the other list.
    fn take(&mut self, index: usize) -> Option<Request> {
        let lane = self.entries[index].lane.as_mut()?;
        if lane.state != LaneState::Ready || lane.is_empty() {
            return None;
        }
        if !self.slow_topics.admit(&lane.key.topic, index) {
            lane.state = LaneState::Parked;
            return None;
        }
        self.in_flight += 1;
        Some(lane.next_request(index))
    }

    /// Notes that a request was published. Its lane sends its next events, or ends if it has none.
    pub fn finished(&mut self, request: &Request) {
        self.concurrency.answered();
        let max = self.concurrency.max();
        self.slow_topics.succeeded(&request.key.topic, max);
        self.lane(request.lane).stored(request.events.len());
        self.ended(&request.key.topic);
        self.go_on(request.lane);
        self.shrink_when_empty();
    }

    /// Notes that a request failed. Its lane retries the same request at `again_at`, before everything
    /// else in the lane.
    pub fn failed(&mut self, mut request: Request, again_at: Instant, load: Load) {
        if load != Load::NotSent {
            request.count_failure(load.may_be_stored());
        }
        let (index, topic) = (request.lane, request.key.topic.clone());
        self.waiting.insert((again_at, index));
        self.lane(index).wait(again_at, request);
        match load {
            Load::NotSent | Load::Broken => {
                self.concurrency.unreachable(self.clock.unwrap_or(again_at))
            }
            Load::Reduce => self.concurrency.failed(),
            Load::ReduceTopic => self.throttled(&topic),
            Load::Keep => self.concurrency.answered(),
        }
        self.ended(&topic);
    }

    /// Notes that Pub/Sub has permanently refused a request. If the request had a single event, removes this bad
    /// event from its lane and returns it. Otherwise returns `None`, and the lane bisects the request before it
    /// sends other events.
    pub fn refused(&mut self, mut request: Request) -> Option<Event> {
        request.count_failure(false);
        self.concurrency.answered();
        let index = request.lane;
        let bad = self.lane(index).refused(request.events);
        self.ended(&request.key.topic);
        self.go_on(index);
        bad
    }

    /// Removes a lane, which must have no request in flight, and returns its events.
    pub fn close(&mut self, key: &LaneKey) -> Vec<Event> {
        let Some(index) = self.by_key.remove(key) else {
            return Vec::new();
        };
        let lane = self.entries[index].lane.take();
        let lane = lane.expect("invariant: an indexed lane exists");
        debug_assert!(lane.state != LaneState::InFlight, "a lost request");
        if let LaneState::Waiting(at) = lane.state {
            self.waiting.remove(&(at, index));
        }
        self.free.push(index);
        lane.into_events().collect()
    }

    /// Notes that a request of `topic` is no longer in flight, and unparks the lanes of the topic that
    /// may send now.
    fn ended(&mut self, topic: &str) {
        self.in_flight -= 1;
        for index in self.slow_topics.ended(topic) {
            // Skip a lane that was closed while it was parked.
            if let Some(lane) = self.entries.get_mut(index).and_then(|e| e.lane.as_mut())
                && lane.state == LaneState::Parked
            {
                lane.state = LaneState::Ready;
                self.list_as_worthwhile(index);
            }
        }
    }

    /// Lists a lane again after its request has ended, or removes it when it is empty.
    fn go_on(&mut self, index: usize) {
        let lane = self.lane(index);
        if lane.is_empty() {
            let key = lane.key.clone();
            self.by_key.remove(&key);
            self.entries[index].lane = None;
            self.free.push(index);
            return;
        }
        self.list_if_worthwhile(index);
        self.list(index);
    }

    fn throttled(&mut self, topic: &Arc<str>) {
        self.concurrency.answered();
        let lanes = self.entries.iter().filter_map(|entry| entry.lane.as_ref());
        let in_flight =
            lanes.filter(|lane| lane.state == LaneState::InFlight && lane.key.topic == *topic);
        // Add one for the failed request: its lane no longer counts as in flight, but `ended` has not been
        // called yet.
        self.slow_topics.throttled(topic, || in_flight.count() + 1);
    }

    /// Makes the retries of `topic` due at `at`, unless they are due earlier. The caller uses this method when the
    /// cause of the failure is gone, for example because it has created the topic.
    pub fn hasten(&mut self, topic: &str, at: Instant) {
        for index in 0..self.entries.len() {
            let Some(lane) = self.entries[index].lane.as_mut() else {
                continue;
            };
            if let LaneState::Waiting(until) = &mut lane.state
                && &*lane.key.topic == topic
                && *until > at
            {
                self.waiting.remove(&(*until, index));
                self.waiting.insert((at, index));
                *until = at;
            }
        }
    }

    /// When the pause between attempts ends, or, if there is no pause, when the next retry is due. `None` if no lane
    /// waits for either. Also `None` while the global limit is reached, because only an answer makes room for the
    /// next request.
    pub fn next_due(&self) -> Option<Instant> {
        if self.in_flight >= self.concurrency.limit() {
            return None;
        }
        let next_start = self.concurrency.next_start();
        if let Some(next_start) = next_start.filter(|at| self.clock.is_some_and(|now| now < *at)) {
            return (!self.by_key.is_empty()).then_some(next_start);
        }
        self.waiting.first().map(|(at, _)| *at)
    }

    fn list(&mut self, index: usize) {
        if !self.entries[index].listed {
            self.entries[index].listed = true;
            self.entries[index].listed_at = self.clock;
            self.ready.push_back(index);
        }
    }

    fn list_if_worthwhile(&mut self, index: usize) {
        let lane = self.lane(index);
        if lane.state == LaneState::Ready && lane.is_worthwhile() {
            self.list_as_worthwhile(index);
        }
    }

    fn list_as_worthwhile(&mut self, index: usize) {
        if !self.entries[index].listed_as_worthwhile {
            self.entries[index].listed_as_worthwhile = true;
            self.worthwhile.push_back(index);
        }
    }

    fn next_worthwhile(&mut self) -> Option<usize> {
        let index = self.worthwhile.pop_front()?;
        self.entries[index].listed_as_worthwhile = false;
        Some(index)
    }

    /// Frees the memory that a burst of many keys has left behind in the lists.
    fn shrink_when_empty(&mut self) {
        const KEPT: usize = 1 << 14;
        if self.by_key.is_empty() && self.entries.len() > KEPT {
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
