//! Lanes: one queue per (topic, ordering key), so that order holds per key and only there.
//!
//! A lane has at most one request on its way. Everything that waits in it goes into its next
//! request, in order; a failed request stays whole and goes first again. Lanes take turns under
//! one limit of requests on their way. A lane exists only while it has work, so memory follows
//! the events in it and not the number of keys ever seen.
//!
//! Messages without an ordering key have no order to keep: each topic has a few lanes for them.
//!
//! A state machine without IO; the clock is passed in.

mod concurrency;

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use decoder::PgTimestamp;

use crate::map::{EventId, OrderingKey};
use crate::watermark::CommitLsn;
use concurrency::Concurrency;

/// Pub/Sub's limit of messages in one request.
const MAX_MESSAGES: usize = 1_000;

/// Bytes of messages in one request; Pub/Sub's limit is 10,000,000 with the topic and the framing
/// of each message. One larger message still goes, alone: the mapping has checked it.
const MAX_BYTES: usize = 9_000_000;

/// Framing of one message in a request: tag and length.
const MESSAGE_FRAMING: usize = 6;

/// From so many messages on a lane is served even while more input is at hand: a request of this
/// size costs a message hardly more than the largest one does.
const WORTHWHILE_MESSAGES: usize = 100;

/// Lanes of a topic for messages without an ordering key.
const UNORDERED_LANES: u32 = 16;

/// What is kept of an event until its outcome is recorded.
#[derive(Debug, Clone)]
pub struct EventRef {
    /// Commit LSN: the first half of the event's identity.
    pub commit: CommitLsn,
    /// Place of the insert in its transaction, from 1: the second half.
    pub ordinal: u32,
    /// When its transaction was committed.
    pub commit_time: PgTimestamp,
    /// The id in the dispatch table.
    pub event_id: EventId,
}

/// One event to publish.
#[derive(Debug)]
pub struct Event {
    /// Which event it is.
    pub origin: EventRef,
    /// The encoded `PubsubMessage`.
    pub message: Bytes,
}

#[cfg(test)]
impl Event {
    /// The event of this ordinal, with seven bytes of message.
    pub(crate) fn for_tests(ordinal: u32) -> Self {
        let origin = EventRef {
            commit: CommitLsn::new(decoder::Lsn::new(1)),
            ordinal,
            commit_time: PgTimestamp::from_micros(0),
            event_id: EventId {
                uuid: [0; 16],
                source_id: None,
            },
        };
        Self {
            origin,
            message: Bytes::from_static(b"message"),
        }
    }
}

/// Names a lane.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct LaneKey {
    /// Full topic name.
    pub topic: Arc<str>,
    /// Ordering key; empty for messages without order.
    pub ordering_key: OrderingKey,
    /// Which of the lanes for messages without order.
    unordered: u32,
}

/// A request to publish. It is out of the lanes until it comes back through
/// [`Lanes::finished`] or [`Lanes::failed`].
#[derive(Debug)]
pub struct Request {
    lane: usize,
    /// Topic and key of all its events.
    pub key: LaneKey,
    /// The events, in order; at least one.
    pub events: Vec<Event>,
    /// Attempts made before this one.
    pub failed_attempts: u32,
}

/// How eagerly lanes are served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Serve {
    /// Every lane that has an event.
    All,
    /// Only lanes with enough for a worthwhile request: more input is at hand.
    Worthwhile,
}

/// How a failed request bears on the limit of requests on their way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Load {
    /// Pub/Sub as a whole does not keep up or does not answer: fewer at once.
    Reduce,
    /// The failure is this topic's own.
    Keep,
}

#[derive(Debug)]
enum State {
    Ready,
    InFlight,
    /// A failed request that goes again at this time.
    Waiting(Instant, Request),
}

#[derive(Debug)]
struct Lane {
    key: LaneKey,
    queue: VecDeque<Event>,
    state: State,
}

/// A place for a lane; places are used again.
#[derive(Debug, Default)]
struct Place {
    lane: Option<Lane>,
    /// Whether the place stands in `ready`; it stands there at most once.
    listed: bool,
}

/// All lanes.
#[derive(Debug)]
pub struct Lanes {
    places: Vec<Place>,
    free: Vec<usize>,
    index: HashMap<LaneKey, usize>,
    /// Places whose lane may have something to send, in turn.
    ready: VecDeque<usize>,
    /// Places whose lane has become worthwhile since it was last served.
    worthwhile: VecDeque<usize>,
    waiting: BTreeSet<(Instant, usize)>,
    in_flight: usize,
    concurrency: Concurrency,
    next_unordered: u32,
}

impl Lanes {
    /// No lanes yet, and at most `max_in_flight` requests on their way at once.
    pub fn new(max_in_flight: usize) -> Self {
        Self {
            places: Vec::new(),
            free: Vec::new(),
            index: HashMap::new(),
            ready: VecDeque::new(),
            worthwhile: VecDeque::new(),
            waiting: BTreeSet::new(),
            in_flight: 0,
            concurrency: Concurrency::new(max_in_flight),
            next_unordered: 0,
        }
    }

    /// Puts an event at the end of its lane.
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
        let lane = self.places[place]
            .lane
            .as_mut()
            .expect("invariant: an indexed lane exists");
        lane.queue.push_back(event);
        if lane.queue.len() == WORTHWHILE_MESSAGES && matches!(lane.state, State::Ready) {
            self.worthwhile.push_back(place);
        }
    }

    fn open(&mut self, key: LaneKey) -> usize {
        let lane = Lane {
            key: key.clone(),
            queue: VecDeque::new(),
            state: State::Ready,
        };
        let place = self.free.pop().unwrap_or_else(|| {
            self.places.push(Place::default());
            self.places.len() - 1
        });
        self.places[place].lane = Some(lane);
        self.index.insert(key, place);
        self.list(place);
        place
    }

    /// The next request to send at `now`, if there is one and the limit allows it.
    pub fn next_request(&mut self, now: Instant, serve: Serve) -> Option<Request> {
        if self.in_flight >= self.concurrency.limit() {
            return None;
        }
        if let Some(request) = self.due(now) {
            return Some(request);
        }
        loop {
            let place = match (self.worthwhile.pop_front(), serve) {
                (Some(place), _) => place,
                (None, Serve::Worthwhile) => return None,
                (None, Serve::All) => {
                    let place = self.ready.pop_front()?;
                    self.places[place].listed = false;
                    place
                }
            };
            if let Some(request) = self.take(place) {
                return Some(request);
            }
        }
    }

    /// The request of a waiting lane whose time has come.
    fn due(&mut self, now: Instant) -> Option<Request> {
        let (at, place) = *self.waiting.first()?;
        if at > now {
            return None;
        }
        self.waiting.pop_first();
        let lane = self.places[place]
            .lane
            .as_mut()
            .expect("invariant: a waiting lane exists");
        match std::mem::replace(&mut lane.state, State::InFlight) {
            State::Waiting(_, request) => {
                self.in_flight += 1;
                Some(request)
            }
            State::Ready | State::InFlight => unreachable!("invariant: the lane was waiting"),
        }
    }

    /// A request with all that waits in the lane, as far as it fits; `None` when the lane is not
    /// ready or gone, which happens to places that were served out of turn.
    fn take(&mut self, place: usize) -> Option<Request> {
        let lane = self.places[place].lane.as_mut()?;
        if !matches!(lane.state, State::Ready) || lane.queue.is_empty() {
            return None;
        }
        let mut bytes = 0;
        let fitting = lane.queue.iter().take(MAX_MESSAGES).take_while(|event| {
            bytes += event.message.len() + MESSAGE_FRAMING;
            bytes <= MAX_BYTES
        });
        let count = fitting.count().max(1);
        let events = lane.queue.drain(..count).collect();
        lane.state = State::InFlight;
        self.in_flight += 1;
        Some(Request {
            lane: place,
            key: lane.key.clone(),
            events,
            failed_attempts: 0,
        })
    }

    /// A request was published: its lane goes on, or ends when nothing waits in it.
    pub fn finished(&mut self, request: &Request) {
        self.concurrency.succeeded();
        self.in_flight -= 1;
        let place = request.lane;
        let lane = self.places[place]
            .lane
            .as_mut()
            .expect("invariant: a lane in flight exists");
        if lane.queue.is_empty() {
            self.index.remove(&lane.key);
            self.places[place].lane = None;
            self.free.push(place);
        } else {
            lane.state = State::Ready;
            if lane.queue.len() >= WORTHWHILE_MESSAGES {
                self.worthwhile.push_back(place);
            }
            self.list(place);
        }
        self.shrink_when_empty();
    }

    /// A request was not published: the same goes again at `again_at`, before all else in its
    /// lane.
    pub fn failed(&mut self, mut request: Request, again_at: Instant, load: Load) {
        match load {
            Load::Reduce => self.concurrency.failed(),
            Load::Keep => {}
        }
        self.in_flight -= 1;
        request.failed_attempts += 1;
        let place = request.lane;
        self.waiting.insert((again_at, place));
        let lane = self.places[place]
            .lane
            .as_mut()
            .expect("invariant: a lane in flight exists");
        lane.state = State::Waiting(again_at, request);
    }

    /// Lets the waiting requests of `topic` go at `at` if that is sooner: what they waited for
    /// has come about.
    pub fn hasten(&mut self, topic: &str, at: Instant) {
        for place in 0..self.places.len() {
            let Some(lane) = self.places[place].lane.as_mut() else {
                continue;
            };
            if let State::Waiting(until, _) = &mut lane.state
                && &*lane.key.topic == topic
                && *until > at
            {
                self.waiting.remove(&(*until, place));
                self.waiting.insert((at, place));
                *until = at;
            }
        }
    }

    /// When the next waiting request may go; `None` while the limit lets nothing go anyway, since
    /// then it is an answer that makes the difference.
    pub fn next_due(&self) -> Option<Instant> {
        if self.in_flight >= self.concurrency.limit() {
            return None;
        }
        self.waiting.first().map(|(at, _)| *at)
    }

    /// Requests on their way.
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Lanes with work.
    pub fn len(&self) -> usize {
        self.index.len()
    }

    /// Whether no lane has work.
    pub fn is_empty(&self) -> bool {
        self.index.is_empty()
    }

    /// Lanes that wait to try again.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    fn list(&mut self, place: usize) {
        if !self.places[place].listed {
            self.places[place].listed = true;
            self.ready.push_back(place);
        }
    }

    /// After a burst of many keys the tables are large and empty: give the memory back.
    fn shrink_when_empty(&mut self) {
        const KEPT: usize = 1 << 14;
        if self.index.is_empty() && self.places.len() > KEPT {
            *self = Self {
                concurrency: self.concurrency,
                next_unordered: self.next_unordered,
                ..Self::new(self.concurrency.max())
            };
        }
    }
}

#[cfg(test)]
mod promises;
#[cfg(test)]
mod tests;
