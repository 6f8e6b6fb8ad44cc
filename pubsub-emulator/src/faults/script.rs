//! The script: finds the injected fault that applies to a publish request, and what the fault does.
//!
//! The script is plain state without a lock or a clock.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use tonic::Code;

use super::{Action, Fault, FaultId};

/// The faults of one emulator, in the order of injection.
#[derive(Debug, Default)]
pub(super) struct Script {
    next_id: u64,
    injected: Vec<Injected>,
    pub(super) removed_topics: BTreeSet<String>,
}

#[derive(Debug)]
struct Injected {
    id: FaultId,
    fault: Fault,
    /// For a throttle: how many messages may still pass, and when this number was computed.
    /// The number may be negative, because only whole requests are admitted.
    allowance: Option<(f64, Instant)>,
}

/// The properties of a publish request by which faults are selected.
pub(crate) struct Request<'a> {
    pub(crate) topic: &'a str,
    pub(crate) ordering_key: &'a str,
    pub(crate) messages: usize,
    /// Whether the request has a message with this event id.
    pub(crate) has_event: &'a dyn Fn(&str) -> bool,
}

/// What to do with a publish request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    Proceed,
    Fail(Code),
    StoreThenFail(Code),
    Delay(Duration),
    NeverAnswer,
    StoreThenNeverAnswer,
    FewerIds,
}

impl Script {
    pub(super) fn is_empty(&self) -> bool {
        self.injected.is_empty() && self.removed_topics.is_empty()
    }

    pub(super) fn inject(&mut self, fault: Fault) -> FaultId {
        let id = FaultId(self.next_id);
        self.next_id += 1;
        self.injected.push(Injected {
            id,
            fault,
            allowance: None,
        });
        id
    }

    pub(super) fn lift(&mut self, id: FaultId) {
        self.injected.retain(|injected| injected.id != id);
    }

    pub(super) fn lift_all(&mut self) {
        self.injected.clear();
        self.removed_topics.clear();
    }

    pub(super) fn uses_left(&self, id: FaultId) -> Option<u64> {
        let injected = self.injected.iter().find(|injected| injected.id == id);
        injected.map_or(Some(0), |injected| injected.fault.uses_left)
    }

    pub(super) fn denies_publishing(&self, topic: &str) -> bool {
        let mut faults = self.injected.iter().map(|injected| &injected.fault);
        faults.any(|fault| {
            let applies = |pattern: &str| topic_matches(pattern, topic);
            fault.action == Action::Fail(Code::PermissionDenied)
                && fault.ordering_key.is_none()
                && fault.topic.as_deref().is_none_or(applies)
        })
    }

    /// Uses the first fault that applies, and removes the fault after its last use.
    pub(super) fn judge(&mut self, request: &Request<'_>, now: Instant) -> Verdict {
        for (index, injected) in self.injected.iter_mut().enumerate() {
            let Some(verdict) = injected.judge(request, now) else {
                continue;
            };
            if let Some(uses) = &mut injected.fault.uses_left {
                *uses -= 1;
                if *uses == 0 {
                    self.injected.remove(index);
                }
            }
            return verdict;
        }
        Verdict::Proceed
    }
}

impl Fault {
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
            Action::FewerIds => Some(Verdict::FewerIds),
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

    /// Whether a request passes. The token bucket holds at most the tokens of one second.
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

/// Whether a pattern with `*` matches a topic's full name, or its id if the pattern has no `/`.
pub(super) fn topic_matches(pattern: &str, topic: &str) -> bool {
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
