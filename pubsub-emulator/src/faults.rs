//! Scripted faults of publishing: what fails, for which requests, and how often.
//!
//! A fault is injected at run time and stays until it is used up or lifted. Of several faults that
//! apply, the one that was injected first is used. Nothing here stores or answers: `publisher.rs`
//! does what the [`Verdict`] says, and `connections.rs` breaks connections.

mod script;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tonic::Code;

use self::script::Script;
pub(crate) use self::script::{Request, Verdict};
use crate::connections::Connections;

/// What a fault does to a `Publish` request.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// Answers with the code and stores nothing.
    Fail(Code),
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
    /// Answers RESOURCE_EXHAUSTED to requests above this rate, counted over bursts of up to a
    /// second. Requests within the rate are passed to later faults and do not count as a use.
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

    /// Limits the fault to matching topics. The pattern is the full name of a topic, or the id if
    /// the pattern has no `/`. `*` matches any characters.
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
    /// Whether `script` contains a fault or a removed topic. If not, a publish needs no lock.
    scripted: AtomicBool,
    script: Mutex<Script>,
    connections: Connections,
    topics_hidden: AtomicBool,
}

impl Faults {
    /// Injects a fault, after all faults that were injected before.
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

    /// While `hide` is true, callers may not read topics: `GetTopic` answers PERMISSION_DENIED.
    pub fn hide_topics(&self, hide: bool) {
        self.inner.topics_hidden.store(hide, Ordering::Release);
    }

    /// How many uses a fault has left. `None` means no limit. A fault that is used up or lifted has
    /// 0.
    pub fn uses_left(&self, id: FaultId) -> Option<u64> {
        self.script().uses_left(id)
    }

    /// Makes the emulator answer NOT_FOUND for a topic (full name), as if the topic were gone. The
    /// subscriptions of the topic and their messages are kept. Creating the topic also restores it.
    pub fn remove_topic(&self, topic: impl Into<String>) {
        let topic = topic.into();
        self.change(|script| script.removed_topics.insert(topic));
    }

    /// Undoes [`Faults::remove_topic`]. Returns whether the topic was removed.
    pub fn restore_topic(&self, topic: &str) -> bool {
        self.change(|script| script.removed_topics.remove(topic))
    }

    /// Breaks all connections. Clients may reconnect at once.
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
