//! Counts the requests in flight, and visits each lane to report how many events it has.

use std::sync::Arc;

use decoder::PgTimestamp;

use super::Lanes;
use super::lane::Lane;
use crate::event::{Event, OrderingKey};

/// The pending work of a lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaneStanding<'a> {
    /// The ordering key. Empty for events without order; a topic may have several lanes for them.
    pub ordering_key: &'a OrderingKey,
    /// Events that are not stored yet, including those in flight.
    pub events: u64,
    /// Commit time of the first of these events.
    pub oldest: Option<PgTimestamp>,
    /// Whether the lane's last request failed and still waits for a successful retry.
    pub is_failing: bool,
}

impl Lanes {
    /// Calls `visit` with the topic and the pending work of each lane. Takes time in proportion to the
    /// number of lanes.
    pub fn survey<'a>(&'a self, mut visit: impl FnMut(&'a Arc<str>, LaneStanding<'a>)) {
        for lane in self.entries.iter().filter_map(|entry| entry.lane.as_ref()) {
            let standing = LaneStanding {
                ordering_key: &lane.key.ordering_key,
                events: lane.events(),
                oldest: lane.oldest(),
                is_failing: lane.is_failing,
            };
            visit(&lane.key.topic, standing);
        }
    }

    /// The events of all lanes, except those of requests in flight.
    pub(crate) fn events(&self) -> impl Iterator<Item = &Event> {
        let lanes = self.entries.iter().filter_map(|entry| entry.lane.as_ref());
        lanes.flat_map(Lane::waiting_events)
    }

    /// Number of requests in flight.
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Number of lanes with work.
    pub fn len(&self) -> usize {
        self.by_key.len()
    }

    /// Whether no lane has work.
    pub fn is_empty(&self) -> bool {
        self.by_key.is_empty()
    }

    /// Number of lanes that wait for a retry, plus the lanes that are parked because their topic is throttled.
    pub fn waiting(&self) -> usize {
        self.waiting.len() + self.slow_topics.parked()
    }
}
