//! Reads and writes the results of audits in the relay's row: whether there was an audit, and with which
//! publication and dispatch mode.

use slot_manager::SlotName;
use tokio_postgres::types::ToSql;

use super::{RecordKeeping, RelayMode};
use crate::error::Result;
use crate::postgres::Sql;

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

/// The results of earlier audits, from the relay's row.
#[derive(Debug)]
pub(crate) struct AuditHistory {
    pub(crate) had_one: bool,
    pub(crate) publication: Option<String>,
    pub(crate) records: RecordKeeping,
}

/// Reads the results of earlier audits. `records` says what the session of the caller records.
pub(crate) async fn earlier(
    sql: &Sql,
    slot: &SlotName,
    records: RecordKeeping,
) -> Result<AuditHistory> {
    let row = sql.query_one(EARLIER, &[&slot.as_str()]).await?;
    Ok(AuditHistory {
        had_one: row.get(0),
        publication: row.get(1),
        records: records.after(row.get(2)),
    })
}

/// Records that an audit has finished: every row below the floors is resolved. Also records the
/// publication's fingerprint and the dispatch mode of `mode`. Does nothing if the process `walsender`,
/// which is the session's walsender, no longer reads the slot.
pub(crate) async fn audited(
    sql: &Sql,
    slot: &SlotName,
    instance: &str,
    walsender: i32,
    mode: RelayMode<'_>,
) -> Result<()> {
    let (slot, dispatch) = (slot.as_str(), mode.records.name());
    let parameters: [&(dyn ToSql + Sync); 5] =
        [&slot, &instance, &mode.publication, &dispatch, &walsender];
    sql.execute(AUDITED, &parameters).await?;
    Ok(())
}

/// Makes the next session begin with a recovery. Does nothing if another relay has taken the slot.
pub(crate) async fn mark_broken(
    sql: &Sql,
    slot: &SlotName,
    instance: &str,
    why: &str,
) -> Result<()> {
    sql.execute(MARK_BROKEN, &[&slot.as_str(), &instance, &why])
        .await?;
    Ok(())
}
