//! Checks of the slot: whether it is ours, usable and free, and whether standby servers keep a copy
//! of it.

use super::facts::Facts;
use crate::health::{self, Observation, Thresholds, Viewer};
use crate::{Finding, Health, Severity, Slot, SlotError, SlotName};

/// The first major version with failover slots.
const FAILOVER_MAJOR: u32 = 17;

pub(super) fn check(facts: &Facts, name: &SlotName) -> Vec<Finding> {
    let Some(slot) = facts
        .slots
        .iter()
        .find(|slot| slot.slot_name == name.as_str())
    else {
        // Report a missing slot only on a primary, where the relay uses the slot. Another check reports that the
        // server is a standby server.
        let is_due = !facts.cluster.in_recovery;
        return is_due.then(|| missing(facts, name)).into_iter().collect();
    };
    if let Err(error) = slot.require_ours() {
        return vec![not_ours(name, &error)];
    }
    let mut findings = vec![state(facts, slot)];
    findings.extend(failover(facts, slot));
    findings
}

fn missing(facts: &Facts, name: &SlotName) -> Finding {
    let limit = facts
        .settings
        .number("max_replication_slots")
        .unwrap_or(i64::MAX);
    if facts.slot_count >= limit {
        return Finding::error(
            "replication-slots-used-up",
            format!("slot {name} does not exist and all {limit} replication slots are in use"),
            "drop a slot that is not needed, or raise max_replication_slots and restart the server",
        );
    }
    Finding::info(
        "slot-missing",
        format!("slot {name} does not exist yet"),
        "`postrider run` creates it; rows committed before that are not streamed",
    )
}

fn not_ours(name: &SlotName, error: &SlotError) -> Finding {
    Finding::error(
        "slot-foreign",
        error.to_string(),
        format!("choose a name other than {name} for the slot"),
    )
}

fn state(facts: &Facts, slot: &Slot) -> Finding {
    let name = &slot.slot_name;
    let observation = Observation {
        slot: Some(slot),
        viewer: Viewer::Waiting,
        time_lag: None,
        origin: facts.cluster.origin(),
        recorded: None,
    };
    let health = health::judge(&observation, &Thresholds::default());
    let remedy = health.remedy().unwrap_or_default();
    match &health {
        Health::StandbyHeld { holder } => Finding::info(
            "slot-held",
            match holder {
                Some(holder) => format!("slot {name} is read by {holder}"),
                None => format!("slot {name} is read by another session"),
            },
            "a relay that starts now waits as a standby, and takes over when that session ends",
        ),
        Health::ReadByStranger { holder, .. } => Finding::warning(
            "slot-held",
            format!("slot {name} is read by {holder}, which is not a relay"),
            &remedy,
        ),
        Health::HeldBySilentRelay { holder, silent, .. } => Finding::warning(
            "slot-held",
            format!(
                "slot {name} is held by {holder}, which has not answered for {} s",
                silent.as_secs()
            ),
            &remedy,
        ),
        Health::Inactive(_) | Health::Active | Health::Lagging(_) => {
            Finding::ok("slot", format!("slot {name} exists and is free"))
        }
        Health::Reserved(_) | Health::Extended(_) | Health::Unreserved(_) => Finding {
            severity: health.severity(),
            ..Finding::warning(
                "slot-in-danger",
                format!("slot {name} is {}", health.name()),
                remedy,
            )
        },
        Health::Lost
        | Health::Invalidated { .. }
        | Health::Missing
        | Health::Recreated { .. }
        | Health::ForeignCluster { .. } => {
            let reason = slot
                .invalidation_reason
                .as_deref()
                .unwrap_or("wal_status lost");
            Finding {
                severity: Severity::Error,
                ..Finding::error(
                    "slot-lost",
                    format!("slot {name} is lost ({reason})"),
                    remedy,
                )
            }
        }
    }
}

fn failover(facts: &Facts, slot: &Slot) -> Option<Finding> {
    let name = &slot.slot_name;
    if facts.cluster.major_version() < FAILOVER_MAJOR {
        return None;
    }
    Some(if slot.failover == Some(true) {
        Finding::ok(
            "slot-failover",
            format!("slot {name} is kept on standby servers"),
        )
    } else {
        Finding::info(
            "slot-failover-off",
            format!("slot {name} is not kept on standby servers: a promotion loses it"),
            "if there are standby servers, create the slot with slot_failover = true; without it, events \
             not delivered before a promotion are only in the outbox table",
        )
    })
}
