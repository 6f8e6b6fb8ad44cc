//! The sentences that explain a state of the slot or of the relay to the operator.

use slot_manager::health::{Headroom, Lag};
use slot_manager::{Health, Severity};

use super::super::{Condition, State};

/// Returns a sentence that says why delivery is held up.
pub(super) fn what_holds_up(said: &Condition) -> String {
    let what = said.what.as_deref().unwrap_or("unknown");
    let code = said.code.as_deref().unwrap_or("unknown");
    match said.state {
        State::BlockedOnPubsub => {
            let topics = match (said.failing_topics, said.topics.first()) {
                (1, Some(topic)) => format!("topic {}", topic.short_name()),
                (topics, _) => format!("{topics} topics"),
            };
            format!("Pub/Sub does not accept the events of {topics} ({code}): {what}")
        }
        State::BlockedOnDatabase => format!("the relay cannot use the database ({code}): {what}"),
        _ => format!("the relay does not deliver ({code}): {what}"),
    }
}

pub(super) fn relay_meaning(state: State, severity: Severity) -> &'static str {
    match state {
        State::Starting => "the relay is opening its session, and delivers nothing yet",
        State::Recovering => "the relay publishes rows from the tables, then it streams",
        State::Standby => "another relay holds the slot, and this relay waits as a standby",
        State::CatchingUp if severity == Severity::Error => {
            "the relay delivers, but it is critically far behind"
        }
        State::CatchingUp => "the relay delivers, but it is behind",
        _ => "events are published as they are committed",
    }
}

pub(super) fn room_meaning(room: &Headroom) -> String {
    let left = if room.severity() == Severity::Error {
        "a tenth"
    } else {
        "a quarter"
    };
    format!(
        "PostgreSQL still has all WAL for the slot, but less than {left} of max_slot_wal_keep_size is left"
    )
}

pub(super) fn slot_meaning(health: &Health) -> String {
    match health {
        Health::Active | Health::Lagging(_) => String::new(),
        Health::StandbyHeld { .. } => "another relay reads the slot".to_owned(),
        Health::Inactive(Lag {
            severity: Severity::Error,
            ..
        }) => {
            "no relay reads the slot, and it is critically far behind: nothing is delivered, WAL accumulates"
                .to_owned()
        }
        Health::Inactive(_) => {
            "no relay reads the slot: nothing is delivered, WAL accumulates".to_owned()
        }
        Health::ReadByStranger { holder, .. } => {
            format!("{holder} reads the slot, and it is not a relay: nothing is delivered")
        }
        Health::HeldBySilentRelay { holder, silent, .. } => format!(
            "the relay that holds the slot ({holder}) has not answered for {} s: nothing is delivered",
            silent.as_secs()
        ),
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
                "the slot is at {found}, but the relay left it at {recorded}: the stream skips events"
            )
        }
        Health::ForeignCluster { expected, found } => {
            format!("the relay's records come from cluster {expected}, but this is cluster {found}")
        }
    }
}
