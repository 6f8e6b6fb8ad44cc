//! Scripted faults of the publish path: what goes wrong, for which publishes, how often.
//!
//! A fault is injected at run time and stays until it is used up or lifted. The faults are asked
//! in the order of injection and the first one that applies is used. Nothing here stores or
//! answers: `publisher.rs` does what the [`Verdict`] says. Broken connections are made by
//! `connections.rs`.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tonic::Code;

use crate::connections::Connections;

/// What a fault does to a `Publish` request.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// Answers with the code; nothing is stored.
    Fail(Code),
    /// Stores the messages and answers with the code all the same.
    StoreThenFail(Code),
    /// Stores the messages and answers as usual, but so much later.
    Delay(Duration),
    /// Stores nothing and never answers.
    NeverAnswer,
    /// Stores the messages and never answers.
    StoreThenNeverAnswer,
    /// Answers RESOURCE_EXHAUSTED above so many messages per second, counted over bursts of up to
    /// a second. Requests that fit are left to later faults and do not count as a use.
    Throttle {
        /// The rate that is let through.
        messages_per_second: u32,
    },
    /// Answers INVALID_ARGUMENT if a message with this event id is in the request. Other requests
    /// are left to later faults and do not count as a use.
    Poison {
        /// The event id, as the journal shows it.
        event_id: String,
    },
}

/// A fault to inject: an [`Action`], and which publishes it meets.
#[derive(Debug, Clone, PartialEq)]
pub struct Fault {
    action: Action,
    topic: Option<String>,
    ordering_key: Option<String>,
    uses_left: Option<u64>,
}

impl Fault {
    /// A fault that meets every publish until it is lifted.
    pub fn new(action: Action) -> Self {
        Self {
            action,
            topic: None,
            ordering_key: None,
            uses_left: None,
        }
    }

    /// Meets only topics like this: a full name, or a topic id if there is no `/` in it; `*`
    /// stands for any characters.
    #[must_use]
    pub fn on_topic(mut self, pattern: impl Into<String>) -> Self {
        self.topic = Some(pattern.into());
        self
    }

    /// Meets only requests with this ordering key.
    #[must_use]
    pub fn on_ordering_key(mut self, ordering_key: impl Into<String>) -> Self {
        self.ordering_key = Some(ordering_key.into());
        self
    }

    /// Ends after so many uses.
    #[must_use]
    pub fn times(mut self, uses: u64) -> Self {
        self.uses_left = Some(uses);
        self
    }

    fn meets(&self, request: &Request<'_>) -> bool {
        self.uses_left != Some(0)
            && self
                .topic
                .as_deref()
                .is_none_or(|pattern| topic_matches(pattern, request.topic))
            && self
                .ordering_key
                .as_deref()
                .is_none_or(|key| key == request.ordering_key)
    }
}

/// Names an injected fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FaultId(u64);

/// A handle to the faults of one emulator. Clones share them.
#[derive(Debug, Clone, Default)]
pub struct Faults {
    inner: Arc<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    /// Whether `script` holds anything, to keep the usual publish free of the lock.
    scripted: AtomicBool,
    script: Mutex<Script>,
    connections: Connections,
}

#[derive(Debug, Default)]
struct Script {
    next_id: u64,
    injected: Vec<Injected>,
    removed_topics: BTreeSet<String>,
}

#[derive(Debug)]
struct Injected {
    id: FaultId,
    fault: Fault,
    /// Of a throttle: messages that may still pass, and since when. May be negative, since a
    /// request passes as a whole.
    allowance: Option<(f64, Instant)>,
}

/// What the faults are told about a publish.
pub(crate) struct Request<'a> {
    pub(crate) topic: &'a str,
    pub(crate) ordering_key: &'a str,
    pub(crate) messages: usize,
    /// Whether the request has a message with this event id.
    pub(crate) has_event: &'a dyn Fn(&str) -> bool,
}

/// What is to be done with a publish.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    Proceed,
    Fail(Code),
    StoreThenFail(Code),
    Delay(Duration),
    NeverAnswer,
    StoreThenNeverAnswer,
}

impl Faults {
    /// Injects a fault, behind those already there.
    pub fn inject(&self, fault: Fault) -> FaultId {
        self.change(|script| {
            let id = FaultId(script.next_id);
            script.next_id += 1;
            script.injected.push(Injected {
                id,
                fault,
                allowance: None,
            });
            id
        })
    }

    /// Ends one fault. Answers already being delayed or withheld stay so.
    pub fn lift(&self, id: FaultId) {
        self.change(|script| script.injected.retain(|injected| injected.id != id));
    }

    /// Ends all faults, restores all topics and accepts connections again.
    pub fn lift_all(&self) {
        self.change(|script| {
            script.injected.clear();
            script.removed_topics.clear();
        });
        self.refuse_connections(false);
    }

    /// How many uses a fault has left: `None` if without end, 0 once used up or lifted.
    pub fn uses_left(&self, id: FaultId) -> Option<u64> {
        let script = self.script();
        let injected = script.injected.iter().find(|injected| injected.id == id);
        injected.map_or(Some(0), |injected| injected.fault.uses_left)
    }

    /// Makes a topic (full name) answer NOT_FOUND as if it were gone. Its subscriptions and their
    /// messages are kept. Creating the topic restores it, too.
    pub fn remove_topic(&self, topic: impl Into<String>) {
        let topic = topic.into();
        self.change(|script| script.removed_topics.insert(topic));
    }

    /// Ends [`Faults::remove_topic`]. Says whether the topic was removed.
    pub fn restore_topic(&self, topic: &str) -> bool {
        self.change(|script| script.removed_topics.remove(topic))
    }

    /// Breaks all connections. Clients may connect again at once.
    pub fn reset_connections(&self) {
        self.inner.connections.reset();
    }

    /// While on, closes every new connection right after it was made. Those already made stay;
    /// see [`Faults::reset_connections`].
    pub fn refuse_connections(&self, refuse: bool) {
        self.inner.connections.refuse(refuse);
    }

    pub(crate) fn connections(&self) -> &Connections {
        &self.inner.connections
    }

    pub(crate) fn is_removed(&self, topic: &str) -> bool {
        self.any() && self.script().removed_topics.contains(topic)
    }

    pub(crate) fn judge(&self, request: &Request<'_>, now: Instant) -> Verdict {
        if !self.any() {
            return Verdict::Proceed;
        }
        let mut script = self.script();
        for injected in &mut script.injected {
            if let Some(verdict) = injected.judge(request, now) {
                if let Some(uses) = &mut injected.fault.uses_left {
                    *uses -= 1;
                }
                return verdict;
            }
        }
        Verdict::Proceed
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
        let any = !script.injected.is_empty() || !script.removed_topics.is_empty();
        self.inner.scripted.store(any, Ordering::Release);
        result
    }
}

impl Injected {
    fn judge(&mut self, request: &Request<'_>, now: Instant) -> Option<Verdict> {
        if !self.fault.meets(request) {
            return None;
        }
        match &self.fault.action {
            Action::Fail(code) => Some(Verdict::Fail(*code)),
            Action::StoreThenFail(code) => Some(Verdict::StoreThenFail(*code)),
            Action::Delay(delay) => Some(Verdict::Delay(*delay)),
            Action::NeverAnswer => Some(Verdict::NeverAnswer),
            Action::StoreThenNeverAnswer => Some(Verdict::StoreThenNeverAnswer),
            Action::Poison { event_id } => {
                (request.has_event)(event_id).then_some(Verdict::Fail(Code::InvalidArgument))
            }
            Action::Throttle {
                messages_per_second,
            } => {
                let rate = f64::from(*messages_per_second);
                let passes = self.passes(rate, request.messages, now);
                (!passes).then_some(Verdict::Fail(Code::ResourceExhausted))
            }
        }
    }

    /// A token bucket that holds one second's worth.
    fn passes(&mut self, rate: f64, messages: usize, now: Instant) -> bool {
        let (left, since) = self.allowance.unwrap_or((rate, now));
        let gained = now.saturating_duration_since(since).as_secs_f64() * rate;
        let available = (left + gained).min(rate);
        let passes = available > 0.0;
        let messages = u32::try_from(messages).unwrap_or(u32::MAX);
        let spent = if passes { f64::from(messages) } else { 0.0 };
        self.allowance = Some((available - spent, now));
        passes
    }
}

fn topic_matches(pattern: &str, topic: &str) -> bool {
    let name = if pattern.contains('/') {
        topic
    } else {
        crate::names::short(topic)
    };
    let mut parts = pattern.split('*');
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = name.strip_prefix(first) else {
        return false;
    };
    let Some(last) = parts.next_back() else {
        return rest.is_empty();
    };
    for part in parts {
        let Some(at) = rest.find(part) else {
            return false;
        };
        rest = &rest[at + part.len()..];
    }
    rest.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOPIC: &str = "projects/p/topics/orders.events";

    fn judge(faults: &Faults, ordering_key: &str) -> Verdict {
        judge_at(faults, ordering_key, 1, Instant::now())
    }

    fn judge_at(faults: &Faults, ordering_key: &str, messages: usize, now: Instant) -> Verdict {
        let has_event = |event_id: &str| event_id == "e1";
        faults.judge(
            &Request {
                topic: TOPIC,
                ordering_key,
                messages,
                has_event: &has_event,
            },
            now,
        )
    }

    #[test]
    fn without_faults_every_publish_proceeds() {
        assert_eq!(judge(&Faults::default(), "k"), Verdict::Proceed);
    }

    #[test]
    fn a_fault_ends_after_its_uses() {
        let faults = Faults::default();
        let id = faults.inject(Fault::new(Action::Fail(Code::Unavailable)).times(2));
        assert_eq!(judge(&faults, "k"), Verdict::Fail(Code::Unavailable));
        assert_eq!(faults.uses_left(id), Some(1));
        assert_eq!(judge(&faults, "k"), Verdict::Fail(Code::Unavailable));
        assert_eq!(judge(&faults, "k"), Verdict::Proceed);
        assert_eq!(faults.uses_left(id), Some(0));
    }

    #[test]
    fn a_fault_without_end_is_lifted() {
        let faults = Faults::default();
        let id = faults.inject(Fault::new(Action::NeverAnswer));
        assert_eq!(judge(&faults, "k"), Verdict::NeverAnswer);
        assert_eq!(faults.uses_left(id), None);
        faults.lift(id);
        assert_eq!(judge(&faults, "k"), Verdict::Proceed);
    }

    #[test]
    fn a_fault_meets_only_its_key_and_topic() {
        let faults = Faults::default();
        let delay = Duration::from_secs(1);
        faults.inject(
            Fault::new(Action::Delay(delay))
                .on_ordering_key("a")
                .on_topic("orders.*"),
        );
        faults.inject(Fault::new(Action::NeverAnswer).on_topic("other"));
        assert_eq!(judge(&faults, "a"), Verdict::Delay(delay));
        assert_eq!(judge(&faults, "b"), Verdict::Proceed);
    }

    #[test]
    fn the_first_fault_that_applies_is_used() {
        let faults = Faults::default();
        faults.inject(Fault::new(Action::Fail(Code::Internal)).times(1));
        faults.inject(Fault::new(Action::StoreThenFail(Code::Aborted)).times(1));
        assert_eq!(judge(&faults, "k"), Verdict::Fail(Code::Internal));
        assert_eq!(judge(&faults, "k"), Verdict::StoreThenFail(Code::Aborted));
    }

    #[test]
    fn poison_meets_only_requests_with_the_event() {
        let faults = Faults::default();
        faults.inject(Fault::new(Action::Poison {
            event_id: "e2".to_owned(),
        }));
        assert_eq!(judge(&faults, "k"), Verdict::Proceed);
        faults.inject(Fault::new(Action::Poison {
            event_id: "e1".to_owned(),
        }));
        assert_eq!(judge(&faults, "k"), Verdict::Fail(Code::InvalidArgument));
    }

    #[test]
    fn a_throttle_lets_its_rate_pass() {
        let faults = Faults::default();
        faults.inject(Fault::new(Action::Throttle {
            messages_per_second: 100,
        }));
        let start = Instant::now();
        let throttled = Verdict::Fail(Code::ResourceExhausted);
        assert_eq!(judge_at(&faults, "k", 60, start), Verdict::Proceed);
        assert_eq!(judge_at(&faults, "k", 60, start), Verdict::Proceed);
        assert_eq!(judge_at(&faults, "k", 60, start), throttled);
        assert_eq!(
            judge_at(&faults, "k", 60, start + Duration::from_millis(150)),
            throttled
        );
        assert_eq!(
            judge_at(&faults, "k", 1, start + Duration::from_millis(250)),
            Verdict::Proceed
        );
        // A pause saves up one second's worth and no more.
        let later = start + Duration::from_secs(60);
        assert_eq!(judge_at(&faults, "k", 100, later), Verdict::Proceed);
        assert_eq!(judge_at(&faults, "k", 1, later), throttled);
    }

    #[test]
    fn removed_topics_come_back() {
        let faults = Faults::default();
        faults.remove_topic(TOPIC);
        assert!(faults.is_removed(TOPIC));
        assert!(faults.restore_topic(TOPIC));
        assert!(!faults.restore_topic(TOPIC));
        faults.remove_topic(TOPIC);
        faults.lift_all();
        assert!(!faults.is_removed(TOPIC));
    }

    #[test]
    fn topic_patterns_are_full_names_or_ids_with_stars() {
        for pattern in [
            TOPIC,
            "orders.events",
            "*",
            "orders*",
            "*events",
            "o*s.e*s",
            "projects/*",
        ] {
            assert!(topic_matches(pattern, TOPIC), "{pattern}");
        }
        for pattern in [
            "orders",
            "events",
            "*orders",
            "orders.events*x",
            "x*",
            "projects/q/*",
        ] {
            assert!(!topic_matches(pattern, TOPIC), "{pattern}");
        }
    }
}
