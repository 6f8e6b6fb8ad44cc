//! Gives one verdict for the slot and its relay together. The slot shows whether somebody reads from
//! it, but only the relay knows whether the events reach Pub/Sub.

use std::time::Duration;

use slot_manager::health::Lag;
use slot_manager::{Health, Severity};

use crate::condition::{Condition, ConditionKind};

/// The state in one word, how bad it is, and what to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Verdict {
    /// In kebab case: the name of a [`Health`], or of a [`ConditionKind`] that holds delivery up.
    /// `status` replaces some of these names by its own.
    pub(crate) name: &'static str,
    pub(crate) severity: Severity,
    /// The state in a sentence.
    pub(crate) meaning: String,
    pub(crate) remedy: Option<String>,
    /// How long delivery has been held up; `None` if it is not, or if that is unknown.
    pub(crate) lasts: Option<Duration>,
}

/// Computes the verdict from the slot's health and the condition that the relay wrote last.
///
/// A slot that is lost, in danger or not ours takes precedence over a condition, because it affects more
/// than one topic.
pub(crate) fn of(health: &Health, condition: Option<&Condition>) -> Verdict {
    // If nobody reads the slot, the relay has stopped after it wrote `blocked-on-pubsub`, so this
    // condition no longer holds.
    let speaks = |condition: &&Condition| match health {
        Health::Inactive(_) => {
            condition.is_held_up() && condition.state != ConditionKind::BlockedOnPubsub
        }
        _ => condition.is_held_up(),
    };
    let held_up = condition.filter(speaks);
    match (health, held_up) {
        (Health::Active | Health::Lagging(_) | Health::Inactive(_), Some(condition)) => Verdict {
            name: condition.state.name(),
            severity: condition.severity().max(lag_severity(health)),
            meaning: holds_up(condition),
            remedy: condition.hint.clone(),
            lasts: Duration::try_from_secs_f64(condition.for_seconds).ok(),
        },
        _ => Verdict {
            name: health.name(),
            severity: health.severity(),
            meaning: meaning(health),
            remedy: health.remedy(),
            lasts: None,
        },
    }
}

fn lag_severity(health: &Health) -> Severity {
    match health {
        Health::Lagging(lag) | Health::Inactive(lag) => lag.severity,
        _ => Severity::Ok,
    }
}

/// What holds delivery up, in a sentence.
fn holds_up(condition: &Condition) -> String {
    let what = condition.what.as_deref().unwrap_or("unknown");
    let code = condition.code.as_deref().unwrap_or("unknown");
    match condition.state {
        ConditionKind::BlockedOnPubsub => {
            let topics = match (condition.failing_topics, condition.topics.first()) {
                (1, Some(topic)) => format!("topic {}", topic.short_name()),
                (topics, _) => format!("{topics} topics"),
            };
            format!("Pub/Sub does not take the events of {topics} ({code}): {what}")
        }
        ConditionKind::BlockedOnDatabase => {
            format!("the relay cannot use the database ({code}): {what}")
        }
        _ => format!("the relay does not deliver ({code}): {what}"),
    }
}

/// The health in words.
fn meaning(health: &Health) -> String {
    let severe = |severity| match severity {
        Severity::Error => "critically far behind",
        Severity::Ok | Severity::Info | Severity::Warning => "behind",
    };
    match health {
        Health::Active => "a relay reads the slot, and is up to date".to_owned(),
        Health::StandbyHeld { .. } => "another relay reads the slot".to_owned(),
        Health::Lagging(lag) => format!("a relay reads the slot, but is {}", severe(lag.severity)),
        Health::Inactive(Lag {
            severity: Severity::Ok,
            ..
        }) => "no relay reads the slot: nothing is delivered, WAL piles up".to_owned(),
        Health::Inactive(lag) => format!(
            "no relay reads the slot, and it is {}: nothing is delivered, WAL piles up",
            severe(lag.severity)
        ),
        Health::Reserved(room) | Health::Extended(room) => {
            let reader = if room.is_read {
                ""
            } else {
                ", and nobody reads it: nothing is delivered"
            };
            format!("PostgreSQL still has all WAL for it, but not for long{reader}")
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
mod tests {
    use super::*;
    use crate::condition::TopicCondition;
    use slot_manager::health::Headroom;

    fn blocked(for_seconds: f64) -> Condition {
        Condition {
            state: ConditionKind::BlockedOnPubsub,
            for_seconds,
            code: Some("topic-missing".to_owned()),
            what: Some("topic a is missing".to_owned()),
            hint: Some("create the topic".to_owned()),
            caught_up_in_seconds: None,
            topics: vec![TopicCondition {
                topic: "projects/p/topics/a".to_owned(),
                code: "topic-missing".to_owned(),
                error: "topic a is missing".to_owned(),
                hint: "create the topic".to_owned(),
                for_seconds,
                failures: 3,
                waiting_events: 5,
                oldest_seconds: None,
            }],
            failing_topics: 1,
        }
    }

    fn lag(severity: Severity) -> Lag {
        Lag {
            bytes: 0,
            time: None,
            severity,
        }
    }

    #[test]
    fn a_slot_is_not_active_while_its_relay_delivers_nothing() {
        let verdict = of(&Health::Active, Some(&blocked(20.0)));
        assert_eq!(
            (verdict.name, verdict.severity),
            ("blocked-on-pubsub", Severity::Warning)
        );
        assert!(verdict.meaning.contains("topic a"), "{}", verdict.meaning);
        assert_eq!(verdict.remedy.as_deref(), Some("create the topic"));
        let verdict = of(&Health::Lagging(lag(Severity::Error)), Some(&blocked(20.0)));
        assert_eq!(verdict.severity, Severity::Error);
        assert_eq!(of(&Health::Active, None).name, "active");
        // The relay was blocked, and has stopped since.
        let left = of(&Health::Inactive(lag(Severity::Ok)), Some(&blocked(20.0)));
        assert_eq!(left.name, "inactive");
    }

    #[test]
    fn a_slot_in_danger_comes_before_a_relay_that_is_held_up() {
        let room = Headroom {
            bytes: Some(9 << 20),
            time_to_loss: None,
            is_read: false,
        };
        for health in [Health::Lost, Health::Unreserved(room), Health::Missing] {
            assert_eq!(of(&health, Some(&blocked(99.0))).name, health.name());
        }
        assert!(meaning(&Health::Reserved(room)).contains("nobody reads it"));
    }
}
