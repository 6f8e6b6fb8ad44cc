//! Waits until the slot has confirmed a position, for commands that need to know that the slot has
//! passed a row.

use std::time::{Duration, Instant};

use decoder::Lsn;
use slot_manager::{Slot, SlotName, slots};

use crate::error::Result;
use crate::postgres::Sql;

/// Poll interval for the slot.
pub(super) const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Waits until the slot has confirmed `end`, for at most `limit`. Does not wait if nobody reads the
/// slot. Returns the slot at the end of the wait, and whether it has confirmed `end`.
///
/// # Errors
/// Database errors.
pub(super) async fn wait_until_confirmed(
    sql: &Sql,
    slot: &SlotName,
    end: Lsn,
    limit: Duration,
) -> Result<(Option<Slot>, bool)> {
    let began = Instant::now();
    loop {
        let found = slots::find(sql, slot).await?;
        let confirmed = found.as_ref().and_then(|slot| slot.confirmed_flush_lsn);
        if confirmed.is_some_and(|confirmed| confirmed >= end) {
            return Ok((found, true));
        }
        let is_read = found.as_ref().is_some_and(|slot| slot.active);
        if !is_read || began.elapsed() >= limit {
            return Ok((found, false));
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}
