//! Sets and removes the recovery mark in `outbox.relay`. While the mark is set, every session begins with
//! a recovery.

use decoder::Lsn;
use slot_manager::{Cluster, SlotName};
use tokio_postgres::GenericClient;
use tokio_postgres::types::{PgLsn, ToSql};

use super::{RelayMode, ServedSlot, Unfinished, names, outdated};
use crate::error::{Code, Error, Result};
use crate::postgres::Sql;

/// Marks the slot for recovery, unless a relay reads the slot. That relay recovers by itself if necessary, and our mark
/// would cause a second recovery.
const MARK_RECOVERING: &str = "\
    INSERT INTO outbox.relay (slot, system_identifier, timeline, instance, recovering, \
        database_oid) \
    VALUES ($1, $2, $3, $4, $5, $6) \
    ON CONFLICT (slot) DO UPDATE SET instance = excluded.instance, \
        recovering = coalesce(relay.recovering, excluded.recovering), recovery_lsn = NULL, \
        recovery_snapshot = NULL, since = now(), updated_at = now(), condition = NULL, \
        condition_at = NULL \
    WHERE NOT EXISTS ( \
        SELECT FROM pg_catalog.pg_replication_slots s WHERE s.slot_name = $1 AND s.active)";

/// Marks a slot whose stream is stuck. The next session then recovers with a new slot.
///
/// - Writes nothing if another relay has taken the slot and reads from it. If the stream is still stuck, the other
///   relay notices the problem and marks the slot.
/// - Replaces the reason of an older mark, because a recovery for the older reason might keep the stuck slot. Only the
///   reason `first-start` stays, because it says that no relay has used the slot yet.
const MARK_STUCK: &str = "\
    INSERT INTO outbox.relay (slot, system_identifier, timeline, instance, recovering, \
        database_oid) \
    VALUES ($1, $2, $3, $4, $5, $6) \
    ON CONFLICT (slot) DO UPDATE SET \
        recovering = CASE relay.recovering WHEN 'first-start' THEN relay.recovering \
            ELSE excluded.recovering END, recovery_lsn = NULL, \
        recovery_snapshot = NULL, updated_at = now() \
    WHERE relay.instance = excluded.instance OR NOT EXISTS ( \
        SELECT FROM pg_catalog.pg_replication_slots s WHERE s.slot_name = $1 AND s.active)";

const IS_ANOTHERS: &str = "\
    SELECT FROM outbox.relay r JOIN pg_catalog.pg_replication_slots s ON s.slot_name = r.slot \
    WHERE r.slot = $1 AND r.instance <> $2 AND s.active";

/// Marks the slot for recovery with a new slot. Replaces the reason of an older mark, as [`MARK_STUCK`] does.
/// Keeps `instance`, because a command runs this statement, not a relay.
const REQUEST: &str = "\
    INSERT INTO outbox.relay (slot, system_identifier, timeline, instance, recovering, \
        database_oid) \
    VALUES ($1, $2, $3, 'none yet', $4, $5) \
    ON CONFLICT (slot) DO UPDATE SET \
        system_identifier = excluded.system_identifier, timeline = excluded.timeline, \
        database_oid = excluded.database_oid, \
        confirmed_is_final = false, \
        recovering = CASE relay.recovering WHEN 'first-start' THEN relay.recovering \
            ELSE excluded.recovering END, recovery_lsn = NULL, \
        recovery_snapshot = NULL, updated_at = now()";

const WRITE_UNFINISHED: &str = "\
    UPDATE outbox.relay SET recovery_lsn = $3, recovery_snapshot = $4::text::pg_snapshot, \
        recovery_repeated_before = $5 \
    WHERE slot = $1 AND instance = $2 AND recovering IS NOT NULL";

/// Removes the mark of the recovery whose consistent point is `$2`. Every new mark clears `recovery_lsn`, so
/// this statement does not remove a newer mark.
const RECOVERED: &str = "\
    UPDATE outbox.relay r SET recovering = NULL, recovery_lsn = NULL, recovery_snapshot = NULL, \
        audited_at = now(), updated_at = now(), dispatch = $3::text, \
        audited_publication = CASE WHEN r.dispatch = 'exceptions' \
                AND r.audited_publication IS DISTINCT FROM '' THEN $4 \
            ELSE r.audited_publication END \
    WHERE r.slot = $1 AND r.recovery_lsn = $2";

/// Marks the slot for recovery, so that every session begins with a recovery until [`recovered`]. If the
/// slot is marked already, the reason of the older mark stays.
///
/// # Errors
/// `slot-held` if a relay reads the slot; the slot is then not marked.
pub(crate) async fn mark_recovering(sql: &Sql, served: ServedSlot<'_>, why: &str) -> Result<()> {
    let marked = mark(sql, MARK_RECOVERING, served, why).await?;
    match marked {
        0 => Err(taken_over(served.slot)),
        _ => Ok(()),
    }
}

fn taken_over(slot: &SlotName) -> Error {
    let what = format!("another relay has taken over slot \"{slot}\"");
    Error::new(Code::SlotHeld, what)
}

/// Whether a relay other than `instance` has taken the slot and reads from it.
pub(crate) async fn is_anothers(sql: &Sql, slot: &SlotName, instance: &str) -> Result<bool> {
    let row = sql
        .query_opt(IS_ANOTHERS, &[&slot.as_str(), &instance])
        .await?;
    Ok(row.is_some())
}

/// Marks the slot for recovery with a new slot, unless another relay has taken the slot and reads from it.
/// Returns whether the slot is marked.
pub(crate) async fn mark_stuck(sql: &Sql, served: ServedSlot<'_>, why: &str) -> Result<bool> {
    Ok(mark(sql, MARK_STUCK, served, why).await? == 1)
}

/// Runs `statement`, which marks the slot. Returns the number of rows that it has written.
async fn mark(
    sql: &Sql,
    statement: &str,
    ServedSlot {
        slot,
        cluster,
        instance,
    }: ServedSlot<'_>,
    why: &str,
) -> Result<u64> {
    let (identifier, timeline, database) = names(cluster);
    let parameters: [&(dyn ToSql + Sync); 6] = [
        &slot.as_str(),
        &identifier,
        &timeline,
        &instance,
        &why,
        &database,
    ];
    sql.execute(statement, &parameters).await.map_err(outdated)
}

/// Marks the slot for recovery on behalf of an operator. The next session of any relay on this slot then
/// recovers with a new slot. Also records that the slot is on the present cluster.
pub(crate) async fn request_recovery(
    sql: &impl GenericClient,
    slot: &SlotName,
    cluster: &Cluster,
    why: &str,
) -> Result<()> {
    let (identifier, timeline, database) = names(cluster);
    let parameters: [&(dyn ToSql + Sync); 5] =
        [&slot.as_str(), &identifier, &timeline, &why, &database];
    sql.execute(REQUEST, &parameters).await.map_err(outdated)?;
    Ok(())
}

/// Records what a later session needs to continue this recovery with the same slot.
///
/// # Errors
/// `slot-held` if another relay has marked the slot in the meantime.
pub(crate) async fn write_unfinished(
    sql: &Sql,
    slot: &SlotName,
    instance: &str,
    unfinished: &Unfinished,
) -> Result<()> {
    let from = PgLsn::from(unfinished.consistent_point.as_u64());
    let snapshot = unfinished.snapshot.to_string();
    let repeated_before = unfinished.repeated_before;
    let repeated_before = repeated_before.map(|lsn| PgLsn::from(lsn.as_u64()));
    let parameters: [&(dyn ToSql + Sync); 5] = [
        &slot.as_str(),
        &instance,
        &from,
        &snapshot,
        &repeated_before,
    ];
    match sql.execute(WRITE_UNFINISHED, &parameters).await? {
        0 => Err(taken_over(slot)),
        _ => Ok(()),
    }
}

/// Removes the mark at the end of a recovery. The caller has resolved every event that the slot does not stream.
/// `consistent_point` identifies the recovery. Returns false, and keeps the mark, if the slot was marked again
/// in the meantime.
pub(crate) async fn recovered(
    sql: &Sql,
    slot: &SlotName,
    consistent_point: Lsn,
    mode: RelayMode<'_>,
) -> Result<bool> {
    let (dispatch, publication) = (mode.records.name(), mode.publication);
    let from = PgLsn::from(consistent_point.as_u64());
    let parameters: [&(dyn ToSql + Sync); 4] = [&slot.as_str(), &from, &dispatch, &publication];
    let rows = sql.execute(RECOVERED, &parameters).await?;
    Ok(rows == 1)
}
