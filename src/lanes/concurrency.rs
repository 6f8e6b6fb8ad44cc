//! Limits the requests in flight: one global limit, plus one limit per throttled topic.
//!
//! The global limit is halved on every failure that affects Pub/Sub as a whole. It is doubled again when
//! Pub/Sub stores a request, or refuses it because of its topic or an event. So in an outage, the relay soon
//! sends only one request at a time, to find out when Pub/Sub is back. A few successes later the limit is at
//! its maximum again. While no request reaches Pub/Sub, there is also a pause between two attempts, because
//! such attempts fail at once. The first answer ends the pause for all lanes.
//!
//! A throttled topic (one over its quota) has its own limit. The limit is halved on each throttling answer
//! and raised by one on each success. So it settles at what the quota allows, without slowing down other
//! topics. While a topic has as many requests in flight as its limit allows, its other lanes are parked.
//! While no topic is throttled, these limits cost nothing.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::limits::{FIRST_PROBE_PAUSE, LAST_PROBE_PAUSE};

#[derive(Debug, Clone, Copy)]
pub(super) struct Concurrency {
    limit: usize,
    max: usize,
    /// Once the next attempt has started, no other attempt starts for this long. Each attempt doubles the pause, up to
    /// [`LAST_PROBE_PAUSE`]. `None` while requests reach Pub/Sub.
    pause: Option<Duration>,
    /// When the next attempt may start. `None` while requests reach Pub/Sub.
    next_start: Option<Instant>,
}

impl Concurrency {
    pub(super) fn new(max: usize) -> Self {
        let max = max.max(1);
        Self {
            limit: max,
            max,
            pause: None,
            next_start: None,
        }
    }

    pub(super) fn limit(self) -> usize {
        self.limit
    }

    pub(super) fn max(self) -> usize {
        self.max
    }

    /// When the next attempt may start; `None` if it may start at once.
    pub(super) fn next_start(self) -> Option<Instant> {
        self.next_start
    }

    /// Notes that a request was sent at `now`.
    pub(super) fn started(&mut self, now: Instant) {
        if let Some(pause) = self.pause {
            self.next_start = Some(now + pause);
            self.pause = Some((pause * 2).min(LAST_PROBE_PAUSE));
        }
    }

    /// Notes that Pub/Sub has answered: it stored a request, or refused it because of the topic or of an
    /// event.
    pub(super) fn answered(&mut self) {
        self.limit = (self.limit * 2).min(self.max);
        (self.pause, self.next_start) = (None, None);
    }

    /// Notes that a request was not sent, or that its connection broke. `now` is the time of the last attempt.
    pub(super) fn unreachable(&mut self, now: Instant) {
        self.failed();
        if self.pause.is_none() {
            self.pause = Some(FIRST_PROBE_PAUSE);
            self.next_start = Some(now + FIRST_PROBE_PAUSE);
        }
    }

    pub(super) fn failed(&mut self) {
        self.limit = (self.limit / 2).max(1);
    }
}

/// A topic that Pub/Sub has throttled.
#[derive(Debug)]
struct SlowTopic {
    limit: usize,
    in_flight: usize,
    /// Indexes of the lanes that are ready but must wait, because the topic is at its limit.
    parked: VecDeque<usize>,
}

/// The topics that Pub/Sub has throttled and that have not recovered yet.
#[derive(Debug, Default)]
pub(super) struct SlowTopics(HashMap<Arc<str>, SlowTopic>);

impl SlowTopics {
    /// Whether a lane of this topic may send. If so, counts its request as in flight. If not, parks the
    /// lane at this index.
    pub(super) fn admit(&mut self, topic: &str, index: usize) -> bool {
        let Some(slow) = self.find(topic) else {
            return true;
        };
        if slow.in_flight >= slow.limit {
            slow.parked.push_back(index);
            return false;
        }
        slow.in_flight += 1;
        true
    }

    /// Notes that a request of the topic has ended. Returns the parked lanes that may send now.
    pub(super) fn ended(&mut self, topic: &str) -> Vec<usize> {
        let Some(slow) = self.find(topic) else {
            return Vec::new();
        };
        slow.in_flight = slow.in_flight.saturating_sub(1);
        let room = slow.limit.saturating_sub(slow.in_flight);
        let going = room.min(slow.parked.len());
        slow.parked.drain(..going).collect()
    }

    /// Raises the topic's limit after a success. Once the limit reaches `max` and no lane is parked,
    /// the topic is no longer throttled.
    pub(super) fn succeeded(&mut self, topic: &str, max: usize) {
        let Some(slow) = self.find(topic) else { return };
        slow.limit += 1;
        if slow.limit >= max && slow.parked.is_empty() {
            self.0.remove(topic);
        }
    }

    /// Halves the topic's limit, because Pub/Sub has throttled the topic. The first limit is half of the
    /// topic's requests in flight. `in_flight` counts these requests, and is called only for the first limit.
    pub(super) fn throttled(&mut self, topic: &Arc<str>, in_flight: impl FnOnce() -> usize) {
        match self.find(topic) {
            Some(slow) => slow.limit = (slow.limit / 2).max(1),
            None => {
                let in_flight = in_flight();
                let slow = SlowTopic {
                    limit: (in_flight / 2).max(1),
                    in_flight,
                    parked: VecDeque::new(),
                };
                self.0.insert(topic.clone(), slow);
            }
        }
    }

    /// Number of parked lanes of all topics.
    pub(super) fn parked(&self) -> usize {
        self.0.values().map(|slow| slow.parked.len()).sum()
    }

    fn find(&mut self, topic: &str) -> Option<&mut SlowTopic> {
        // Nearly always no topic is throttled, so do not compute the hash.
        if self.0.is_empty() {
            None
        } else {
            self.0.get_mut(topic)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outage_leaves_one_probe_and_success_restores_the_limit() {
        let mut concurrency = Concurrency::new(500);
        (0..100).for_each(|_| concurrency.failed());
        assert_eq!(concurrency.limit(), 1);
        (0..9).for_each(|_| concurrency.answered());
        assert_eq!(concurrency.limit(), 500);
    }

    #[test]
    fn while_nothing_reaches_pubsub_the_pause_between_attempts_grows_to_a_second() {
        let (mut concurrency, start) = (Concurrency::new(500), Instant::now());
        assert_eq!(concurrency.next_start(), None);
        let mut now = start;
        let mut starts = 0;
        while now < start + Duration::from_secs(10) {
            concurrency.unreachable(now);
            concurrency.unreachable(now);
            now = concurrency.next_start().unwrap();
            concurrency.started(now);
            starts += 1;
        }
        assert!((10..15).contains(&starts), "{starts} attempts");
        concurrency.answered();
        assert_eq!(concurrency.next_start(), None);
        concurrency.started(now);
        assert_eq!(concurrency.next_start(), None);
    }

    #[test]
    fn a_throttled_topic_parks_lanes_and_is_forgotten_once_it_recovers() {
        let (mut topics, topic) = (SlowTopics::default(), Arc::from("t"));
        assert!(topics.admit("t", 0), "no topic is slow by itself");
        topics.throttled(&topic, || 4);
        assert!(!topics.admit("t", 7), "four are in flight, two may be");
        assert!(topics.admit("other", 8));
        assert!(topics.ended("t").is_empty() && topics.ended("t").is_empty());
        assert_eq!(topics.ended("t"), [7]);
        for _ in 0..10 {
            topics.succeeded("t", 10);
        }
        assert!(topics.0.is_empty());
    }
}
