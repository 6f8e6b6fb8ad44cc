//! Limits the requests in flight: one global limit, plus one limit per throttled topic.
//!
//! The global limit is halved on every failure that affects Pub/Sub as a whole, and doubled again on
//! success. In an outage one request at a time then probes whether Pub/Sub is back, instead of a
//! storm of retries. A few successes later the limit is at its maximum again.
//!
//! A topic over its quota has a limit of its own, halved on each throttling answer and raised by one on
//! each success. So the limit settles at what the quota allows, without slowing down other topics.
//! While the limit is reached, the topic's other lanes are parked. A topic that was never throttled
//! costs nothing.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

#[derive(Debug, Clone, Copy)]
pub(super) struct Concurrency {
    limit: usize,
    max: usize,
}

impl Concurrency {
    pub(super) fn new(max: usize) -> Self {
        let max = max.max(1);
        Self { limit: max, max }
    }

    pub(super) fn limit(self) -> usize {
        self.limit
    }

    pub(super) fn max(self) -> usize {
        self.max
    }

    pub(super) fn succeeded(&mut self) {
        self.limit = (self.limit * 2).min(self.max);
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
    /// Places of lanes that are ready but may not send yet.
    parked: VecDeque<usize>,
}

/// The topics that Pub/Sub has throttled and that have not recovered yet.
#[derive(Debug, Default)]
pub(super) struct SlowTopics(HashMap<Arc<str>, SlowTopic>);

impl SlowTopics {
    /// Whether a lane of this topic may send. If so, counts its request as in flight; if not, parks
    /// the lane at `place`.
    pub(super) fn admit(&mut self, topic: &str, place: usize) -> bool {
        let Some(slow) = self.find(topic) else {
            return true;
        };
        if slow.in_flight >= slow.limit {
            slow.parked.push_back(place);
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
    /// topic's requests in flight, which `in_flight` counts.
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
        (0..9).for_each(|_| concurrency.succeeded());
        assert_eq!(concurrency.limit(), 500);
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
