//! Decides the state of the relay and its slot: is the relay delivering, and if not, why? All views
//! show this one answer: the relay's log, the HTTP port, the page, the metrics and the command line.
//!
//! [`judge`] derives the [`Condition`] from the [`RelayFacts`] that a running relay knows. While delivery is held up
//! or late, or while the relay cannot make a check, the relay also writes its condition to `outbox.relay`, for
//! commands that cannot reach the HTTP port. [`decide`] combines the condition with the health of the slot into the
//! [`Verdict`] that every view shows. `judge` and `decide` are pure functions. [`State`] lists all states.
//!
//! Causes have precedence over symptoms. For example, a relay that cannot record its outcomes is blocked by
//! the database, even if publishing to a topic fails too.

mod phase;
mod pruning;
mod state;
mod trouble;
mod unchecked;
mod verdict;

use std::time::{Duration, Instant};

use printable::start_of;
use serde::{Deserialize, Serialize};
use slot_manager::Severity;

pub(crate) use phase::public;
pub use phase::{Phase, RelayState};
pub use pruning::{PruneRun, PruneRuns};
pub use state::State;
pub use trouble::{AuditTrouble, FailingTopic, Trouble, Troubles, WaitingKey};
pub use unchecked::Unchecked;
pub(crate) use verdict::speaks;
pub use verdict::{StateFacts, Verdict, decide, general_hint};

use crate::error::Code;

/// How long a failure during a session must last before it changes the condition. A retry usually ends a
/// shorter failure.
const FAILS_AFTER: Duration = Duration::from_secs(3);

/// How long a blocked relay counts as a warning. After this time it counts as an error, because it needs an
/// operator.
const URGENT_AFTER: Duration = Duration::from_secs(60);

/// A relay counts as catching up if its oldest event is at least this old.
const BEHIND_AFTER: Duration = Duration::from_secs(10);
/// A relay also counts as catching up if its lag is at least this large, in bytes.
const BEHIND_BYTES: u64 = 64 << 20;

/// Maximum number of failing topics that a condition names. One cause can make thousands of topics fail.
const TOPICS_NAMED: usize = 20;

/// Maximum length of an ordering key in a condition, in characters. Pub/Sub allows keys of 1,024 bytes, which
/// would make a condition hard to read.
const KEY_CHARS: usize = 100;

/// The condition of a relay at one moment.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Condition {
    /// What the relay is doing.
    pub state: State,
    /// How long the condition has lasted, in seconds.
    pub for_seconds: f64,
    /// The code of the error that blocks or breaks the relay, or that prevents a check (`unchecked`). `None` if
    /// there is no such error.
    pub code: Option<String>,
    /// What happened; `None` if there is no error.
    pub what: Option<String>,
    /// What to do about the error; `None` if there is no error.
    pub hint: Option<String>,
    /// A check that the relay cannot make at present, while it can still deliver to topics that work. `None` if the
    /// relay makes all checks, or if it delivers nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unchecked: Option<Unchecked>,
    /// Seconds until the relay has caught up, at the present rate. `None` if it is not catching up, or if the
    /// rate is unknown.
    pub caught_up_in_seconds: Option<f64>,
    /// Seconds since the commit of the oldest event that the relay has read and that has no outcome, if known.
    #[serde(default)]
    pub oldest_seconds: Option<f64>,
    /// Topics to which publishing has failed for at least 3 seconds: the first 20 by name.
    pub topics: Vec<TopicCondition>,
    /// Number of topics to which publishing has failed for at least 3 seconds.
    pub failing_topics: usize,
}

/// A topic to which publishing fails.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TopicCondition {
    /// Full name, `projects/<project>/topics/<name>`.
    pub topic: String,
    /// Code of the latest error.
    pub code: String,
    /// The first error with this code since the topic began to fail.
    pub error: String,
    /// What to do.
    pub hint: String,
    /// How long the topic has failed, in seconds.
    pub for_seconds: f64,
    /// Number of failed requests since the topic began to fail.
    pub failures: u64,
    /// Events that the relay has read and that wait for this topic.
    pub waiting_events: u64,
    /// Age of the oldest of these events in seconds, if known.
    pub oldest_seconds: Option<f64>,
    /// The ordering keys that wait for this topic: at most 5, those with the oldest events, oldest first.
    /// Empty in the public answers of the HTTP port, because keys may be personal data.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub keys: Vec<KeyCondition>,
}

/// An ordering key whose events wait for a failing topic.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct KeyCondition {
    /// The ordering key. A long key is cut off and then ends with `..`.
    pub ordering_key: String,
    /// Events of the key that the relay has read and that wait for the topic.
    pub waiting_events: u64,
    /// Age of the oldest of these events in seconds.
    pub oldest_seconds: f64,
}

/// The facts that a running relay knows about itself.
#[derive(Debug, Clone)]
pub struct RelayFacts {
    /// The phase, and when it began.
    pub phase: (Phase, Instant),
    /// The topics that fail.
    pub topics: Vec<FailingTopic>,
    /// The error that keeps outcomes from being recorded, if there is one.
    pub recording: Option<Trouble>,
    /// The fault of the publication, or the error that prevents the check of the publication.
    pub publication: Option<Trouble>,
    /// The reason why PostgreSQL sends nothing to the relay; `None` if PostgreSQL does not hold the stream back.
    pub stream: Option<Trouble>,
    /// The error of the failing audits, or a gap that no audit has looked into yet. `None` if there is neither.
    pub auditing: Option<AuditTrouble>,
    /// The reason why the opening of the session has to wait; `None` if it does not wait.
    pub opening: Option<Trouble>,
    /// WAL beyond the confirmed position, in bytes, if known.
    pub lag_bytes: Option<u64>,
    /// Age of the oldest event without an outcome, if known.
    pub oldest: Option<Duration>,
    /// Time until the relay has caught up, if known.
    pub caught_up_in: Option<Duration>,
    /// The current time by PostgreSQL's clock, Unix microseconds.
    pub server_micros: i64,
}

/// Decides the condition that follows from the facts at the time `now`.
pub fn judge(facts: &RelayFacts, now: Instant) -> Condition {
    let age = |since: Instant| now.saturating_duration_since(since);
    let lasts = |trouble: &Trouble| age(trouble.since) >= FAILS_AFTER;
    let failing = facts.topics.iter().filter(|topic| lasts(&topic.trouble));
    let failing: Vec<&FailingTopic> = failing.collect();
    let auditing = facts.auditing.as_ref();
    let auditing = auditing.filter(|audit| lasts(&audit.trouble));
    let mut unchecked = None;
    let (state, trouble) = match &facts.phase.0 {
        _ if facts.opening.is_some() => (State::BlockedOnDatabase, facts.opening.as_ref()),
        Phase::Connecting => (State::Starting, None),
        Phase::Standby(_) => (State::Standby, None),
        Phase::HeldByStranger(trouble) => (State::Down, Some(trouble)),
        Phase::Broken(trouble) if is_of_the_database(trouble.code) => {
            (State::BlockedOnDatabase, Some(trouble))
        }
        Phase::Broken(trouble) => (State::Broken, Some(trouble)),
        phase @ (Phase::Streaming | Phase::Recovering) => {
            let first = failing.iter().map(|topic| &topic.trouble);
            let first = first.min_by_key(|trouble| trouble.since);
            let recording = facts.recording.as_ref().filter(|trouble| lasts(trouble));
            let database = recording.or(facts.stream.as_ref());
            let publication = facts.publication.as_ref().filter(|trouble| lasts(trouble));
            match (database, first, publication) {
                (Some(trouble), _, _) => (State::BlockedOnDatabase, Some(trouble)),
                (None, Some(trouble), _) => {
                    unchecked = what_is_unchecked(None, auditing.filter(|audit| audit.has_gap));
                    (State::BlockedOnPubsub, Some(trouble))
                }
                (None, None, Some(trouble)) if is_silence(trouble.code) => {
                    (State::BlockedOnDatabase, Some(trouble))
                }
                (None, None, Some(trouble)) if is_of_the_publication(trouble.code) => {
                    (State::Broken, Some(trouble))
                }
                // Nothing holds up delivery.
                (None, None, publication) => {
                    let state = if *phase == Phase::Recovering {
                        State::Recovering
                    } else if is_behind(facts.lag_bytes, facts.oldest) {
                        State::CatchingUp
                    } else {
                        State::Streaming
                    };
                    unchecked = what_is_unchecked(publication, auditing);
                    (state, unchecked.map(|(_, trouble)| trouble))
                }
            }
        }
    };
    let since = trouble.map_or(facts.phase.1, |trouble| trouble.since);
    let is_catching_up = state == State::CatchingUp;
    let caught_up_in = facts.caught_up_in.filter(|_| is_catching_up);
    let named = failing.iter().take(TOPICS_NAMED);
    Condition {
        state,
        for_seconds: age(since).as_secs_f64(),
        code: trouble.map(|trouble| trouble.code.name().to_owned()),
        what: trouble.map(|trouble| trouble.what.clone()),
        hint: trouble.map(|trouble| trouble.hint.clone()),
        unchecked: unchecked.map(|(unchecked, _)| unchecked),
        caught_up_in_seconds: caught_up_in.map(|time| time.as_secs_f64()),
        oldest_seconds: facts.oldest.map(|age| age.as_secs_f64()),
        topics: named
            .map(|topic| TopicCondition::of(topic, now, facts.server_micros))
            .collect(),
        failing_topics: failing.len(),
    }
}

/// Returns the check that the relay cannot make although it delivers, and the reason. `publication` is the
/// error that prevents the check of the publication. A possible gap comes first, because a gap means that
/// committed rows are not delivered.
fn what_is_unchecked<'a>(
    publication: Option<&'a Trouble>,
    auditing: Option<&'a AuditTrouble>,
) -> Option<(Unchecked, &'a Trouble)> {
    let of_the_audit = |audit: &'a AuditTrouble| {
        let unchecked = if audit.has_gap {
            Unchecked::Gap
        } else {
            Unchecked::Tables
        };
        (unchecked, &audit.trouble)
    };
    let gap = auditing.filter(|audit| audit.has_gap).map(of_the_audit);
    gap.or(publication.map(|trouble| (Unchecked::Publication, trouble)))
        .or(auditing.map(of_the_audit))
}

fn is_behind(lag_bytes: Option<u64>, oldest: Option<Duration>) -> bool {
    oldest.is_some_and(|oldest| oldest >= BEHIND_AFTER)
        || lag_bytes.is_some_and(|bytes| bytes >= BEHIND_BYTES)
}

/// Whether the cause is in PostgreSQL. If so, the relay continues automatically once PostgreSQL works again.
fn is_of_the_database(code: Code) -> bool {
    matches!(
        code,
        Code::PostgresUnreachable
            | Code::PostgresConnectionLost
            | Code::DiskFull
            | Code::PostgresTooManyConnections
            | Code::RoleConnectionLimit
            | Code::DatabaseConnectionLimit
            | Code::DatabaseClosed
            | Code::WalSendersUsedUp
            | Code::ReplicationSlotsUsedUp
            | Code::PostgresTimeout
            | Code::LockWait
            | Code::PostgresStopping
            | Code::PostgresStandby
            | Code::LeaseLost
            | Code::SlotBusy
    )
}

/// Whether a failed check shows that PostgreSQL does not answer or cannot work. If so, the stream probably hangs too,
/// so the relay counts as blocked.
fn is_silence(code: Code) -> bool {
    matches!(
        code,
        Code::PostgresUnreachable
            | Code::PostgresConnectionLost
            | Code::PostgresTimeout
            | Code::LockWait
            | Code::PostgresStopping
            | Code::PostgresStandby
            | Code::DiskFull
    )
}

/// Whether the publication itself is wrong. If so, the stream may leave out rows.
fn is_of_the_publication(code: Code) -> bool {
    matches!(code, Code::PublicationDrift | Code::PublicationMissing)
}

impl TopicCondition {
    fn of(topic: &FailingTopic, now: Instant, server_micros: i64) -> Self {
        let trouble = &topic.trouble;
        let age = |commit| {
            let micros = server_micros.saturating_sub(commit).max(0).unsigned_abs();
            Duration::from_micros(micros).as_secs_f64()
        };
        let keys = topic.keys.iter().map(|key| KeyCondition {
            ordering_key: start_of(&key.ordering_key, KEY_CHARS),
            waiting_events: key.waiting_events,
            oldest_seconds: age(key.oldest_commit),
        });
        Self {
            topic: topic.topic.to_string(),
            code: trouble.code.name().to_owned(),
            error: trouble.what.clone(),
            hint: trouble.hint.clone(),
            for_seconds: now.saturating_duration_since(trouble.since).as_secs_f64(),
            failures: topic.failures,
            waiting_events: topic.waiting_events,
            oldest_seconds: topic.oldest_commit.map(age),
            keys: keys.collect(),
        }
    }

    /// The topic's name without the project.
    pub fn short_name(&self) -> &str {
        let name = self.topic.rsplit_once("/topics/");
        name.map_or(&self.topic, |(_, name)| name)
    }
}

impl Condition {
    /// How urgent the condition is.
    pub fn severity(&self) -> Severity {
        match self.state {
            _ if self.unchecked.is_some() && !self.is_held_up() => Severity::Warning,
            State::Streaming => Severity::Ok,
            State::Starting | State::CatchingUp | State::Recovering | State::Standby => {
                Severity::Info
            }
            State::BlockedOnPubsub | State::BlockedOnDatabase => {
                if self.for_seconds < URGENT_AFTER.as_secs_f64() {
                    Severity::Warning
                } else {
                    Severity::Error
                }
            }
            State::Broken
            | State::Down
            | State::NearlyFull
            | State::Unreserved
            | State::Lost
            | State::Invalidated
            | State::Missing
            | State::Recreated
            | State::ForeignCluster => Severity::Error,
        }
    }

    /// Whether delivery is held up.
    pub fn is_held_up(&self) -> bool {
        matches!(
            self.state,
            State::BlockedOnPubsub | State::BlockedOnDatabase | State::Broken
        )
    }

    /// Whether the relay writes the condition to `outbox.relay`. The relay does so if delivery is held up or late, or
    /// if it cannot make a check.
    pub(crate) fn is_written(&self) -> bool {
        let is_late = matches!(self.state, State::CatchingUp | State::Recovering);
        is_late || self.is_held_up() || self.unchecked.is_some()
    }

    /// Number of events that the relay has read and that wait for one of the `topics`.
    pub(crate) fn waiting_for_topics(&self) -> u64 {
        self.topics.iter().map(|topic| topic.waiting_events).sum()
    }

    /// Whether the relay delivers to at least some topics, or is a standby. `last_published` is the time since Pub/Sub
    /// last stored a request. A relay that is blocked on Pub/Sub is ready if Pub/Sub has stored a request since the
    /// block began, because this shows that other topics still work.
    pub fn is_ready(&self, last_published: Option<Duration>) -> bool {
        match self.state {
            State::Streaming | State::CatchingUp | State::Recovering | State::Standby => true,
            State::BlockedOnPubsub => {
                last_published.is_some_and(|age| age.as_secs_f64() < self.for_seconds)
            }
            _ => false,
        }
    }

    /// Whether the two conditions differ only in figures. If so, the relay need not log or write the second
    /// one. The two must have the same state, code, failed checks and topics. The time until the relay has
    /// caught up must be known in both or unknown in both.
    pub fn is_like(&self, other: &Self) -> bool {
        let names = |condition: &Self| {
            let topics = condition.topics.iter();
            let topics = topics.map(|topic| (topic.topic.clone(), topic.code.clone()));
            topics.collect::<Vec<_>>()
        };
        self.state == other.state
            && self.code == other.code
            && self.unchecked == other.unchecked
            && self.failing_topics == other.failing_topics
            && self.caught_up_in_seconds.is_some() == other.caught_up_in_seconds.is_some()
            && names(self) == names(other)
    }
}

#[cfg(test)]
mod tests;
