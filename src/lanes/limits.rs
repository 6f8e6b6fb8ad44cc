//! Defines the sizes and times that decide when a lane sends. Also defines two values that the caller
//! passes in: which lanes may send now ([`Serve`]), and how a failure changes the limits on requests in
//! flight ([`Load`]).

use std::time::Duration;

/// Maximum number of messages in one request: Pub/Sub's own limit.
pub(super) const MAX_MESSAGES: usize = 1_000;

/// Maximum bytes of messages in one request. Pub/Sub's limit is 10,000,000, including the topic and the
/// framing of each message. A larger message is sent in a request of its own; the mapping has already
/// checked that such a request is within Pub/Sub's limit.
pub(super) const MAX_BYTES: usize = 9_000_000;

/// Maximum number of bytes that frame one message in a request: its tag and length.
pub(super) const MESSAGE_FRAMING: usize = 6;

/// A lane with this many messages sends at once, even if more input is available. A larger request would save little,
/// because this many messages already share the fixed cost of the request.
pub(super) const WORTHWHILE_MESSAGES: usize = 100;

/// A lane with this many bytes of messages sends at once, even if more input is available. Copying these bytes costs
/// several times as much as the rest of a request, so a larger request would save little.
pub(super) const WORTHWHILE_BYTES: usize = 64 << 10;

/// Approximate memory of a waiting event without its message, including the dispatch row that will be
/// written.
pub(crate) const EVENT_OVERHEAD: usize = 500;

/// Maximum linger: how long a lane with few events waits for more events, while the relay reads a backlog or a
/// table. The linger is short because it holds back the confirmed position: the relay cannot confirm the
/// transactions of the waiting events, or any later transaction.
pub(super) const LINGER_LIMIT: Duration = Duration::from_secs(1);

/// First pause between the starts of two attempts while no request reaches Pub/Sub. All lanes share this
/// pause. It doubles with each attempt, up to [`LAST_PROBE_PAUSE`].
pub(super) const FIRST_PROBE_PAUSE: Duration = Duration::from_millis(100);
/// Longest pause between the starts of two attempts while no request reaches Pub/Sub. So the relay tries again at most
/// this long after Pub/Sub is back.
pub(super) const LAST_PROBE_PAUSE: Duration = Duration::from_secs(1);

/// Number of lanes per topic for messages without an ordering key, and thus the maximum number of such
/// requests in flight per topic.
pub(super) const UNORDERED_LANES: u32 = 16;

/// Which lanes may send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Serve {
    /// Every lane that has an event.
    All,
    /// Only lanes that have enough events for an efficient request, that retry or bisect a request, or that have
    /// lingered for the maximum time. The other lanes linger, because more input is available.
    Worthwhile,
}

/// How a failed request changes the limits on requests in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Load {
    /// No request can be sent at present: lower the global limit, and pause between attempts until Pub/Sub
    /// answers. The attempt does not count as a failed attempt of the request.
    NotSent,
    /// The connection broke before the answer: lower the global limit, and pause between attempts until
    /// Pub/Sub answers.
    Broken,
    /// It is unknown whether Pub/Sub has stored the request, for example after a timeout: lower the global
    /// limit.
    Reduce,
    /// This topic is over its quota: lower the limit of this topic. The answer also shows that Pub/Sub can be reached,
    /// so raise the global limit, up to its maximum.
    ReduceTopic,
    /// The failure does not come from load, for example because the topic is missing: keep the limit of the topic. The
    /// answer shows that Pub/Sub can be reached, so raise the global limit, up to its maximum.
    Keep,
}

impl Load {
    /// Whether Pub/Sub may have stored the failed request, because no definite answer arrived.
    pub(super) fn may_be_stored(self) -> bool {
        match self {
            Self::Broken | Self::Reduce => true,
            // The request was not sent, or Pub/Sub definitely refused it.
            Self::NotSent | Self::ReduceTopic | Self::Keep => false,
        }
    }
}
