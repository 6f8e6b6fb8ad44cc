//! Defines the sizes and times that decide when a lane sends, and two choices of the caller: which
//! lanes may send now ([`Serve`]), and how a failure changes the limits on requests in flight
//! ([`Load`]).

use std::time::Duration;

/// Pub/Sub's limit on the messages of one request.
pub(super) const MAX_MESSAGES: usize = 1_000;

/// Maximum bytes of messages in one request. Pub/Sub's limit is 10,000,000, including the topic and the
/// framing of each message. A larger message is sent in a request of its own: the mapping has checked
/// that it fits.
pub(super) const MAX_BYTES: usize = 9_000_000;

/// Bytes that frame one message in a request: tag and length.
pub(super) const MESSAGE_FRAMING: usize = 6;

/// With this many messages a lane is served even while more input is available: in a request of this
/// size, a message costs hardly more than in the largest request.
pub(super) const WORTHWHILE_MESSAGES: usize = 100;

/// A lane with this many bytes of messages is served too: copying this many bytes costs several times
/// as much as the request itself.
pub(super) const WORTHWHILE_BYTES: usize = 64 << 10;

/// Approximate memory of a waiting event, including its record, in addition to its message.
pub(crate) const EVENT_OVERHEAD: usize = 500;

/// Maximum linger: how long a lane with few events waits for more events while other lanes are served.
/// Until these events are published, neither their transactions nor any later one can be confirmed.
pub(super) const LONGEST_WAIT: Duration = Duration::from_secs(1);

/// Number of lanes per topic for messages without an ordering key.
pub(super) const UNORDERED_LANES: u32 = 16;

/// Which lanes may send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Serve {
    /// Every lane that has an event.
    All,
    /// Only lanes with enough events for a worthwhile request, and lanes that have waited for too long.
    /// The other lanes linger, because more input is available.
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
