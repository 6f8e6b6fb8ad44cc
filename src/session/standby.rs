//! Waits for a slot that another session holds. The wait is visible in log and state, and ends within
//! a second after the slot is free.

use std::time::{Duration, Instant};

use slot_manager::{Slot, SlotName, slots};

use super::STATEMENT_TIMEOUT;
use crate::condition::RelayState;
use crate::error::{Code, Result};
use crate::postgres::Sql;

const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Statement timeout of a look at the slot: a standby must soon notice that its connection is dead.
const LOOK_TIMEOUT: Duration = Duration::from_secs(5);

/// Waits without end until nobody reads from the slot; `None` when it does not exist.
pub(super) async fn free_slot(
    sql: &Sql,
    slot: &SlotName,
    state: &RelayState,
) -> Result<Option<Slot>> {
    match wait_until_free(sql, slot, state).await {
        Ok(slot) => Ok(Some(slot)),
        Err(error) if error.code() == Code::SlotMissing => Ok(None),
        Err(error) => Err(error),
    }
}

async fn wait_until_free(sql: &Sql, name: &SlotName, state: &RelayState) -> Result<Slot> {
    let began = Instant::now();
    let mut logged: Option<Instant> = None;
    let mut observe = |slot: &Slot| {
        state.standby(slot.holder.as_ref());
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
    sql.limit_statements(LOOK_TIMEOUT).await?;
    let slot = slots::wait_until_free(sql, name, None, &mut observe).await;
    // Also without a slot: a recovery continues with this session.
    sql.limit_statements(STATEMENT_TIMEOUT).await?;
    Ok(slot?)
}
