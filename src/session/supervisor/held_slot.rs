//! The slot that this relay streams from: its health, and the proof that PostgreSQL receives our messages.

use std::time::{Duration, Instant};

use replication::LeaseProof;
use slot_manager::activity::{self, LastReply};
use slot_manager::health::{self, Observation, Thresholds, Viewer};
use slot_manager::{DatabaseOrigin, Health, Slot};

use crate::error::Result;
use crate::postgres::Sql;

/// The health of the slot that this relay streams from. Does not compare the slot's position with the recorded one,
/// because a session does this when it opens, and nobody else can advance the slot while we hold it.
pub(super) fn health_of(slot: &Slot, origin: DatabaseOrigin, oldest: Option<f64>) -> Health {
    let observation = Observation {
        slot: Some(slot),
        viewer: Viewer::Streaming,
        time_lag: oldest.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok()),
        origin,
        recorded: None,
    };
    health::judge(&observation, &Thresholds::default())
}

/// Renews the proof of our lease. PostgreSQL shows when we sent the last status message that it has
/// processed. The lease runs from the time when we sent this message.
pub(super) async fn prove_lease(sql: &Sql, proof: &LeaseProof, walsender: i32) -> Result<()> {
    let asked_at = Instant::now();
    match activity::last_reply(sql, walsender).await? {
        LastReply::NoSlot => proof.give_up(),
        // PostgreSQL hides the time from our role, but shows that our walsender has the slot.
        LastReply::Hidden => proof.seen(asked_at),
        LastReply::SentAt(sent_at) => {
            // If our clock was set back in the meantime, the message seems newer than it is, but it never
            // counts as sent later than now.
            let age = sent_at.elapsed().unwrap_or_default();
            if let Some(sent_at) = Instant::now().checked_sub(age) {
                proof.prove(sent_at);
            }
        }
    }
    Ok(())
}
