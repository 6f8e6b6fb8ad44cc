//! The auditor's queries, except for the comparison of rows.

use decoder::Lsn;
use slot_manager::SlotName;
use tokio_postgres::types::{PgLsn, ToSql};

use super::{AuditHistory, AuditSubject};
use crate::capture::ScanWindow;
use crate::error::Result;
use crate::postgres::Sql;
use crate::settings::Dispatch;

/// Sizes in bytes of a WAL page's header, and of the header of a segment's first page. Right after
/// one, the end of the WAL seems to be further than the end of the last record.
const PAGE_HEADERS: [u64; 2] = [24, 40];
const WAL_PAGE: u64 = 8_192;

const EARLIER: &str = "\
    select audited_at is not null, audited_publication, dispatch from outbox.relay where slot = $1";

const AUDITED: &str = "\
    update outbox.relay set audited_at = now(), audited_publication = $3, dispatch = $4, \
        updated_at = now() \
    where slot = $1 and instance = $2 and recovering is null \
      and exists (select from pg_catalog.pg_replication_slots s \
                  where s.slot_name = $1 and s.active_pid = $5)";

const MARK_BROKEN: &str = "\
    update outbox.relay set recovering = coalesce(recovering, $3), recovery_lsn = null, \
        recovery_snapshot = null, updated_at = now() \
    where slot = $1 and instance = $2";

/// Reads what earlier audits have recorded.
pub(super) async fn earlier(sql: &Sql, slot: &SlotName) -> Result<AuditHistory> {
    let row = sql.query_one(EARLIER, &[&slot.as_str()]).await?;
    Ok(AuditHistory {
        had_one: row.get(0),
        publication: row.get(1),
        repeats: Dispatch::named(row.get(2)) != Some(Dispatch::Full),
    })
}

/// Records that every row below the floors is resolved, with the publication `publication`, and that
/// later rows are recorded as `dispatch` says. Does nothing when the session has lost the slot.
pub(super) async fn audited(
    sql: &Sql,
    subject: &AuditSubject,
    publication: &str,
    dispatch: Dispatch,
) -> Result<()> {
    let (slot, instance) = (subject.slot.as_str(), &subject.instance);
    let (dispatch, walsender) = (dispatch.name(), subject.walsender);
    let parameters: [&(dyn ToSql + Sync); 5] =
        [&slot, instance, &publication, &dispatch, &walsender];
    sql.execute(AUDITED, &parameters).await?;
    Ok(())
}

/// Whether a partition was attached with rows that are older than the window.
pub(super) async fn has_overlooked(sql: &Sql, window: &ScanWindow<'_>) -> Result<bool> {
    let Some(overlooked) = window.overlooked() else {
        return Ok(false);
    };
    let table = &window.captured.record.table;
    let statement = format!("select exists (select from {table} e where {overlooked})");
    Ok(sql.query_one(&statement, &[]).await?.get(0))
}

/// Makes the next session begin with a recovery, unless another relay has taken the slot.
pub(super) async fn mark_broken(sql: &Sql, subject: &AuditSubject, why: &str) -> Result<()> {
    let (slot, instance) = (subject.slot.as_str(), &subject.instance);
    sql.execute(MARK_BROKEN, &[&slot, instance, &why]).await?;
    Ok(())
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
