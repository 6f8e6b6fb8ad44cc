//! Reads and writes the results of audits in the relay's row: whether there was an audit, and which
//! publication and dispatch mode it used.

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
      and audited_publication is not distinct from $6 \
      and exists (select from pg_catalog.pg_replication_slots s \
                  where s.slot_name = $1 and s.active_pid = $5)";

const NOTE_WRONG_PUBLICATION: &str = "\
    update outbox.relay set audited_publication = '', updated_at = now() \
    where slot = $1 and audited_publication is distinct from '' \
      and not exists (select from pg_catalog.pg_replication_slots s \
                      where s.slot_name = $1 and s.active_pid is distinct from $2 \
                        and s.active_pid is not null)";

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

/// Reads the results of earlier audits from the relay's row. The returned [`AuditHistory::records`] has the mode of
/// this session from `records`, and the mode of earlier sessions from the row. An audit or a recovery may have changed
/// the mode in the row since `records` was made.
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

/// Records that an audit has finished, so every row below the floors is resolved. Also records the
/// publication's fingerprint and the dispatch mode from `mode`. Does nothing in these cases:
///
/// - The row belongs to another relay.
/// - The session's walsender (`walsender`) no longer reads the slot.
/// - A recovery is pending.
/// - Since `earlier` was read, the relay has found the publication wrong, and has changed the recorded
///   fingerprint.
pub(crate) async fn audited(
    sql: &Sql,
    slot: &SlotName,
    instance: &str,
    walsender: i32,
    mode: RelayMode<'_>,
    earlier: &AuditHistory,
) -> Result<()> {
    let (slot, dispatch) = (slot.as_str(), mode.records.name());
    let parameters: [&(dyn ToSql + Sync); 6] = [
        &slot,
        &instance,
        &mode.publication,
        &dispatch,
        &walsender,
        &earlier.publication,
    ];
    sql.execute(AUDITED, &parameters).await?;
    Ok(())
}

/// Records that the publication was found wrong, so PostgreSQL may have left out some rows of the stream. The
/// catalogue may keep no trace of the fault, so without this note a restarted relay could not notice it. The next
/// audit removes the note.
///
/// `walsender` is our walsender, if it reads the slot. Does nothing if another session reads the slot, because
/// the relay of that session checks the publication by its own settings.
pub(crate) async fn note_wrong_publication(
    sql: &Sql,
    slot: &SlotName,
    walsender: Option<i32>,
) -> Result<()> {
    sql.execute(NOTE_WRONG_PUBLICATION, &[&slot.as_str(), &walsender])
        .await?;
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
