//! Waiting for a slot that another session holds: visible, and over within a second of its end.

use std::time::{Duration, Instant};

use slot_manager::{Slot, slots};

use super::Relay;
use crate::error::Result;
use crate::postgres::Sql;

const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Waits without end until nobody reads from the slot.
pub(super) async fn wait_until_free(relay: &Relay, sql: &Sql) -> Result<Slot> {
    let began = Instant::now();
    let mut logged: Option<Instant> = None;
    let observe = |slot: &Slot| {
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
    Ok(slots::wait_until_free(sql, &relay.settings.slot, None, observe).await?)
}
