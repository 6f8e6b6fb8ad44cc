//! Decides the state that every view shows, from the slot's health and the condition of its relay.
//!
//! A running relay knows its condition, and reads the slot every few seconds. A command reads the slot, and
//! the condition that the relay wrote to `outbox.relay`. Both call [`decide`], so both show the same state.

use std::time::Duration;

use slot_manager::health::{Headroom, Lag};
use slot_manager::{Health, Severity};

use super::{Condition, State, is_behind};
use crate::error::Code;

/// What is known about a slot and its relay at one moment.
#[derive(Debug, Clone, Copy, Default)]
pub struct StateFacts<'a> {
    /// The health of the slot; `None` if the viewer does not know it.
    pub health: Option<&'a Health>,
    /// The condition that the relay reports. `None` if it reports none, because all is well or because the
    /// relay is down.
    pub condition: Option<&'a Condition>,
    /// Whether a recovery is due or running.
    pub is_recovering: bool,
    /// Bytes of WAL that are not confirmed.
    pub lag_bytes: Option<u64>,
    /// Age of the oldest waiting event.
    pub oldest: Option<Duration>,
    /// A fault of the publication: what is wrong, and what to do.
    pub publication: Option<(&'a str, &'a str)>,
    /// Whether events wait in quarantine.
    pub has_quarantine: bool,
}

/// The state of the relay and its slot, how bad it is, and what to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verdict {
    /// The state.
    pub state: State,
    /// How bad the state is.
    pub severity: Severity,
    /// The state in a sentence.
    pub meaning: String,
    /// What to do; `None` when nothing has to be done.
    pub remedy: Option<String>,
    /// How long delivery has been held up; `None` if it is not, or if that is unknown.
    pub lasts: Option<Duration>,
    /// Time until the relay has caught up, at the present rate; `None` if it is not catching up, or if
    /// the rate is unknown.
    pub caught_up_in: Option<Duration>,
}

impl Verdict {
    /// The condition for the HTTP port, which anyone may read, with the state that all views show. Leaves out
    /// messages of PostgreSQL, which may name roles and addresses. Messages of Pub/Sub stay: they name only
    /// topics.
    pub fn public(&self, mut condition: Condition) -> Condition {
        if condition.state != State::BlockedOnPubsub {
            condition.what = None;
            condition.hint = general_hint(condition.code.as_deref());
        }
        if condition.code.is_none() || self.state != condition.state {
            condition.hint.clone_from(&self.remedy);
        }
        condition.state = self.state;
        condition
    }
}

/// The general hint of an error code. The specific hint of an error may name roles and addresses.
pub fn general_hint(code: Option<&str>) -> Option<String> {
    let code: Option<Code> = code.and_then(|code| code.parse().ok());
    code.map(|code| code.hint().to_owned())
}

/// Decides the state.
///
/// A slot that cannot be read comes first, unless the relay reports that it recovers, or why it cannot. Then
/// come a slot that may be lost at any moment, a relay that is held up, a wrong publication, a slot that is
/// nearly full, and a slot that nobody reads.
pub fn decide(seen: StateFacts<'_>) -> Verdict {
    let said = seen.condition.filter(|said| speaks(said, seen.health));
    let mut verdict = from_slot_and_relay(seen, said);
    verdict.caught_up_in = said
        .and_then(|said| said.caught_up_in_seconds)
        .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    // Events in quarantine need a person, even if the relay delivers all other events.
    if seen.has_quarantine && verdict.severity < Severity::Warning {
        verdict.severity = Severity::Warning;
        verdict.meaning += ", except those in quarantine";
        verdict.remedy =
            Some("`postrider quarantine list` shows why, and how to release them".to_owned());
    }
    verdict
}

fn from_slot_and_relay(seen: StateFacts<'_>, said: Option<&Condition>) -> Verdict {
    let slot_state = seen.health.and_then(slot_state);
    match (slot_state, said, seen.publication) {
        (Some((state, Rank::Useless)), said, _) if !said.is_some_and(explains_the_slot) => {
            of_slot(state, seen.health)
        }
        (Some((state, Rank::Unprotected)), ..) => of_slot(state, seen.health),
        (_, Some(said), _) if said.is_held_up() => held_up(said, seen.health),
        (_, Some(said), _) if said.state == State::Recovering && is_useless(slot_state) => {
            of_relay(State::Recovering, said.severity(), None)
        }
        (_, _, Some((what, remedy))) => Verdict {
            state: State::Broken,
            severity: Severity::Error,
            meaning: format!("rows are not streamed: {what}"),
            remedy: Some(remedy.to_owned()),
            lasts: None,
            caught_up_in: None,
        },
        (Some((state, _)), ..) => of_slot(state, seen.health),
        (None, Some(said), _) => of_relay(said.state, said.severity(), seen.health),
        (None, None, _) => {
            let state = if seen.is_recovering {
                State::Recovering
            } else if is_behind(seen.lag_bytes, seen.oldest) {
                State::CatchingUp
            } else {
                State::Streaming
            };
            of_relay(state, Severity::Ok, seen.health)
        }
    }
}

/// The precedence of a state of the slot over the condition of the relay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rank {
    /// The slot cannot be read.
    Useless,
    /// The slot may be lost at any moment.
    Unprotected,
    /// The slot can be read, but needs attention.
    Usable,
}

/// The state that follows from the slot alone. `None` if a relay reads the slot and nothing is wrong with
/// the slot.
fn slot_state(health: &Health) -> Option<(State, Rank)> {
    Some(match health {
        Health::Active | Health::Lagging(_) => return None,
        Health::StandbyHeld { .. } => (State::Standby, Rank::Usable),
        Health::Inactive(_) | Health::ReadByStranger { .. } => (State::Down, Rank::Usable),
        Health::Reserved(_) | Health::Extended(_) => (State::NearlyFull, Rank::Usable),
        Health::Unreserved(_) => (State::Unreserved, Rank::Unprotected),
        Health::Lost => (State::Lost, Rank::Useless),
        Health::Invalidated { .. } => (State::Invalidated, Rank::Useless),
        Health::Missing => (State::Missing, Rank::Useless),
        Health::Recreated { .. } => (State::Recreated, Rank::Useless),
        Health::ForeignCluster { .. } => (State::ForeignCluster, Rank::Useless),
    })
}

fn is_useless(slot: Option<(State, Rank)>) -> bool {
    slot.is_some_and(|(_, rank)| rank == Rank::Useless)
}

/// Whether the reported condition still holds. If nobody reads the slot, a relay that reported that it
/// delivers, or that Pub/Sub holds it up, has stopped since.
fn speaks(said: &Condition, health: Option<&Health>) -> bool {
    let is_read = match health {
        Some(Health::Inactive(_) | Health::ReadByStranger { .. }) => false,
        Some(Health::Reserved(room) | Health::Extended(room) | Health::Unreserved(room)) => {
            room.is_read
        }
        _ => true,
    };
    is_read || matches!(said.state, State::BlockedOnDatabase | State::Broken)
}

/// Whether the relay reports that it recovers from the loss of the slot, or that something other than the
/// slot prevents the recovery.
fn explains_the_slot(said: &Condition) -> bool {
    let code: Option<Code> = said.code.as_deref().and_then(|code| code.parse().ok());
    let is_about_the_slot = matches!(
        code,
        Some(Code::SlotMissing | Code::SlotLost | Code::SlotRecreated | Code::ForeignCluster)
    );
    match said.state {
        State::Recovering => true,
        State::BlockedOnDatabase | State::Broken => !is_about_the_slot,
        _ => false,
    }
}

fn of_slot(state: State, health: Option<&Health>) -> Verdict {
    Verdict {
        state,
        severity: health.map_or(Severity::Ok, Health::severity),
        meaning: health.map_or(String::new(), slot_meaning),
        remedy: health.and_then(Health::remedy),
        lasts: None,
        caught_up_in: None,
    }
}

/// The verdict on a relay that is not held up. A lag beyond the limits makes it a warning or an error.
fn of_relay(state: State, severity: Severity, health: Option<&Health>) -> Verdict {
    let severity = severity.max(slot_severity(health));
    let remedy = match health {
        Some(health @ Health::Lagging(_)) => health.remedy(),
        _ => None,
    };
    Verdict {
        state,
        severity,
        meaning: relay_meaning(state, severity).to_owned(),
        remedy,
        lasts: None,
        caught_up_in: None,
    }
}

fn held_up(said: &Condition, health: Option<&Health>) -> Verdict {
    let mut meaning = what_holds_up(said);
    if let Some(Health::Reserved(room) | Health::Extended(room)) = health {
        meaning = format!("{meaning}; {}", room_meaning(room));
    }
    Verdict {
        state: said.state,
        severity: said.severity().max(slot_severity(health)),
        meaning,
        remedy: said.hint.clone(),
        lasts: Duration::try_from_secs_f64(said.for_seconds).ok(),
        caught_up_in: None,
    }
}

/// The severity of the slot's lag, or of the room that is left. It does not matter here whether anybody reads
/// the slot.
fn slot_severity(health: Option<&Health>) -> Severity {
    match health {
        Some(Health::Lagging(lag) | Health::Inactive(lag) | Health::ReadByStranger { lag, .. }) => {
            lag.severity
        }
        Some(Health::Reserved(room) | Health::Extended(room)) => room.severity(),
        _ => Severity::Ok,
    }
}

/// A sentence that names what holds delivery up.
fn what_holds_up(said: &Condition) -> String {
    let what = said.what.as_deref().unwrap_or("unknown");
    let code = said.code.as_deref().unwrap_or("unknown");
    match said.state {
        State::BlockedOnPubsub => {
            let topics = match (said.failing_topics, said.topics.first()) {
                (1, Some(topic)) => format!("topic {}", topic.short_name()),
                (topics, _) => format!("{topics} topics"),
            };
            format!("Pub/Sub does not take the events of {topics} ({code}): {what}")
        }
        State::BlockedOnDatabase => format!("the relay cannot use the database ({code}): {what}"),
        _ => format!("the relay does not deliver ({code}): {what}"),
    }
}

fn relay_meaning(state: State, severity: Severity) -> &'static str {
    match state {
        State::Starting => "the relay opens its first session",
        State::Recovering => "the relay publishes rows from the tables, then it streams",
        State::Standby => "another relay has the slot, and this one waits",
        State::CatchingUp if severity == Severity::Error => {
            "the relay delivers, but it is critically far behind"
        }
        State::CatchingUp => "the relay delivers, but it is behind",
        _ => "events are published as they are committed",
    }
}

fn room_meaning(room: &Headroom) -> String {
    let left = if room.severity() == Severity::Error {
        "a tenth"
    } else {
        "a quarter"
    };
    format!(
        "PostgreSQL still has all WAL for the slot, but less than {left} of max_slot_wal_keep_size is left"
    )
}

fn slot_meaning(health: &Health) -> String {
    match health {
        Health::Active | Health::Lagging(_) => String::new(),
        Health::StandbyHeld { .. } => "another relay reads the slot".to_owned(),
        Health::Inactive(Lag {
            severity: Severity::Error,
            ..
        }) => {
            "no relay reads the slot, and it is critically far behind: nothing is delivered, WAL \
               piles up"
                .to_owned()
        }
        Health::Inactive(_) => {
            "no relay reads the slot: nothing is delivered, WAL piles up".to_owned()
        }
        Health::ReadByStranger { holder, .. } => {
            format!("{holder} reads the slot, and it is not a relay: nothing is delivered")
        }
        Health::Reserved(room) | Health::Extended(room) => {
            let reader = if room.is_read {
                ""
            } else {
                ", and no relay reads it: nothing is delivered"
            };
            format!("{}{reader}", room_meaning(room))
        }
        Health::Unreserved(_) => {
            "the next checkpoint may remove WAL that the slot needs".to_owned()
        }
        Health::Lost => {
            "PostgreSQL removed WAL that the slot needs: the slot is lost for good".to_owned()
        }
        Health::Invalidated { .. } => {
            "PostgreSQL invalidated the slot: it is lost for good".to_owned()
        }
        Health::Missing => "no slot with this name exists: nothing is delivered".to_owned(),
        Health::Recreated { recorded, found } => {
            format!(
                "the slot is at {found}, but it was left at {recorded}: the stream skips events"
            )
        }
        Health::ForeignCluster { expected, found } => {
            format!("the relay's records come from cluster {expected}, but this is cluster {found}")
        }
    }
}

#[cfg(test)]
mod tests;
