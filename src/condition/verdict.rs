//! Decides the state that every view shows, from the slot's health and the condition of its relay.
//!
//! The relay and the command line both call [`decide`], so both show the same state. A running relay knows
//! its condition, and reads the slot every few seconds. A command reads the slot, and the condition that the
//! relay wrote to `outbox.relay`.

mod meaning;

use std::time::Duration;

use slot_manager::{Health, Severity};

use super::{Condition, State, Unchecked, is_behind};
use crate::error::Code;
use meaning::{relay_meaning, room_meaning, slot_meaning, what_holds_up};

/// The known facts about a slot and its relay at one moment.
#[derive(Debug, Clone, Copy, Default)]
pub struct StateFacts<'a> {
    /// The health of the slot; `None` if the viewer does not know it.
    pub health: Option<&'a Health>,
    /// The condition that the relay reports. `None` if it reports none, because all is well or because the
    /// relay is down.
    pub condition: Option<&'a Condition>,
    /// How long ago the relay wrote the condition. Zero if the relay itself asks.
    pub condition_age: Duration,
    /// Whether a recovery is due or running.
    pub is_recovering: bool,
    /// Whether the relay that reads the slot is still opening its session.
    pub is_opening: bool,
    /// WAL beyond the confirmed position, in bytes, if known.
    pub lag_bytes: Option<u64>,
    /// Age of the oldest waiting event, if known.
    pub oldest: Option<Duration>,
    /// The fault of the publication: what is wrong, and what to do. `None` if no fault is known.
    pub publication: Option<(&'a str, &'a str)>,
    /// Whether events wait in quarantine.
    pub has_quarantine: bool,
    /// Whether the row of the relay in `outbox.relay` is missing, although the confirmed position has advanced since
    /// capturing began. If so, somebody has deleted the row, or has advanced the slot before the first start of a
    /// relay.
    pub lacks_row: bool,
    /// Set if the relay's records come from a later state of this server: what is wrong, and what to do. `None` if no
    /// such fault is known. `health` says whether the records come from another cluster or database.
    pub foreign_records: Option<(&'a str, &'a str)>,
}

/// Maximum age of a condition that a relay without a stream has written. Such a relay writes its condition every 5
/// seconds. After 15 seconds without a new condition, the relay counts as stopped.
const SILENT_AFTER: Duration = Duration::from_secs(15);

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
    /// How long delivery has been held up. `None` if delivery is not held up, or if the time is unknown.
    pub lasts: Option<Duration>,
    /// Time until the relay has caught up, at the present rate; `None` if it is not catching up, or if
    /// the rate is unknown.
    pub caught_up_in: Option<Duration>,
}

impl Verdict {
    /// Adds to the verdict that the relay's row in `outbox.relay` is missing.
    fn without_row(&mut self) {
        const MISSING: &str = "outbox.relay has no row for this slot";
        self.severity = self.severity.max(Severity::Warning);
        self.meaning = match self.state {
            State::Recreated => format!(
                "{MISSING}, although the slot has moved since capturing began: somebody deleted the row, \
                 or moved the slot before the first start, so the stream may skip events"
            ),
            _ => format!("{}; but {MISSING}: somebody deleted it", self.meaning),
        };
        if self.remedy.is_none() || self.state == State::Recreated {
            self.remedy = Some(
                "find out who deleted the row, then start the relay (again): it writes the row, and \
                 publishes every row of the tables that has no record in outbox.dispatch (`postrider \
                 recover --dry-run` lists them)"
                    .to_owned(),
            );
        }
    }

    /// Adds a second fault to the verdict: the publication is wrong. Before the call, the verdict describes only the
    /// fault that holds up the relay.
    fn also_not_streamed(&mut self, what: &str, remedy: &str) {
        self.severity = Severity::Error;
        self.meaning += &format!("; and rows are not streamed: {what}");
        self.remedy = Some(match self.remedy.take() {
            Some(other) => format!("{other}; and {remedy}"),
            None => remedy.to_owned(),
        });
    }

    /// Adds to the verdict what the relay cannot check.
    fn without_checks(&mut self, said: &Condition, unchecked: Unchecked) {
        self.severity = self.severity.max(said.severity());
        if said.is_held_up() {
            // Failing topics hold up the relay, and `code` and `what` describe these topics. The condition contains no
            // error for the check, so name only the check.
            self.meaning += &format!("; and the relay {}", unchecked.meaning());
            return;
        }
        let code = said.code.as_deref().unwrap_or("unknown");
        let what = said.what.as_deref().unwrap_or("unknown");
        self.meaning += &format!(
            "; but for {:.0} s the relay {} ({code}): {what}",
            said.for_seconds,
            unchecked.meaning()
        );
        if self.remedy.is_none() {
            self.remedy.clone_from(&said.hint);
        }
    }

    /// Returns the condition for `/status`, with the state of this verdict. Anyone who can reach the HTTP port may
    /// read `/status`, so this function removes private details:
    ///
    /// - Replaces a message of PostgreSQL with the meaning of its code, because the message may name roles and
    ///   addresses.
    /// - Keeps Pub/Sub's messages, because they name only topics.
    /// - Keeps the holder of the slot, because `condition::public` has already left out its role and address.
    /// - Removes the ordering keys, because they may be personal data.
    pub fn public(&self, mut condition: Condition) -> Condition {
        if !matches!(condition.state, State::BlockedOnPubsub | State::Down) {
            let code: Option<Code> = condition.code.as_deref().and_then(|code| code.parse().ok());
            condition.what = code.map(|code| match condition.unchecked {
                Some(unchecked) => format!("the relay {}: {}", unchecked.meaning(), code.meaning()),
                None => code.meaning(),
            });
            condition.hint = general_hint(condition.code.as_deref());
        }
        // The specific hint of this code names files of the machine, so the general hint replaces it.
        let credentials = Code::CredentialsUnavailable;
        if condition.code.as_deref() == Some(credentials.name()) {
            condition.hint = Some(credentials.hint().to_owned());
        }
        for topic in &mut condition.topics {
            topic.keys.clear();
            if topic.code == credentials.name() {
                credentials.hint().clone_into(&mut topic.hint);
            }
        }
        if condition.code.is_none() || self.state != condition.state {
            condition.hint.clone_from(&self.remedy);
        }
        condition.state = self.state;
        condition
    }
}

/// Returns the general hint of an error code. Public answers use this hint, because the specific hint of an
/// error may name roles and addresses.
pub fn general_hint(code: Option<&str>) -> Option<String> {
    let code: Option<Code> = code.and_then(|code| code.parse().ok());
    code.map(|code| code.hint().to_owned())
}

/// Decides the state. The first item in this list that applies decides:
///
/// - records that come from a later state of this server;
/// - a slot that the relay cannot use, unless the relay recovers, or reports an error that is not about the slot;
/// - a slot that may be lost at any moment;
/// - a relay that is held up;
/// - a relay that recovers while nobody reads the slot;
/// - a wrong publication;
/// - any other fault of the slot, for example that it is nearly full or that nobody reads it;
/// - what the relay does.
pub fn decide(seen: StateFacts<'_>) -> Verdict {
    let said = seen.condition.filter(|said| speaks(said, &seen));
    let mut verdict = from_slot_and_relay(seen, said);
    verdict.caught_up_in = said
        .and_then(|said| said.caught_up_in_seconds)
        .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    if let (Some((what, remedy)), Some(said)) = (seen.publication, said)
        && said.is_held_up()
        && verdict.state == said.state
        && said.code.as_deref() != Some(Code::PublicationDrift.name())
    {
        verdict.also_not_streamed(what, remedy);
    }
    if let Some((said, unchecked)) = said.and_then(|said| Some((said, said.unchecked?))) {
        verdict.without_checks(said, unchecked);
    }
    if seen.lacks_row {
        verdict.without_row();
    }
    // Events in quarantine need an operator, even if the relay delivers all other events.
    if seen.has_quarantine && verdict.severity < Severity::Warning {
        verdict.severity = Severity::Warning;
        if verdict.state == State::Streaming {
            verdict.meaning += ", except those in quarantine";
        } else {
            verdict.meaning += "; and events are in quarantine";
        }
        let remedy = "`postrider quarantine list` shows why events are in quarantine, and how to release them";
        verdict.remedy = Some(match verdict.remedy {
            Some(other) => format!("{other}; {remedy}"),
            None => remedy.to_owned(),
        });
    }
    verdict
}

fn from_slot_and_relay(seen: StateFacts<'_>, said: Option<&Condition>) -> Verdict {
    let is_copy = matches!(seen.health, Some(Health::ForeignCluster { .. }));
    if let Some((what, remedy)) = seen.foreign_records.filter(|_| !is_copy) {
        return faulty(State::ForeignCluster, what.to_owned(), remedy);
    }
    let slot_state = seen.health.and_then(slot_state);
    match (slot_state, said, seen.publication) {
        (Some((state, Rank::Useless)), said, _) if !said.is_some_and(explains_the_slot) => {
            of_slot(state, seen.health)
        }
        (Some((state, Rank::Unprotected)), ..) => of_slot(state, seen.health),
        (_, Some(said), _) if said.is_held_up() => held_up(said, seen.health),
        (_, Some(said), _) if said.state == State::Recovering && is_unread(slot_state) => {
            of_relay(State::Recovering, said.severity(), None)
        }
        (_, _, Some((what, remedy))) => faulty(
            State::Broken,
            format!("rows are not streamed: {what}"),
            remedy,
        ),
        (Some((state, _)), ..) => of_slot(state, seen.health),
        (None, Some(said), _) => of_relay(said.state, said.severity(), seen.health),
        (None, None, _) => {
            let info = |state| of_relay(state, Severity::Info, seen.health);
            if seen.is_recovering {
                info(State::Recovering)
            } else if seen.is_opening {
                info(State::Starting)
            } else if is_behind(seen.lag_bytes, seen.oldest) {
                info(State::CatchingUp)
            } else {
                of_relay(State::Streaming, Severity::Ok, seen.health)
            }
        }
    }
}

/// The verdict on a fault that an operator must correct, and that neither the slot nor the relay reports.
fn faulty(state: State, meaning: String, remedy: &str) -> Verdict {
    Verdict {
        state,
        severity: Severity::Error,
        meaning,
        remedy: Some(remedy.to_owned()),
        lasts: None,
        caught_up_in: None,
    }
}

/// How bad a state of the slot is. The rank decides whether the slot or the condition of the relay determines the
/// verdict.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rank {
    /// The relay cannot continue with the slot: the slot is missing, lost or invalidated, somebody has recreated or
    /// advanced it, or the relay's records come from another cluster.
    Useless,
    /// The slot may be lost at any moment.
    Unprotected,
    /// The relay can continue with the slot.
    Usable,
}

/// The state that follows from the slot alone. `None` if a relay reads the slot and nothing is wrong with
/// the slot.
fn slot_state(health: &Health) -> Option<(State, Rank)> {
    Some(match health {
        Health::Active | Health::Lagging(_) => return None,
        Health::StandbyHeld { .. } => (State::Standby, Rank::Usable),
        Health::Inactive(_) | Health::ReadByStranger { .. } | Health::HeldBySilentRelay { .. } => {
            (State::Down, Rank::Usable)
        }
        Health::Reserved(_) | Health::Extended(_) => (State::NearlyFull, Rank::Usable),
        Health::Unreserved(_) => (State::Unreserved, Rank::Unprotected),
        Health::Lost => (State::Lost, Rank::Useless),
        Health::Invalidated { .. } => (State::Invalidated, Rank::Useless),
        Health::Missing => (State::Missing, Rank::Useless),
        Health::Recreated { .. } => (State::Recreated, Rank::Useless),
        Health::ForeignCluster { .. } => (State::ForeignCluster, Rank::Useless),
    })
}

fn is_unread(slot: Option<(State, Rank)>) -> bool {
    slot.is_some_and(|(state, rank)| rank == Rank::Useless || state == State::Down)
}

/// Whether the reported condition still holds. Every condition holds while a relay with an open session reads
/// the slot, or if the health of the slot is unknown. Otherwise the reported state decides:
///
/// - `Broken` always holds, because an operator must act first. The next session clears the report.
/// - `BlockedOnDatabase` and `Recovering` hold while the report is recent, because a relay without a stream
///   keeps writing its condition.
/// - Any other state no longer holds. A relay reports such a state only while it reads the slot, so the relay
///   that wrote the report has stopped.
pub(crate) fn speaks(said: &Condition, seen: &StateFacts<'_>) -> bool {
    let is_read = match seen.health {
        _ if seen.is_opening => false,
        Some(Health::Reserved(room) | Health::Extended(room) | Health::Unreserved(room)) => {
            room.is_read
        }
        Some(Health::Active | Health::Lagging(_) | Health::StandbyHeld { .. }) | None => true,
        Some(_) => false,
    };
    match said.state {
        _ if is_read => true,
        State::Broken => true,
        State::BlockedOnDatabase | State::Recovering => seen.condition_age < SILENT_AFTER,
        _ => false,
    }
}

/// Whether the relay's report determines the verdict, although the relay cannot continue with its slot
/// ([`Rank::Useless`]). Normally the slot determines the verdict. The report does so in two cases:
///
/// - The relay is recovering.
/// - An error that is not about the slot prevents the recovery.
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

/// The severity of the slot's lag or of the remaining room for WAL. It does not depend on whether somebody
/// reads the slot.
fn slot_severity(health: Option<&Health>) -> Severity {
    match health {
        Some(
            Health::Lagging(lag)
            | Health::Inactive(lag)
            | Health::ReadByStranger { lag, .. }
            | Health::HeldBySilentRelay { lag, .. },
        ) => lag.severity,
        Some(Health::Reserved(room) | Health::Extended(room)) => room.severity(),
        _ => Severity::Ok,
    }
}

#[cfg(test)]
mod tests;
