//! Defines requests as the lanes hand them out.

use std::sync::Arc;

use crate::event::{Event, OrderingKey};

/// Names a lane.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct LaneKey {
    /// Full topic name.
    pub topic: Arc<str>,
    /// Ordering key; empty for messages without order.
    pub ordering_key: OrderingKey,
    /// Number of the lane among the topic's lanes for messages without order; otherwise 0.
    pub(super) unordered: u32,
}

/// A request to publish. The lanes hand it out, and get it back through
/// [`finished`](super::Lanes::finished), [`failed`](super::Lanes::failed) or
/// [`refused`](super::Lanes::refused).
#[derive(Debug)]
pub struct Request {
    pub(super) lane: usize,
    /// Topic and key of all events of the request.
    pub key: LaneKey,
    /// The events, in order; at least one.
    pub events: Vec<Event>,
    /// Attempts made before this one.
    pub failed_attempts: u32,
}

impl Request {
    /// Counts one more failed attempt.
    pub(super) fn count_failure(&mut self) {
        self.failed_attempts += 1;
        for event in &mut self.events {
            event.origin.failed_attempts += 1;
        }
    }
}
