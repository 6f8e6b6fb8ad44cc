//! The auditor's queries on the captured tables and the server, except for the comparison of rows.

use decoder::Lsn;
use slot_manager::{SlotName, slots};

use crate::capture::ScanWindow;
use crate::error::Result;
use crate::postgres::Sql;

/// Whether a partition was attached with rows that the stream did not bring; see
/// [`ScanWindow::overlooked`].
pub(super) async fn has_overlooked(sql: &Sql, window: &ScanWindow<'_>) -> Result<bool> {
    let Some(overlooked) = window.overlooked() else {
        return Ok(false);
    };
    let table = &window.captured.record.table;
    let statement = format!("select exists (select from {table} e where {overlooked})");
    Ok(sql.query_one(&statement, &[]).await?.get(0))
}

/// Whether our session, which reads through `walsender`, has confirmed everything up to `end`. Checks
/// the walsender's pid, because somebody may have recreated the slot, with any position.
pub(super) async fn is_confirmed(
    sql: &Sql,
    slot: &SlotName,
    walsender: i32,
    end: Lsn,
) -> Result<bool> {
    let confirmed = slots::confirmed_by_reader(sql, slot, walsender).await?;
    Ok(confirmed.is_some_and(|confirmed| confirmed >= end))
}
