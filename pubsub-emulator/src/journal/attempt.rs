//! The data that the journal keeps of an attempt to publish.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tonic::Code;

/// One `Publish` request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attempt {
    /// Its number in the order of processing, from 0.
    pub sequence: u64,
    /// The client's address.
    pub peer: Option<SocketAddr>,
    /// When the client's connection was accepted, since the start of the emulator.
    pub connected: Option<Duration>,
    /// `projects/{project}/topics/{topic}`.
    pub topic: Arc<str>,
    /// The ordering key of the first message; empty if it has none.
    pub ordering_key: Arc<str>,
    /// Ordering keys of later messages that differ from the first message's. The emulator refuses
    /// such requests, so this is empty for stored ones.
    pub other_keys: Vec<String>,
    /// The event ids of the messages, in the order of the request.
    pub event_ids: Arc<[Option<Box<str>>]>,
    /// When the request had been read, since the start of the emulator.
    pub received: Duration,
    /// When the messages were stored, since the start of the emulator; `None` if they were not.
    pub stored: Option<Duration>,
    /// When it was answered or given up, since the start of the emulator; `None` until then.
    pub ended: Option<Duration>,
    /// The id of the first message if the request was stored; message `n` has this id plus `n`.
    pub first_message_id: Option<u64>,
    /// The answer that the client got.
    pub answer: Answer,
}

/// The answer that a client got to its attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// No answer has been sent yet.
    Pending,
    /// The message ids. Whether the answer reached the client is not known here.
    MessageIds,
    /// One id too few, by an injected fault. Such an answer tells the client nothing.
    FewerIds,
    /// An error, by a rule of the service or by an injected fault.
    Error(Code),
    /// The client never got an answer: it disconnected, or a fault withheld the answer.
    Never,
}

impl Attempt {
    /// Whether subscribers get the messages.
    pub fn is_stored(&self) -> bool {
        self.first_message_id.is_some()
    }
}

/// Totals since the start or the last [`Journal::clear`](super::Journal::clear).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// `Publish` requests.
    pub attempts: u64,
    /// Messages in them.
    pub messages: u64,
    /// Messages that were stored, whether answered or not.
    pub stored_messages: u64,
    /// Messages that were stored and whose ids were answered.
    pub answered_messages: u64,
    /// Requests that were answered with an error, or with too few ids.
    pub error_answers: u64,
    /// Requests that were never answered.
    pub withheld_answers: u64,
}

/// How much the journal keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recording {
    /// Every attempt with its event ids. Grows without bound.
    Attempts,
    /// Only [`Counts`]. Costs next to nothing.
    Counts,
}
