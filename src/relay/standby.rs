//! Waits for a slot that another session holds. The wait is visible in log and state, and ends within
//! a second after the slot is free.

use std::time::{Duration, Instant};

use slot_manager::{Slot, SlotError, slots};

use super::Relay;
use crate::error::Result;
use crate::postgres::{Sql, answer_within};

const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// How often the wait starts over, and how long an answer may take. Without this, a standby with a
/// dead connection would wait forever.
const ROUND: Duration = Duration::from_secs(5);
const ANSWER_LIMIT: Duration = Duration::from_secs(5);

/// Waits without end until nobody reads from the slot.
pub(super) async fn wait_until_free(relay: &Relay, sql: &Sql) -> Result<Slot> {
    let began = Instant::now();
    let mut logged: Option<Instant> = None;
    let mut observe = |slot: &Slot| {
        relay.state.standby(slot.holder.as_ref());
        if logged.is_none_or(|at| at.elapsed() >= LOG_INTERVAL)
            && let Some(holder) = &slot.holder
        {
            logged = Some(Instant::now());
            tracing::info!(
                code = "slot-held",
                slot = slot.slot_name,
                "standby for {:.0} s: the slot is held by {holder}",
                began.elapsed().as_secs_f64()
            );
        }
    };
    loop {
        let round = async {
            let deadline = Some(Instant::now() + ROUND);
            match slots::wait_until_free(sql, &relay.settings.slot, deadline, &mut observe).await {
                Ok(slot) => Ok(Some(slot)),
                Err(SlotError::StillHeld { .. }) => Ok(None),
                Err(error) => Err(error),
            }
        };
        if let Some(slot) = answer_within(ROUND + ANSWER_LIMIT, round).await? {
            return Ok(slot);
        }
    }
}
