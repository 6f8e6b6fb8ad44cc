//! Decides the state of the relay and its slot. All views show this one answer to "is it delivering, and if
//! not, why": the log, the HTTP port, the page, the metrics and the command line.
//!
//! [`judge`] derives the [`Condition`] from the [`RelayFacts`] that a running relay knows. While delivery is
//! held up or late, the relay also writes its condition to `outbox.relay`, for commands that cannot reach
//! the HTTP port. [`decide`] combines the condition with the health of the slot into the [`Verdict`] that
//! every view shows. Both are pure functions. [`State`] lists all states.
//!
//! Causes come before symptoms. A relay without a session is broken, not behind. A relay that cannot
//! record its outcomes is blocked by the database, even if a topic fails too.

mod phase;
mod pruning;
mod state;
mod trouble;
mod verdict;

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use slot_manager::Severity;

pub use phase::{Phase, RelayState};
pub use pruning::{PruneRun, PruneRuns};
pub use state::State;
pub use trouble::{FailingTopic, Trouble, Troubles};
pub use verdict::{StateFacts, Verdict, decide, general_hint};

use crate::error::Code;

/// A failure shorter than this is an ordinary retry, and does not change the condition.
const FAILS_AFTER: Duration = Duration::from_secs(3);

/// A relay that is blocked for longer needs a person.
const URGENT_AFTER: Duration = Duration::from_secs(60);

/// A relay is catching up when its oldest event is this old, or its lag is this large.
const BEHIND_AFTER: Duration = Duration::from_secs(10);
const BEHIND_BYTES: u64 = 64 << 20;

/// Maximum number of failing topics that a condition names.
const TOPICS_NAMED: usize = 20;

/// The condition of a relay at one moment.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Condition {
    /// What the relay is doing.
    pub state: State,
    /// How long the condition has lasted, in seconds.
    pub for_seconds: f64,
    /// The code of the error that blocks or breaks the relay.
    pub code: Option<String>,
    /// What happened.
    pub what: Option<String>,
    /// What to do.
    pub hint: Option<String>,
    /// Seconds until the relay has caught up, at the present rate.
    pub caught_up_in_seconds: Option<f64>,
    /// Topics to which publishing fails: the first 20 by name.
    pub topics: Vec<TopicCondition>,
    /// How many topics fail.
    pub failing_topics: usize,
}

/// A topic to which publishing fails.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TopicCondition {
    /// Full name, `projects/<project>/topics/<name>`.
    pub topic: String,
    /// Code of the latest error.
    pub code: String,
    /// The latest error.
    pub error: String,
    /// What to do.
    pub hint: String,
    /// How long the topic has failed, in seconds.
    pub for_seconds: f64,
    /// Failed requests in this time.
    pub failures: u64,
    /// Events that the relay has read and that wait for this topic.
    pub waiting_events: u64,
    /// Age of the oldest of these events in seconds, if known.
    pub oldest_seconds: Option<f64>,
}

/// What a running relay knows about itself.
#[derive(Debug, Clone)]
pub struct RelayFacts {
    /// The phase, and when it began.
    pub phase: (Phase, Instant),
    /// The topics that fail.
    pub topics: Vec<FailingTopic>,
    /// The error that keeps outcomes from being recorded, if there is one.
    pub recording: Option<Trouble>,
    /// The fault of the publication, if it has one.
    pub publication: Option<Trouble>,
    /// WAL beyond the confirmed position, bytes.
    pub lag_bytes: Option<u64>,
    /// Age of the oldest event without an outcome.
    pub oldest: Option<Duration>,
    /// Time until the relay has caught up.
    pub caught_up_in: Option<Duration>,
    /// The present time by PostgreSQL's clock, Unix microseconds.
    pub server_micros: i64,
}

/// Judges the facts as of `now`.
pub fn judge(facts: &RelayFacts, now: Instant) -> Condition {
    let age = |since: Instant| now.saturating_duration_since(since);
    let lasts = |trouble: &Trouble| age(trouble.since) >= FAILS_AFTER;
    let failing = facts.topics.iter().filter(|topic| lasts(&topic.trouble));
    let failing: Vec<&FailingTopic> = failing.collect();
    let (state, trouble) = match &facts.phase.0 {
        Phase::Connecting => (State::Starting, None),
        Phase::Standby(_) => (State::Standby, None),
        Phase::Broken(trouble) if is_of_the_database(trouble.code) => {
            (State::BlockedOnDatabase, Some(trouble))
        }
        Phase::Broken(trouble) => (State::Broken, Some(trouble)),
        phase @ (Phase::Streaming | Phase::Recovering) => {
            let first = failing.iter().map(|topic| &topic.trouble);
            let first = first.min_by_key(|trouble| trouble.since);
            let recording = facts.recording.as_ref().filter(|trouble| lasts(trouble));
            let publication = facts.publication.as_ref().filter(|trouble| lasts(trouble));
            match (recording, first, publication) {
                (Some(trouble), _, _) => (State::BlockedOnDatabase, Some(trouble)),
                (None, Some(trouble), _) => (State::BlockedOnPubsub, Some(trouble)),
                (None, None, Some(trouble)) if is_of_the_database(trouble.code) => {
                    (State::BlockedOnDatabase, Some(trouble))
                }
                (None, None, Some(trouble)) => (State::Broken, Some(trouble)),
                (None, None, None) if *phase == Phase::Recovering => (State::Recovering, None),
                (None, None, None) if is_behind(facts.lag_bytes, facts.oldest) => {
                    (State::CatchingUp, None)
                }
                (None, None, None) => (State::Streaming, None),
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
        caught_up_in_seconds: caught_up_in.map(|time| time.as_secs_f64()),
        topics: named
            .map(|topic| TopicCondition::of(topic, now, facts.server_micros))
            .collect(),
        failing_topics: failing.len(),
    }
}

fn is_behind(lag_bytes: Option<u64>, oldest: Option<Duration>) -> bool {
    oldest.is_some_and(|oldest| oldest >= BEHIND_AFTER)
        || lag_bytes.is_some_and(|bytes| bytes >= BEHIND_BYTES)
}

/// Whether the cause lies in PostgreSQL, so that the relay continues by itself once PostgreSQL works again.
fn is_of_the_database(code: Code) -> bool {
    matches!(
        code,
        Code::PostgresUnreachable
            | Code::PostgresConnectionLost
            | Code::DiskFull
            | Code::PostgresTooManyConnections
            | Code::RoleConnectionLimit
            | Code::DatabaseConnectionLimit
            | Code::WalSendersUsedUp
            | Code::ReplicationSlotsUsedUp
            | Code::PostgresTimeout
            | Code::PostgresStopping
            | Code::PostgresStandby
            | Code::LeaseLost
            | Code::SlotBusy
    )
}

impl TopicCondition {
    fn of(topic: &FailingTopic, now: Instant, server_micros: i64) -> Self {
        let trouble = &topic.trouble;
        let oldest = topic.oldest_commit.map(|commit| {
            let micros = server_micros.saturating_sub(commit).max(0).unsigned_abs();
            Duration::from_micros(micros).as_secs_f64()
        });
        Self {
            topic: topic.topic.to_string(),
            code: trouble.code.name().to_owned(),
            error: trouble.what.clone(),
            hint: trouble.hint.clone(),
            for_seconds: now.saturating_duration_since(trouble.since).as_secs_f64(),
            failures: topic.failures,
            waiting_events: topic.waiting_events,
            oldest_seconds: oldest,
        }
    }

    /// The name without the project.
    pub fn short_name(&self) -> &str {
        let name = self.topic.rsplit_once("/topics/");
        name.map_or(&self.topic, |(_, name)| name)
    }
}

impl Condition {
    /// How urgent the condition is.
    pub fn severity(&self) -> Severity {
        match self.state {
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

    /// Whether the relay writes the condition to `outbox.relay`, because it is held up or catching up.
    pub(crate) fn is_written(&self) -> bool {
        self.is_held_up() || self.state == State::CatchingUp
    }

    /// Whether the relay delivers at least some topics, or is a standby for another relay.
    /// `last_published`: how long ago Pub/Sub last stored a request.
    pub fn is_ready(&self, last_published: Option<Duration>) -> bool {
        match self.state {
            State::Streaming | State::CatchingUp | State::Recovering | State::Standby => true,
            State::BlockedOnPubsub => {
                last_published.is_some_and(|age| age.as_secs_f64() < self.for_seconds)
            }
            _ => false,
        }
    }

    /// Whether the other condition has the same state, code and topics, and has an estimate exactly if this
    /// one has. The figures may differ.
    pub fn is_like(&self, other: &Self) -> bool {
        let names = |condition: &Self| {
            let topics = condition.topics.iter();
            let topics = topics.map(|topic| (topic.topic.clone(), topic.code.clone()));
            topics.collect::<Vec<_>>()
        };
        self.state == other.state
            && self.code == other.code
            && self.failing_topics == other.failing_topics
            && self.caught_up_in_seconds.is_some() == other.caught_up_in_seconds.is_some()
            && names(self) == names(other)
    }
}

#[cfg(test)]
mod tests;
