//! The auditor's queries on the captured tables and the server, except for the comparison of rows.

use decoder::Lsn;
use slot_manager::SlotName;
use tokio_postgres::types::{PgLsn, ToSql};

use crate::capture::ScanWindow;
use crate::error::Result;
use crate::postgres::Sql;

/// Sizes in bytes of a WAL page's header, and of the header of a segment's first page. Right after
/// one, the end of the WAL seems to be further than the end of the last record.
const PAGE_HEADERS: [u64; 2] = [24, 40];
const WAL_PAGE: u64 = 8_192;

/// Whether a partition was attached with rows that are older than the window.
pub(super) async fn has_overlooked(sql: &Sql, window: &ScanWindow<'_>) -> Result<bool> {
    let Some(overlooked) = window.overlooked() else {
        return Ok(false);
    };
    let table = &window.captured.record.table;
    let statement = format!("select exists (select from {table} e where {overlooked})");
    Ok(sql.query_one(&statement, &[]).await?.get(0))
}

/// The end of the WAL: every visible transaction lies before it.
pub(super) async fn wal_end(sql: &Sql) -> Result<Lsn> {
    let row = sql
        .query_one("select pg_catalog.pg_current_wal_insert_lsn()", &[])
        .await?;
    let end = u64::from(row.get::<_, PgLsn>(0));
    let header = PAGE_HEADERS.into_iter().find(|h| end % WAL_PAGE == *h);
    Ok(Lsn::new(end - header.unwrap_or(0)))
}

/// Whether our session, which reads through `walsender`, has confirmed everything up to `end`. Checks
/// the pid because a slot of the same name that somebody has recreated may have any position.
pub(super) async fn is_confirmed(
    sql: &Sql,
    slot: &SlotName,
    walsender: i32,
    end: Lsn,
) -> Result<bool> {
    const CONFIRMED: &str = "\
        select confirmed_flush_lsn >= $2 from pg_catalog.pg_replication_slots \
        where slot_name = $1 and active_pid = $3";
    let end = PgLsn::from(end.as_u64());
    let parameters: [&(dyn ToSql + Sync); 3] = [&slot.as_str(), &end, &walsender];
    let row = sql.query_opt(CONFIRMED, &parameters).await?;
    Ok(row.is_some_and(|row| row.get(0)))
}
