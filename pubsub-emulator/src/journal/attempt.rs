//! What the journal keeps of an attempt to publish.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tonic::Code;

/// One `Publish` request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attempt {
    /// The attempt's number in the order of processing, from 0.
    pub sequence: u64,
    /// The client's address; `None` if it is unknown.
    pub peer: Option<SocketAddr>,
    /// When the client's connection was accepted. All times in this struct are measured from the
    /// start of the emulator.
    pub connected: Option<Duration>,
    /// `projects/{project}/topics/{topic}`.
    pub topic: Arc<str>,
    /// The ordering key of the first message, or empty if that message has none.
    pub ordering_key: Arc<str>,
    /// The ordering keys of later messages that differ from `ordering_key`. The emulator refuses a
    /// request with such messages, so this is empty for a stored request.
    pub other_keys: Vec<String>,
    /// The event ids of the messages, in the order of the request.
    pub event_ids: Arc<[Option<Box<str>>]>,
    /// When the emulator had read the whole request.
    pub received: Duration,
    /// When the messages were stored. `None` if they were not stored.
    pub stored: Option<Duration>,
    /// When the request ended: it was answered, or the client gave up. `None` until then.
    pub ended: Option<Duration>,
    /// The id of the first message if the request was stored. The message with index `n` has this
    /// id plus `n`.
    pub first_message_id: Option<u64>,
    /// The answer to the client.
    pub answer: Answer,
}

/// How the emulator answered an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// No answer has been sent yet.
    Pending,
    /// The message ids. The journal does not know whether the answer reached the client.
    MessageIds,
    /// One message id too few, because of an injected fault. The client cannot tell from this answer
    /// which messages were stored.
    FewerIds,
    /// An error that comes from a rule of the service or from an injected fault.
    Error(Code),
    /// The client never got an answer: it disconnected, or a fault withheld the answer.
    Never,
}

impl Attempt {
    /// Whether the messages were stored. If so, subscribers get them.
    pub fn is_stored(&self) -> bool {
        self.first_message_id.is_some()
    }
}

/// Totals since the start or the last [`Journal::clear`](super::Journal::clear).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// `Publish` requests.
    pub attempts: u64,
    /// Messages in these requests.
    pub messages: u64,
    /// Messages that were stored, whether or not the request was answered.
    pub stored_messages: u64,
    /// Messages that were stored and answered with their message ids.
    pub answered_messages: u64,
    /// Requests that were answered with an error, or with too few ids.
    pub error_answers: u64,
    /// Requests that were never answered.
    pub withheld_answers: u64,
}

/// How much the journal keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recording {
    /// Every attempt with its event ids. The journal grows without bound.
    Attempts,
    /// Only [`Counts`], which costs almost no time or memory.
    Counts,
}
