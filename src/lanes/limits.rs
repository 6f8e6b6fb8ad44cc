//! The sizes and times by which lanes send, and the two choices that a caller has: which lanes may
//! send now, and how a failure changes the limits on requests in flight.

use std::time::Duration;

/// Pub/Sub's limit of messages in one request.
pub(super) const MAX_MESSAGES: usize = 1_000;

/// Bytes of messages in one request. Pub/Sub's limit is 10,000,000, including the topic and the
/// framing of each message. A single larger message is still sent, alone: the mapping has checked its
/// size.
pub(super) const MAX_BYTES: usize = 9_000_000;

/// Framing of one message in a request: tag and length.
pub(super) const MESSAGE_FRAMING: usize = 6;

/// With this many messages a lane is served even while more input is available: in a request of this
/// size, a message costs hardly more than in the largest one.
pub(super) const WORTHWHILE_MESSAGES: usize = 100;

/// The same limit in bytes: copying that much costs several times as much as the request itself.
pub(super) const WORTHWHILE_BYTES: usize = 64 << 10;

/// Approximate memory of a waiting event, including its record, in addition to its message.
pub(crate) const EVENT_OVERHEAD: usize = 500;

/// Maximum linger: how long a lane with few events waits for more while others are served. Until then
/// neither their transactions nor any later one can be confirmed.
pub(super) const LONGEST_WAIT: Duration = Duration::from_secs(1);

/// Lanes of a topic for messages without an ordering key.
pub(super) const UNORDERED_LANES: u32 = 16;

/// Which lanes may send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Serve {
    /// Every lane that has an event.
    All,
    /// Only lanes with enough for a worthwhile request, because more input is available; and lanes
    /// that have waited for too long.
    Worthwhile,
}

/// How a failed request changes the limits on requests in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Load {
    /// Pub/Sub as a whole does not answer: lower the global limit.
    Reduce,
    /// This topic is over its quota: lower the limit of this topic.
    ReduceTopic,
    /// Leave the limits as they are.
    Keep,
}
