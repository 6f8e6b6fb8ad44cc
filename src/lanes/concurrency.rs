//! How many requests may be on their way: everybody's limit, and one for each topic that is asked
//! to slow down.
//!
//! Everybody's is halved at each failure that is everybody's and doubled back by success: during
//! an outage this leaves one request at a time to ask whether Pub/Sub is back, instead of a storm;
//! a few answers later everything flows again.
//!
//! A topic over its quota has a limit of its own, halved at each such answer and raised by one at
//! each success, so that it settles at what the quota lets through and other topics do not suffer
//! for it. The lanes of such a topic park while it is full. A topic that was never slowed down
//! costs nothing here.

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

/// A topic that was asked to slow down.
#[derive(Debug)]
struct SlowTopic {
    limit: usize,
    in_flight: usize,
    /// Places of lanes that are ready and may not go yet.
    parked: VecDeque<usize>,
}

/// The topics that were asked to slow down and have not recovered yet.
#[derive(Debug, Default)]
pub(super) struct SlowTopics(HashMap<Arc<str>, SlowTopic>);

impl SlowTopics {
    /// Whether a lane of this topic may send; it parks at `place` if not, and counts as on its
    /// way if so.
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

    /// A request ended: the lanes that may go on by it.
    pub(super) fn ended(&mut self, topic: &str) -> Vec<usize> {
        let Some(slow) = self.find(topic) else {
            return Vec::new();
        };
        slow.in_flight = slow.in_flight.saturating_sub(1);
        let room = slow.limit.saturating_sub(slow.in_flight);
        let going = room.min(slow.parked.len());
        slow.parked.drain(..going).collect()
    }

    /// A request was stored. From `max` on the topic is not slow any more.
    pub(super) fn succeeded(&mut self, topic: &str, max: usize) {
        let Some(slow) = self.find(topic) else { return };
        slow.limit += 1;
        if slow.limit >= max && slow.parked.is_empty() {
            self.0.remove(topic);
        }
    }

    /// Pub/Sub asked to slow down; `in_flight` requests of the topic are still on their way.
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

    /// Lanes that are parked.
    pub(super) fn parked(&self) -> usize {
        self.0.values().map(|slow| slow.parked.len()).sum()
    }

    fn find(&mut self, topic: &str) -> Option<&mut SlowTopic> {
        // Nearly always there is none: no hash then.
        match self.0.is_empty() {
            true => None,
            false => self.0.get_mut(topic),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outage_leaves_one_probe_and_success_brings_all_back() {
        let mut concurrency = Concurrency::new(500);
        (0..100).for_each(|_| concurrency.failed());
        assert_eq!(concurrency.limit(), 1);
        (0..9).for_each(|_| concurrency.succeeded());
        assert_eq!(concurrency.limit(), 500);
    }

    #[test]
    fn a_slow_topic_settles_and_is_forgotten_when_it_has_recovered() {
        let (mut topics, topic) = (SlowTopics::default(), Arc::from("t"));
        assert!(topics.admit("t", 0), "no topic is slow by itself");
        topics.throttled(&topic, || 4);
        assert!(!topics.admit("t", 7), "four are on their way, two may");
        assert!(topics.admit("other", 8));
        assert!(topics.ended("t").is_empty() && topics.ended("t").is_empty());
        assert_eq!(topics.ended("t"), [7]);
        for _ in 0..10 {
            topics.succeeded("t", 10);
        }
        assert!(topics.0.is_empty());
    }
}
