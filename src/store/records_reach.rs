//! Reads how far the relay's records reach: the highest transaction ids and the last WAL position that they name.
//!
//! Each id in a record is the `xmin` of a snapshot: the oldest transaction that was running at that time. The
//! transaction that writes the record was running at that time too, or began later. So on one server, no id in a record
//! is higher than the id of the transaction that wrote the record. Likewise, no record names a WAL position after its
//! own.
//!
//! Suppose that the server was set back to an earlier state, and that a newer dump of the records was restored. The
//! restoring transaction then has a low id, but writes the higher ids of the dump. Later transactions do not hide this.
//! Only an `UPDATE` of the record does, because the row then has the id of the updating transaction.
//!
//! Not here: what follows from the facts (`recovery::foreign_records`).

use decoder::Lsn;
use slot_manager::{DatabaseOrigin, SlotName, cluster};
use tokio_postgres::types::PgLsn;

use crate::error::Result;
use crate::postgres::Sql;

/// Returns the rows that name transaction ids: a description, the highest id in the row, and the transaction that
/// wrote the row (its `xmin`, extended to 64 bits as in `capture::shape`). Leaves out `added_xids`: even if such
/// an id is too high, the relay skips no row of another transaction because of it. Leaves out rows with a permanent
/// `xmin` (below 3), which names no transaction.
const NAMED_IDS: &str = "\
    SELECT named.what, named.highest, next.xid - ((next.xid - named.writer) & 4294967295) \
    FROM ( \
        SELECT 'outbox.capture (' || c.identity || ')', greatest( \
            c.floor::text::bigint, c.recorded_from::text::bigint, \
            coalesce(pg_snapshot_xmin(c.since)::text::bigint, 0), \
            coalesce((SELECT max(f.value::bigint) FROM jsonb_each_text(c.unread || c.uncaptured) f), 0), \
            coalesce((c.recovery_progress ->> 'below')::bigint, 0)), c.xmin::text::bigint \
        FROM outbox.capture c \
        UNION ALL \
        SELECT 'outbox.relay', coalesce(pg_snapshot_xmin(r.recovery_snapshot)::text::bigint, 0), \
            r.xmin::text::bigint \
        FROM outbox.relay r WHERE r.slot = $1 \
        ) named (what, highest, writer), \
        (SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint) next (xid) \
    WHERE named.writer >= 3 ORDER BY named.what";

const ORIGINS: &str = "\
    SELECT system_identifier, database_oid FROM outbox.relay ORDER BY updated_at DESC";

const LAST_COMMIT: &str = "SELECT max(commit_lsn) FROM outbox.dispatch";

/// The highest transaction id in one row of the relay's tables.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NamedId {
    /// The table, and the row if the table has several.
    pub(crate) row: String,
    pub(crate) highest: u64,
    /// The transaction that wrote the row.
    pub(crate) written_by: u64,
}

/// How far the relay's records reach.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct RecordsReach {
    pub(crate) ids: Vec<NamedId>,
    /// The highest `commit_lsn` in `outbox.dispatch`; `None` if the table is empty.
    pub(crate) last_commit: Option<Lsn>,
    /// The end of the server's WAL, read after the records.
    pub(crate) wal_end: Lsn,
    /// The databases on which relays have run, most recent first.
    pub(crate) origins: Vec<DatabaseOrigin>,
}

impl RecordsReach {
    /// Returns the database on which a relay ran most recently, if no relay has run on the database `here`.
    pub(crate) fn served_elsewhere(&self, here: DatabaseOrigin) -> Option<DatabaseOrigin> {
        let is_here = self.origins.iter().any(|origin| origin.matches(here));
        self.origins.first().copied().filter(|_| !is_here)
    }
}

/// Reads how far the records reach. Works only on a primary.
///
/// # Errors
/// Database errors, also on a standby server, which has no end of the WAL.
pub(crate) async fn read(sql: &Sql, slot: &SlotName) -> Result<RecordsReach> {
    let id = |value: i64| value.unsigned_abs();
    let rows = sql.query(NAMED_IDS, &[&slot.as_str()]).await?;
    let ids = rows.iter().map(|row| NamedId {
        row: row.get(0),
        highest: id(row.get(1)),
        written_by: id(row.get(2)),
    });
    let ids = ids.collect();
    let last: Option<PgLsn> = sql.query_one(LAST_COMMIT, &[]).await?.get(0);
    let origins = sql.query(ORIGINS, &[]).await?;
    let origins = origins.iter().filter_map(|row| {
        Some(DatabaseOrigin {
            system_identifier: row.get::<_, &str>(0).parse().ok()?,
            database_oid: row.get(1),
        })
    });
    Ok(RecordsReach {
        ids,
        last_commit: last.map(|lsn| Lsn::new(lsn.into())),
        wal_end: cluster::wal_end(sql).await?,
        origins: origins.collect(),
    })
}
