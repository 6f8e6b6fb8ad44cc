//! The script: finds the injected fault that applies to a publish request, and decides what happens
//! to the request.
//!
//! The script is plain state without a lock or a clock.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use prost::Message;
use tonic::{Code, Status};

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
    /// For a throttle: how many messages may still pass, and when this number was computed. The
    /// number can be negative, because a request passes as a whole even if it has more messages
    /// than are allowed. `None` before the first request, and for other faults.
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
    FailSaying(Code, &'static str),
    FailWithReason(Reason),
    StoreThenFail(Code),
    Delay(Duration),
    NeverAnswer,
    StoreThenNeverAnswer,
    FewerIds,
}

/// An error with Google's reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Reason {
    code: Code,
    domain: &'static str,
    reason: &'static str,
}

impl From<Reason> for Status {
    fn from(reason: Reason) -> Self {
        let Reason {
            code,
            domain,
            reason,
        } = reason;
        let info = ErrorInfo {
            reason: reason.to_owned(),
            domain: domain.to_owned(),
        };
        let message = format!(
            "Injected by the emulator's fault script: {}.",
            code.description()
        );
        let details = vec![prost_types::Any {
            type_url: "type.googleapis.com/google.rpc.ErrorInfo".to_owned(),
            value: info.encode_to_vec(),
        }];
        let details = RpcStatus {
            code: code as i32,
            message: message.clone(),
            details,
        };
        Status::with_details(code, message, details.encode_to_vec().into())
    }
}

/// `google.rpc.Status`.
#[derive(Clone, PartialEq, Message)]
struct RpcStatus {
    #[prost(int32, tag = "1")]
    code: i32,
    #[prost(string, tag = "2")]
    message: String,
    #[prost(message, repeated, tag = "3")]
    details: Vec<prost_types::Any>,
}

/// `google.rpc.ErrorInfo`, without its metadata.
#[derive(Clone, PartialEq, Message)]
struct ErrorInfo {
    #[prost(string, tag = "1")]
    reason: String,
    #[prost(string, tag = "2")]
    domain: String,
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

    /// The error of the first [`Action::FailWithReason`] that applies to all requests of the topic.
    pub(super) fn reason(&self, topic: &str) -> Option<Reason> {
        let mut faults = self.injected.iter().map(|injected| &injected.fault);
        faults.find_map(|fault| {
            let applies = |pattern: &str| topic_matches(pattern, topic);
            (fault.ordering_key.is_none() && fault.topic.as_deref().is_none_or(applies))
                .then(|| fault.action.reason())?
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

impl Action {
    fn reason(&self) -> Option<Reason> {
        match *self {
            Action::FailWithReason {
                code,
                domain,
                reason,
            } => Some(Reason {
                code,
                domain,
                reason,
            }),
            _ => None,
        }
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
            Action::FailSaying { code, message } => Some(Verdict::FailSaying(*code, message)),
            Action::FailWithReason { .. } => {
                self.fault.action.reason().map(Verdict::FailWithReason)
            }
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

    /// Whether the throttle lets a request pass. The throttle is a token bucket that holds at most the
    /// tokens of one second.
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
