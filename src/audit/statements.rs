//! The auditor's queries on the captured tables and the server, except for the comparison of rows.

use decoder::Lsn;
use slot_manager::{SlotName, slots, table};

use crate::capture::claim::Captured;
use crate::capture::table::altered_since;
use crate::capture::{ScanWindow, scan, shape};
use crate::error::Result;
use crate::mapping::TableSettings;
use crate::postgres::Sql;
use crate::store::relay_row::RecordKeeping;

/// Whether a partition was attached whose rows the stream may have missed: rows below the floor of its table, or
/// rows that were written before the partition was attached.
///
/// # Errors
/// The errors of [`has_overlooked`].
pub(super) async fn any_overlooked(
    sql: &Sql,
    tables: &[TableSettings],
    captured: &[Captured],
    records: RecordKeeping,
) -> Result<bool> {
    for (table, captured) in tables.iter().zip(captured) {
        let window = ScanWindow::unresolved(captured, records);
        if has_overlooked(sql, table, &window).await? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Whether a partition was attached with rows that the stream might not have contained; see
/// [`ScanWindow::overlooked`].
///
/// # Errors
/// `slot-busy` when the table was altered or rewritten in the meantime; database errors.
async fn has_overlooked(
    sql: &Sql,
    settings: &TableSettings,
    window: &ScanWindow<'_>,
) -> Result<bool> {
    let Some(overlooked) = window.overlooked() else {
        return Ok(false);
    };
    let (table, shape) = (&settings.table, &window.captured.shape);
    let is_ours = table::has_oid_sql(table, shape.oid);
    for range in scan::block_ranges(shape.blocks) {
        let statement = format!(
            "select exists (select from {table} e where {is_ours} and {range} and {overlooked})"
        );
        let row = sql.query_one(&statement, &[]).await;
        if row.map_err(altered_since)?.get(0) {
            return Ok(true);
        }
    }
    shape::refuse_rewritten(sql, settings, shape).await?;
    Ok(false)
}

/// Whether our session, which reads through `walsender`, has confirmed everything up to `end`. `None` if that walsender
/// does not read the slot on this server, because the position of a recreated slot says nothing about our session.
pub(super) async fn is_confirmed(
    sql: &Sql,
    slot: &SlotName,
    walsender: i32,
    end: Lsn,
) -> Result<Option<bool>> {
    let confirmed = slots::confirmed_by_reader(sql, slot, walsender).await?;
    Ok(confirmed.map(|confirmed| confirmed >= end))
}
