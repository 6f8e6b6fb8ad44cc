//! The relay's own row in `outbox.relay`: a tripwire, and information for operators.
//!
//! It never decides the position to resume from: only the slot does. It lets the relay notice that
//! the slot is not the one that was served before (`recovery/loss.rs`), and remember across crashes
//! that a recovery has not ended.

use decoder::Lsn;
use slot_manager::health::RecordedPosition;
use slot_manager::{Cluster, Origin, SlotName};
use tokio_postgres::GenericClient;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::{PgLsn, ToSql};

use super::recovery::loss::Audit;
use crate::error::{Code, Error, Result};
use crate::postgres::Sql;
use crate::settings::Dispatch;

const SELECT: &str = "\
    SELECT system_identifier, timeline, confirmed_lsn, confirmed_is_final, recovering, dispatch, \
        audited_publication, database_oid FROM outbox.relay WHERE slot = $1";

/// Makes the mode `exceptions` durable before anything is delivered. Only the auditor or a recovery
/// switches back to `full`, once all events delivered without a row are below the floor. `$6` says
/// that the slot may have left events out, so that everything has to be compared.
const TAKE: &str = "\
    INSERT INTO outbox.relay (slot, system_identifier, timeline, confirmed_lsn, instance, \
        dispatch, audited_publication, database_oid) \
    VALUES ($1::text, $2::text, $3::int, $4::pg_lsn, $5::text, $7::text, $8::text, \
        $9::oid) \
    ON CONFLICT (slot) DO UPDATE SET system_identifier = excluded.system_identifier, \
        timeline = excluded.timeline, database_oid = excluded.database_oid, \
        confirmed_lsn = excluded.confirmed_lsn, \
        confirmed_is_final = false, instance = excluded.instance, since = now(), \
        updated_at = now(), \
        dispatch = CASE WHEN excluded.dispatch = 'exceptions' THEN excluded.dispatch \
            ELSE relay.dispatch END, \
        audited_publication = CASE WHEN NOT $6 \
            THEN coalesce(relay.audited_publication, excluded.audited_publication) END";

/// A final position is the last write of a session: an update that arrives later is out of date.
const UPDATE: &str = "\
    UPDATE outbox.relay SET confirmed_lsn = $2, updated_at = now() \
    WHERE slot = $1 AND NOT confirmed_is_final";

/// Written before a person moves the slot: no relay has confirmed any later position.
const WRITE_LEFT: &str = "\
    UPDATE outbox.relay SET confirmed_lsn = $2, confirmed_is_final = true, updated_at = now() \
    WHERE slot = $1 AND confirmed_lsn IS NOT NULL AND dispatch = 'exceptions'";

/// Only if the row is still ours: another relay may have taken the slot in the meantime.
const WRITE_FINAL: &str = "\
    UPDATE outbox.relay SET confirmed_lsn = $2, confirmed_is_final = true, updated_at = now() \
    WHERE slot = $1 AND instance = $3";

/// Not while a relay reads the slot: it has already recovered, and our mark would outlive its
/// recovery.
const MARK_RECOVERING: &str = "\
    INSERT INTO outbox.relay (slot, system_identifier, timeline, instance, recovering, \
        database_oid) \
    VALUES ($1, $2, $3, $4, $5, $6) \
    ON CONFLICT (slot) DO UPDATE SET instance = excluded.instance, \
        recovering = coalesce(relay.recovering, excluded.recovering), since = now(), \
        updated_at = now() \
    WHERE NOT EXISTS ( \
        SELECT FROM pg_catalog.pg_replication_slots s WHERE s.slot_name = $1 AND s.active)";

/// Not while another relay reads the slot: it finds out by itself whether the slot can be read.
const MARK_STUCK: &str = "\
    INSERT INTO outbox.relay (slot, system_identifier, timeline, instance, recovering, \
        database_oid) \
    VALUES ($1, $2, $3, $4, $5, $6) \
    ON CONFLICT (slot) DO UPDATE SET \
        recovering = coalesce(relay.recovering, excluded.recovering), updated_at = now() \
    WHERE relay.instance = excluded.instance OR NOT EXISTS ( \
        SELECT FROM pg_catalog.pg_replication_slots s WHERE s.slot_name = $1 AND s.active)";

const IS_ANOTHERS: &str = "\
    SELECT FROM outbox.relay r JOIN pg_catalog.pg_replication_slots s ON s.slot_name = r.slot \
    WHERE r.slot = $1 AND r.instance <> $2 AND s.active";

/// Keeps the `instance` of the relay that serves the slot.
const REQUEST: &str = "\
    INSERT INTO outbox.relay (slot, system_identifier, timeline, instance, recovering, \
        database_oid) \
    VALUES ($1, $2, $3, 'none yet', $4, $5) \
    ON CONFLICT (slot) DO UPDATE SET \
        system_identifier = excluded.system_identifier, timeline = excluded.timeline, \
        database_oid = excluded.database_oid, \
        confirmed_is_final = false, \
        recovering = coalesce(relay.recovering, excluded.recovering), updated_at = now()";

/// The current publication counts as audited, because `recover --adopt` has compared the tables.
const KEEP_SLOT: &str = "\
    UPDATE outbox.relay SET system_identifier = $2, timeline = $3, confirmed_lsn = $4, \
        confirmed_is_final = false, audited_publication = $5, updated_at = now(), \
        database_oid = $6 \
    WHERE slot = $1";

/// Moves rows whose place the WAL of this cluster has not reached yet to a place where no commit can
/// be.
const MOVE_RECORDS: &str = "\
    WITH below AS ( \
        SELECT now.lsn, now.lsn - mod(now.lsn - '0/0'::pg_lsn, 8) - 1::numeric AS place \
        FROM pg_current_wal_lsn() now (lsn)) \
    UPDATE outbox.dispatch d SET commit_lsn = place.place, ordinal = place.ordinal \
    FROM (SELECT commit_lsn, ordinal AS old_ordinal, below.place, \
                 (row_number() OVER (ORDER BY commit_lsn, ordinal) + ( \
                     SELECT coalesce(max(ordinal), 0) FROM outbox.dispatch \
                     WHERE commit_lsn = below.place))::int AS ordinal \
          FROM outbox.dispatch, below WHERE commit_lsn >= below.lsn) place \
    WHERE d.commit_lsn = place.commit_lsn AND d.ordinal = place.old_ordinal";

/// Ends the recovery, unless another relay has marked the slot in between: that relay recovers again.
/// If it was too late, because the slot is still ours, its mark is removed.
const RECOVERED: &str = "\
    UPDATE outbox.relay r SET recovering = NULL, instance = $2, audited_at = now(), \
        updated_at = now(), dispatch = $4::text, \
        audited_publication = CASE WHEN r.dispatch = 'exceptions' THEN $5 \
            ELSE r.audited_publication END \
    WHERE r.slot = $1 AND (r.instance = $2 OR EXISTS ( \
        SELECT FROM pg_catalog.pg_replication_slots s \
        WHERE s.slot_name = $1 AND s.active_pid = $3))";

/// The row, as an earlier session has left it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Recorded {
    /// The database in which the row was written.
    pub(crate) origin: Origin,
    pub(crate) timeline: u32,
    /// `None` if the slot was never served.
    pub(crate) confirmed_lsn: Option<Lsn>,
    /// Whether nothing was confirmed after `confirmed_lsn`.
    pub(crate) confirmed_is_final: bool,
    /// The reason of a recovery that was begun or requested, and has not ended.
    pub(crate) recovering: Option<String>,
    /// Which events got a row in the last session.
    pub(crate) dispatch: Dispatch,
    /// Fingerprint of the publication with which all events that have an outcome were delivered.
    pub(crate) publication: Option<String>,
}

impl Recorded {
    /// The part that is needed to judge the slot's health.
    pub(crate) fn position(&self) -> RecordedPosition {
        RecordedPosition {
            origin: self.origin,
            confirmed_lsn: self.confirmed_lsn,
            is_final: self.confirmed_is_final,
        }
    }
}

/// Reads the row.
///
/// # Errors
/// `schema-missing`, also when the table has the schema of an older version.
pub(crate) async fn read(sql: &Sql, slot: &SlotName) -> Result<Option<Recorded>> {
    let row = sql
        .query_opt(SELECT, &[&slot.as_str()])
        .await
        .map_err(outdated)?;
    let Some(row) = row else { return Ok(None) };
    let identifier: String = row.get(0);
    let system_identifier = identifier.parse().map_err(|e| {
        let what = format!("outbox.relay has an invalid system identifier: {identifier:?}");
        Error::new(Code::PostgresStatement, what).caused_by(e)
    })?;
    let confirmed: Option<PgLsn> = row.get(2);
    Ok(Some(Recorded {
        origin: Origin {
            system_identifier,
            database_oid: row.get(7),
        },
        timeline: row.get::<_, i32>(1).unsigned_abs(),
        confirmed_lsn: confirmed.map(|lsn| Lsn::new(lsn.into())),
        confirmed_is_final: row.get(3),
        recovering: row.get(4),
        dispatch: Dispatch::named(row.get(5)).unwrap_or(Dispatch::Exceptions),
        publication: row.get(6),
    }))
}

fn outdated(error: tokio_postgres::Error) -> Error {
    match error.code() {
        Some(state) if *state == SqlState::UNDEFINED_COLUMN => Error::new(
            Code::SchemaMissing,
            "outbox.relay has the schema of an older version",
        )
        .caused_by(error),
        _ => error.into(),
    }
}

/// How the session records, and the publication as it was before the session began.
#[derive(Debug, Clone, Copy)]
pub(super) struct Manner<'a> {
    pub(super) dispatch: Dispatch,
    pub(super) publication: &'a str,
}

/// Records that this process serves the slot from now on.
pub(super) async fn take(
    sql: &Sql,
    slot: &SlotName,
    cluster: &Cluster,
    confirmed: PgLsn,
    instance: &str,
    audit: Audit,
    manner: Manner<'_>,
) -> Result<()> {
    let (identifier, timeline, database) = names(cluster);
    sql.execute(
        TAKE,
        &[
            &slot.as_str(),
            &identifier,
            &timeline,
            &confirmed,
            &instance,
            &(audit == Audit::Everything),
            &manner.dispatch.name(),
            &manner.publication,
            &database,
        ],
    )
    .await?;
    Ok(())
}

/// Records where a relay with `dispatch = exceptions` has left the slot, before a person moves it, so
/// that the next session notices the move. A relay with full records compares the tables, and does
/// not need this.
///
/// # Errors
/// Errors of a statement; no error if no relay has ever served.
pub(crate) async fn write_left(sql: &Sql, slot: &SlotName, confirmed: PgLsn) -> Result<()> {
    let written = sql.execute(WRITE_LEFT, &[&slot.as_str(), &confirmed]).await;
    match written {
        Ok(_) => Ok(()),
        Err(error) if error.code() == Some(&SqlState::UNDEFINED_TABLE) => Ok(()),
        Err(error) => Err(outdated(error)),
    }
}

/// Records how far the slot is confirmed.
pub(super) async fn update(sql: &Sql, slot: &SlotName, confirmed: PgLsn) -> Result<()> {
    sql.execute(UPDATE, &[&slot.as_str(), &confirmed]).await?;
    Ok(())
}

/// Records the last confirmed position, at a clean stop.
pub(super) async fn write_final(
    sql: &Sql,
    slot: &SlotName,
    confirmed: PgLsn,
    instance: &str,
) -> Result<()> {
    sql.execute(WRITE_FINAL, &[&slot.as_str(), &confirmed, &instance])
        .await?;
    Ok(())
}

/// Marks the slot for recovery: until [`recovered`], every session begins with a recovery. An older
/// mark keeps its reason.
///
/// # Errors
/// `slot-held`, without a mark, when somebody reads from the slot by now.
pub(super) async fn mark_recovering(
    sql: &Sql,
    slot: &SlotName,
    cluster: &Cluster,
    instance: &str,
    why: &str,
) -> Result<()> {
    let marked = mark(sql, MARK_RECOVERING, slot, cluster, instance, why).await?;
    match marked {
        0 => Err(Error::new(
            Code::SlotHeld,
            format!("another relay has taken over slot \"{slot}\""),
        )),
        _ => Ok(()),
    }
}

/// Whether another relay than `instance` has taken the slot and reads from it.
pub(super) async fn is_anothers(sql: &Sql, slot: &SlotName, instance: &str) -> Result<bool> {
    let row = sql
        .query_opt(IS_ANOTHERS, &[&slot.as_str(), &instance])
        .await?;
    Ok(row.is_some())
}

/// Marks the slot for recovery as [`mark_recovering`] does, unless another relay has taken it and
/// reads from it. Returns whether the slot is marked.
pub(super) async fn mark_stuck(
    sql: &Sql,
    slot: &SlotName,
    cluster: &Cluster,
    instance: &str,
    why: &str,
) -> Result<bool> {
    Ok(mark(sql, MARK_STUCK, slot, cluster, instance, why).await? == 1)
}

/// Runs one of the two statements that mark the slot. Returns how many rows it has written.
async fn mark(
    sql: &Sql,
    statement: &str,
    slot: &SlotName,
    cluster: &Cluster,
    instance: &str,
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

/// Marks the slot for recovery on behalf of a person; the next session of any relay recovers. Also
/// records the present cluster as the one on which the slot is served.
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

/// Lets the relay continue with the slot on this cluster. Every row in the tables must have an outcome.
pub(crate) async fn keep_slot(
    sql: &impl GenericClient,
    slot: &SlotName,
    cluster: &Cluster,
    confirmed: Lsn,
    publication: &str,
) -> Result<()> {
    let (identifier, timeline, database) = names(cluster);
    let confirmed = PgLsn::from(confirmed.as_u64());
    let parameters: [&(dyn ToSql + Sync); 6] = [
        &slot.as_str(),
        &identifier,
        &timeline,
        &confirmed,
        &publication,
        &database,
    ];
    sql.execute(KEEP_SLOT, &parameters)
        .await
        .map_err(outdated)?;
    Ok(())
}

/// Moves records of another cluster out of the way, so that new events are not taken for recorded
/// ones. Returns how many were moved.
pub(crate) async fn move_records(sql: &impl GenericClient) -> Result<u64> {
    Ok(sql.execute(MOVE_RECORDS, &[]).await?)
}

/// Removes the mark: every event that the new slot will not bring is resolved, with the publication
/// as it was before. Returns whether the mark was ours to remove.
pub(super) async fn recovered(
    sql: &Sql,
    slot: &SlotName,
    instance: &str,
    walsender: i32,
    manner: Manner<'_>,
) -> Result<bool> {
    let (dispatch, publication) = (manner.dispatch.name(), manner.publication);
    let parameters: [&(dyn ToSql + Sync); 5] = [
        &slot.as_str(),
        &instance,
        &walsender,
        &dispatch,
        &publication,
    ];
    let rows = sql.execute(RECOVERED, &parameters).await?;
    Ok(rows == 1)
}

fn names(cluster: &Cluster) -> (String, i32, u32) {
    (
        cluster.system_identifier.to_string(),
        i32::try_from(cluster.timeline).unwrap_or(i32::MAX),
        cluster.database_oid,
    )
}
