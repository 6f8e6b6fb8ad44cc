//! How far the slot is, for commands that need a proof that it has passed a position.

use std::time::{Duration, Instant};

use decoder::Lsn;
use slot_manager::{Slot, SlotName, slots};
use tokio_postgres::types::PgLsn;

use crate::error::Result;
use crate::postgres::Sql;

/// Between two looks at the slot.
const LOOK_INTERVAL: Duration = Duration::from_millis(200);

/// Sizes in bytes of a WAL page, of its header, and of the header of a segment's first page. Right
/// after a header, the end of the WAL seems to be further than the end of the last record.
const WAL_PAGE: u64 = 8_192;
const PAGE_HEADERS: [u64; 2] = [24, 40];

/// The end of the WAL: every visible transaction lies before it.
pub(super) async fn wal_end(sql: &Sql) -> Result<Lsn> {
    let row = sql
        .query_one("select pg_catalog.pg_current_wal_insert_lsn()", &[])
        .await?;
    let end = u64::from(row.get::<_, PgLsn>(0));
    let header = PAGE_HEADERS.into_iter().find(|h| end % WAL_PAGE == *h);
    Ok(Lsn::new(end - header.unwrap_or(0)))
}

/// Waits until the slot has confirmed `end`, for at most `limit`, and not at all if nobody reads the
/// slot. Returns the slot as it is then.
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
        tokio::time::sleep(LOOK_INTERVAL).await;
    }
}
