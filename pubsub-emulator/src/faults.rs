//! Scripted faults of publishing: what fails, for which requests, and how often.
//!
//! A fault applies from its injection until it is used up or lifted. If several faults apply to a
//! request, the emulator uses the one that was injected first. This module neither stores nor answers
//! requests: `publisher.rs` does what the [`Verdict`] says, and `connections.rs` breaks
//! connections.

mod script;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tonic::{Code, Status};

use self::script::Script;
pub(crate) use self::script::{Request, Verdict};
use crate::connections::Connections;

/// What a fault does to a `Publish` request.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// Answers with the code and stores nothing.
    Fail(Code),
    /// Like [`Action::Fail`], with a message that the test chooses.
    FailSaying {
        /// The code of the answer.
        code: Code,
        /// The message of the answer.
        message: &'static str,
    },
    /// Like [`Action::Fail`], with Google's reason in the error details (`google.rpc.ErrorInfo`). If the
    /// fault is not limited to an ordering key, `GetTopic` and `TestIamPermissions` for the topic fail in the
    /// same way. Only publish requests count as uses of the fault.
    FailWithReason {
        /// The code of the answer.
        code: Code,
        /// The domain of the reason, for example `googleapis.com`.
        domain: &'static str,
        /// The reason, for example `SERVICE_DISABLED`.
        reason: &'static str,
    },
    /// Stores the messages but answers with the code.
    StoreThenFail(Code),
    /// Stores the messages and answers as usual, but this much later.
    Delay(Duration),
    /// Stores nothing and never answers.
    NeverAnswer,
    /// Stores the messages and never answers.
    StoreThenNeverAnswer,
    /// Stores the messages and answers with one id too few.
    FewerIds,
    /// Answers RESOURCE_EXHAUSTED to requests above this rate. The first messages after a pause may come all at once,
    /// up to the number that the rate allows in one second. Requests within the rate are passed to later faults, and
    /// do not count as uses of this fault.
    Throttle {
        /// The rate up to which requests pass.
        messages_per_second: u32,
    },
    /// Answers INVALID_ARGUMENT if the request has a message with this event id. Other requests are
    /// passed to later faults and do not count as a use.
    Poison {
        /// The event id, as the journal shows it.
        event_id: String,
    },
}

/// A fault to inject: an [`Action`], and the requests to which it applies.
#[derive(Debug, Clone, PartialEq)]
pub struct Fault {
    action: Action,
    topic: Option<String>,
    ordering_key: Option<String>,
    uses_left: Option<u64>,
}

impl Fault {
    /// A fault that applies to every publish request until it is lifted.
    pub fn new(action: Action) -> Self {
        Self {
            action,
            topic: None,
            ordering_key: None,
            uses_left: None,
        }
    }

    /// Limits the fault to matching topics. The pattern is matched against the full name of the
    /// topic, or only against its id if the pattern has no `/`. `*` matches any characters.
    #[must_use]
    pub fn on_topic(mut self, pattern: impl Into<String>) -> Self {
        self.topic = Some(pattern.into());
        self
    }

    /// Limits the fault to requests with this ordering key.
    #[must_use]
    pub fn on_ordering_key(mut self, ordering_key: impl Into<String>) -> Self {
        self.ordering_key = Some(ordering_key.into());
        self
    }

    /// Ends the fault after this many uses.
    #[must_use]
    pub fn times(mut self, uses: u64) -> Self {
        self.uses_left = Some(uses);
        self
    }
}

/// Identifies an injected fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FaultId(u64);

/// A handle to the faults of one emulator. Clones share them.
#[derive(Debug, Clone, Default)]
pub struct Faults {
    inner: Arc<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    /// Whether `script` contains a fault or a removed topic. If it contains none, a publish does
    /// not have to lock `script`.
    scripted: AtomicBool,
    script: Mutex<Script>,
    connections: Connections,
    topics_hidden: AtomicBool,
}

impl Faults {
    /// Injects a fault. If several faults apply to a request, only the one that was injected first acts.
    pub fn inject(&self, fault: Fault) -> FaultId {
        self.change(|script| script.inject(fault))
    }

    /// Ends one fault. Answers that the fault already delays or withholds stay delayed or withheld.
    pub fn lift(&self, id: FaultId) {
        self.change(|script| script.lift(id));
    }

    /// Ends all faults, restores all topics, makes them visible, and accepts connections again.
    pub fn lift_all(&self) {
        self.change(Script::lift_all);
        self.refuse_connections(false);
        self.hide_topics(false);
    }

    /// While `hide` is true, callers have no permission to read topics: `GetTopic` answers
    /// PERMISSION_DENIED.
    pub fn hide_topics(&self, hide: bool) {
        self.inner.topics_hidden.store(hide, Ordering::Release);
    }

    /// Returns how many uses a fault has left: `None` for no limit, 0 for a fault that is used up or lifted.
    pub fn uses_left(&self, id: FaultId) -> Option<u64> {
        self.script().uses_left(id)
    }

    /// Makes the emulator answer NOT_FOUND for a topic (full name), as if the topic were deleted.
    /// The topic's subscriptions and their messages are kept. A client that creates the topic also
    /// restores it.
    pub fn remove_topic(&self, topic: impl Into<String>) {
        let topic = topic.into();
        self.change(|script| script.removed_topics.insert(topic));
    }

    /// Undoes [`Faults::remove_topic`]. Returns false if the topic was not removed.
    pub fn restore_topic(&self, topic: &str) -> bool {
        self.change(|script| script.removed_topics.remove(topic))
    }

    /// Breaks all connections. Clients can reconnect at once.
    pub fn reset_connections(&self) {
        self.inner.connections.reset();
    }

    /// While `refuse` is true, closes every new connection at once. Existing connections stay. To
    /// break them, call [`Faults::reset_connections`].
    pub fn refuse_connections(&self, refuse: bool) {
        self.inner.connections.refuse(refuse);
    }

    pub(crate) fn connections(&self) -> &Connections {
        &self.inner.connections
    }

    pub(crate) fn is_removed(&self, topic: &str) -> bool {
        self.any() && self.script().removed_topics.contains(topic)
    }

    pub(crate) fn are_topics_hidden(&self) -> bool {
        self.inner.topics_hidden.load(Ordering::Acquire)
    }

    /// Whether a fault answers every publish to the topic with PERMISSION_DENIED.
    pub(crate) fn denies_publishing(&self, topic: &str) -> bool {
        self.any() && self.script().denies_publishing(topic)
    }

    /// Returns the error with which `GetTopic` and `TestIamPermissions` must fail for the topic. The error has the
    /// code and the reason of the [`Action::FailWithReason`] that applies to every publish request of the topic.
    /// `None` if there is no such fault.
    pub(crate) fn refusal(&self, topic: &str) -> Option<Status> {
        let reason = self.any().then(|| self.script().reason(topic))??;
        Some(reason.into())
    }

    pub(crate) fn judge(&self, request: &Request<'_>, now: Instant) -> Verdict {
        if !self.any() {
            return Verdict::Proceed;
        }
        self.change(|script| script.judge(request, now))
    }

    fn any(&self) -> bool {
        self.inner.scripted.load(Ordering::Acquire)
    }

    fn script(&self) -> MutexGuard<'_, Script> {
        self.inner
            .script
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn change<R>(&self, change: impl FnOnce(&mut Script) -> R) -> R {
        let mut script = self.script();
        let result = change(&mut script);
        self.inner
            .scripted
            .store(!script.is_empty(), Ordering::Release);
        result
    }
}

#[cfg(test)]
mod tests;
