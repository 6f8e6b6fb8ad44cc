//! Counts requests and lanes, and surveys the waiting events of all lanes.

use std::sync::Arc;

use decoder::PgTimestamp;

use super::Lanes;

/// The pending work of a lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaneStanding {
    /// Events that are not stored yet.
    pub events: u64,
    /// Commit time of the first event that is not in flight.
    pub oldest: Option<PgTimestamp>,
    /// Whether the lane's last request failed and still waits for a successful retry.
    pub is_failing: bool,
}

impl Lanes {
    /// Calls `visit` with the topic and the standing of each lane. Takes time in proportion to the
    /// number of lanes.
    pub fn survey<'a>(&'a self, mut visit: impl FnMut(&'a Arc<str>, LaneStanding)) {
        for lane in self.places.iter().filter_map(|place| place.lane.as_ref()) {
            let standing = LaneStanding {
                events: lane.events(),
                oldest: lane.first().map(|event| event.origin.commit_time),
                is_failing: lane.is_failing,
            };
            visit(&lane.key.topic, standing);
        }
    }

    /// Number of requests in flight.
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Number of lanes with work.
    pub fn len(&self) -> usize {
        self.index.len()
    }

    /// Whether no lane has work.
    pub fn is_empty(&self) -> bool {
        self.index.is_empty()
    }

    /// Number of lanes that wait for a retry, or until their throttled topic may have more requests in
    /// flight.
    pub fn waiting(&self) -> usize {
        self.waiting.len() + self.slow_topics.parked()
    }
}
