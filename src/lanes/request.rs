//! Defines the requests that the lanes return to their caller.

use std::sync::Arc;

use crate::event::{Event, OrderingKey};

/// Identifies a lane.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct LaneKey {
    /// Full topic name.
    pub topic: Arc<str>,
    /// Ordering key; empty for messages without order.
    pub ordering_key: OrderingKey,
    /// With an empty ordering key: which of the topic's lanes for unordered messages this is. Otherwise 0.
    pub(super) unordered: u32,
}

/// A request to publish. The caller gets the request from the lanes, and returns it through
/// [`finished`](super::Lanes::finished), [`failed`](super::Lanes::failed) or
/// [`refused`](super::Lanes::refused).
#[derive(Debug)]
pub struct Request {
    pub(super) lane: usize,
    /// Topic and key of all events of the request.
    pub key: LaneKey,
    /// The events, in order; at least one.
    pub events: Vec<Event>,
    /// Number of failed attempts so far.
    pub failed_attempts: u32,
}

impl Request {
    /// Counts one more failed attempt. `may_be_stored` says whether Pub/Sub may have stored the events despite the
    /// failure.
    pub(super) fn count_failure(&mut self, may_be_stored: bool) {
        self.failed_attempts += 1;
        for event in &mut self.events {
            event.origin.failed_attempts += 1;
            event.origin.unknown_outcomes += u32::from(may_be_stored);
        }
    }
}
