//! Raises the floor of a captured table in its record.

use std::collections::BTreeMap;

use slot_manager::SlotName;
use tokio_postgres::types::ToSql;

use crate::error::Result;
use crate::postgres::Sql;

/// Records which rows of a table are resolved. Does nothing unless walsender `$6` reads slot `$5`, because only the
/// session that holds the slot may do this.
///
/// `$4` lists the present partitions of the table. If `$4` is NULL, the recorded partitions stay. The statement also
/// changes four lists of other partitions, which [`CaptureRecord`](super::CaptureRecord) describes:
///
/// | column | gets | loses |
/// |---|---|---|
/// | `detached` | the recorded partitions that are not in `$4` | the partitions in `$4` and `$8` |
/// | `unread` | the partitions in `$9`, with their floors | the partitions in `$4` and `$8` |
/// | `uncaptured` | the partitions in `$10`, with their floors | the partitions in `$4`, and dropped partitions |
/// | `settled` | the partitions in `$8` that still exist, with the end of the WAL | the partitions in `$4`, and dropped ones |
///
/// The partitions in `$8` have no unresolved rows left. A partition that already has a floor in its list keeps this
/// floor. Dropped partitions leave `uncaptured` and `settled`, because PostgreSQL may give their OIDs to other tables.
const RESOLVE: &str = "\
    UPDATE outbox.capture SET floor = greatest(floor, $2::text::xid8), \
        floor_seq = CASE WHEN $7::text IS NULL THEN floor_seq ELSE $3 END, \
        numbering = coalesce($7, numbering), partitions = coalesce($4, partitions), \
        recovery_progress = NULL, \
        detached = array( \
            SELECT DISTINCT o FROM unnest( \
                detached || coalesce(string_to_array(partitions, ',')::oid[], '{}')) o \
            WHERE o <> ALL (string_to_array(coalesce($4, partitions, ''), ',')::oid[]) \
                AND o <> ALL ($8) ORDER BY o), \
        unread = ($9::text::jsonb || unread) - string_to_array(coalesce($4, ''), ',') - $8::text[], \
        uncaptured = ( \
            SELECT coalesce(jsonb_object_agg(u.key, u.value), '{}') FROM jsonb_each( \
                ($10::text::jsonb || uncaptured) - string_to_array(coalesce($4, ''), ',')) u \
            WHERE EXISTS (SELECT FROM pg_catalog.pg_class c WHERE c.oid = u.key::oid)), \
        settled = ( \
            SELECT coalesce(jsonb_object_agg(s.key, s.value), '{}') FROM ( \
                SELECT s.key, s.value FROM jsonb_each(settled || ( \
                    SELECT coalesce(jsonb_object_agg(o, pg_catalog.pg_current_wal_insert_lsn()), '{}') \
                    FROM unnest($8) o)) s \
                WHERE s.key <> ALL (string_to_array(coalesce($4, ''), ',')) \
                    AND EXISTS ( \
                        SELECT FROM pg_catalog.pg_class c WHERE c.oid = s.key::oid AND c.relkind = 'r') \
                ORDER BY (s.value #>> '{}')::pg_lsn DESC, s.key::oid DESC LIMIT $11) s) \
    WHERE identity = $1 AND slot = $5 AND EXISTS ( \
        SELECT FROM pg_catalog.pg_replication_slots s \
        WHERE s.slot_name = $5 AND s.active_pid = $6)";

/// Maximum number of tables in `settled`. Without a limit, each detached partition that is kept would make the
/// record longer and pruning slower. The statement forgets the table that was settled first. The events of a
/// forgotten table cannot be released from quarantine, and pruning deletes their old records.
const MAX_SETTLED: i64 = 256;

/// The rows of one table that are resolved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Resolved<'a> {
    pub(crate) identity: &'a str,
    pub(crate) floor: u64,
    /// A value of the column `seq`, and the name of the sequence that fills this column. Scans start at this value,
    /// because rows with a lower `seq` usually belong to transactions before the floor.
    pub(crate) floor_seq: Option<(i64, &'a str)>,
    pub(crate) partitions: Option<&'a str>,
    /// Former partitions that have no unresolved rows left, or no longer exist. The record forgets those that no
    /// longer exist, and the others are settled.
    pub(crate) left: &'a [u32],
    /// Former partitions that could not be read, each with the floor from which it must be read later.
    pub(crate) unread: &'a BTreeMap<u32, u64>,
    /// Former partitions that are still attached to a table which is not captured, each with its floor.
    pub(crate) uncaptured: &'a BTreeMap<u32, u64>,
}

/// Records which rows of the table are resolved. Does nothing if the session has lost the slot.
///
/// # Errors
/// Database errors.
pub(crate) async fn resolve(
    sql: &Sql,
    slot: &SlotName,
    walsender: i32,
    resolved: &Resolved<'_>,
) -> Result<()> {
    let floor = resolved.floor.to_string();
    let slot = slot.as_str();
    let (floor_seq, numbering) = resolved.floor_seq.unzip();
    let unread = serde_json::json!(resolved.unread).to_string();
    let uncaptured = serde_json::json!(resolved.uncaptured).to_string();
    let parameters: [&(dyn ToSql + Sync); 11] = [
        &resolved.identity,
        &floor,
        &floor_seq,
        &resolved.partitions,
        &slot,
        &walsender,
        &numbering,
        &resolved.left,
        &unread,
        &uncaptured,
        &MAX_SETTLED,
    ];
    sql.execute(RESOLVE, &parameters).await?;
    Ok(())
}
