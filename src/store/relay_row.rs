//! Reads and writes the relay's own row in `outbox.relay`. The relay uses the row to notice that
//! something is wrong with the slot, and commands show the row to operators.
//!
//! Only the slot, never the row, decides from which position a session resumes. By comparing the slot with the row,
//! the relay notices that the slot was replaced or moved (`recovery::slot_verdict`). The row also remembers across
//! crashes that a recovery has not ended (`mark`) and what audits have compared (`audits`). Commands read the row
//! with `shown`. `record_keeping` combines the settings and the row, and knows which published events have a record.

mod ascii_json;
pub(crate) mod audits;
pub(crate) mod mark;
pub(crate) mod record_keeping;
pub(crate) mod shown;

use decoder::Lsn;
use slot_manager::health::RecordedPosition;
use slot_manager::{Cluster, DatabaseOrigin, SlotName};
use tokio_postgres::GenericClient;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::{PgLsn, ToSql};

use crate::condition::{Condition, PruneRun};
use crate::error::{Code, Error, Result};
use crate::postgres::{Snapshot, Sql};
use crate::settings::{Dispatch, Settings};
use ascii_json::AsciiJson;
pub(crate) use record_keeping::RecordKeeping;

/// Reads `pruned_at` and `outbox.capture` without using the values, only because the statement then fails on an older
/// schema. A session runs this statement before it waits as a standby, so an older schema is noticed at once.
const SELECT: &str = "\
    SELECT system_identifier, timeline, confirmed_lsn, confirmed_is_final, recovering, dispatch, \
        audited_publication, database_oid, recovery_lsn, recovery_snapshot::text, pruned_at, \
        (SELECT max(since_lsn) FROM outbox.capture WHERE settled IS NULL AND false), \
        recovery_repeated_before \
    FROM outbox.relay WHERE slot = $1";

/// Records that this relay has taken the slot. A session with the mode `exceptions` records this mode before it
/// publishes anything. Only the auditor or a recovery changes the mode back to `full`, once all events that were
/// published without a row are below the floor.
///
/// `audited_publication` identifies the publication at the last audit. In an old row, the first matching rule applies:
///
/// - The slot may have missed events (`$6`): set NULL, so that the auditor compares all rows.
/// - The column is NULL: set `$10`, as in a new row.
/// - The column differs from `$8`, the publication of this session: set `'wrong'`. This session may miss rows, and end
///   before its first audit. `'wrong'` tells a later session that rows may be missing, even if that session has the
///   earlier publication.
///
/// A check that finds a fault in the publication writes `''`. An audit that runs at that time must notice the changed
/// value. An old `''` would hide the change, so this statement replaces an old `''` by `'wrong'`.
const TAKE: &str = "\
    INSERT INTO outbox.relay (slot, system_identifier, timeline, confirmed_lsn, instance, \
        dispatch, audited_publication, database_oid) \
    VALUES ($1::text, $2::text, $3::int, $4::pg_lsn, $5::text, $7::text, $10::text, \
        $9::oid) \
    ON CONFLICT (slot) DO UPDATE SET system_identifier = excluded.system_identifier, \
        timeline = excluded.timeline, database_oid = excluded.database_oid, \
        confirmed_lsn = excluded.confirmed_lsn, \
        confirmed_is_final = false, instance = excluded.instance, since = now(), \
        updated_at = now(), condition = NULL, condition_at = NULL, pruning = NULL, \
        pruned_at = NULL, dispatch = CASE WHEN excluded.dispatch = 'exceptions' THEN excluded.dispatch \
            ELSE relay.dispatch END, \
        audited_publication = CASE WHEN NOT $6 \
            THEN coalesce(CASE WHEN relay.audited_publication <> $8::text THEN 'wrong' END, \
                relay.audited_publication, excluded.audited_publication) END";

/// Writes the confirmed position. Changes nothing once the session has recorded its final position, so that no
/// late update overwrites the final position.
const UPDATE: &str = "\
    UPDATE outbox.relay SET confirmed_lsn = $2, updated_at = now() \
    WHERE slot = $1 AND NOT confirmed_is_final";

/// Prepares the row for a move of the slot by an operator. The moved slot may no longer stream events that an
/// unfinished recovery relies on. So the statement clears `recovery_lsn`, and the recovery begins again. With
/// `dispatch = exceptions` the statement also records `$2`, the slot's position before the move, as the final
/// confirmed position, by which the next session notices the move.
const WRITE_LEFT: &str = "\
    UPDATE outbox.relay SET recovery_lsn = NULL, recovery_snapshot = NULL, updated_at = now(), \
        confirmed_lsn = CASE dispatch WHEN 'exceptions' THEN $2 ELSE confirmed_lsn END, \
        confirmed_is_final = confirmed_is_final OR dispatch = 'exceptions' \
    WHERE slot = $1 AND confirmed_lsn IS NOT NULL";

/// Writes the relay's condition, or NULL if the relay has nothing to report. Writes only in one of these cases:
///
/// - The row names this relay (`$2`).
/// - No other process reads the slot. So a relay can report why it cannot open its first session. The statement
///   compares only the end of `application_name` with `$2`, after the last `/`: PostgreSQL may change the host name.
const WRITE_CONDITION: &str = "\
    UPDATE outbox.relay SET condition_at = now(), condition = (CASE \
        WHEN getdatabaseencoding() = 'UTF8' THEN $3::text ELSE $4::text END)::jsonb \
    WHERE slot = $1 AND (condition IS NOT NULL OR $3::text IS NOT NULL) AND (instance = $2 \
        OR NOT EXISTS ( \
            SELECT FROM pg_catalog.pg_replication_slots s \
            LEFT JOIN pg_catalog.pg_stat_activity a ON a.pid = s.active_pid \
            WHERE s.slot_name = $1 AND s.active \
              AND coalesce(a.application_name, '') NOT LIKE '%/' || substring($2 from '[^/]*$')))";

/// Writes the result of a pruning run. Does not check the instance, because a relay that prunes holds the
/// slot or lost it a moment ago. At worst, the row then shows a pruning run of the previous relay.
const WRITE_PRUNING: &str = "\
    UPDATE outbox.relay SET pruned_at = now(), pruning = (CASE \
        WHEN getdatabaseencoding() = 'UTF8' THEN $2::text ELSE $3::text END)::jsonb WHERE slot = $1";

/// Writes the final confirmed position. Changes nothing if another relay has taken the slot in the meantime,
/// because the row then has the position of that relay.
const WRITE_FINAL: &str = "\
    UPDATE outbox.relay SET confirmed_lsn = $2, confirmed_is_final = true, updated_at = now(), \
        condition = NULL, condition_at = NULL \
    WHERE slot = $1 AND instance = $3";

/// Records the current publication as audited. The caller, `recover --adopt`, has compared the tables with
/// the dispatch rows.
const KEEP_SLOT: &str = "\
    UPDATE outbox.relay SET system_identifier = $2, timeline = $3, confirmed_lsn = $4, \
        confirmed_is_final = false, audited_publication = $5, updated_at = now(), \
        database_oid = $6 \
    WHERE slot = $1";

/// Changes `commit_lsn` of the rows whose position the WAL of this cluster has not reached yet. Without this
/// change, a new event could get the position of an old row. The new `commit_lsn` is just before the end of
/// the WAL and not a multiple of 8, so no commit can have it.
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

/// The relay's row as an earlier session left it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct EarlierSession {
    /// The database in which the row was written.
    pub(crate) origin: DatabaseOrigin,
    pub(crate) timeline: u32,
    /// `None` if no relay has served the slot yet.
    pub(crate) confirmed_lsn: Option<Lsn>,
    /// Whether it is certain that no relay has confirmed anything after `confirmed_lsn`.
    pub(crate) confirmed_is_final: bool,
    /// Why a recovery has begun or was requested; `None` if none is pending.
    pub(crate) recovering: Option<String>,
    /// What the next session needs to continue that recovery. `None` if there is no recovery that can continue.
    pub(crate) unfinished: Option<Unfinished>,
    /// `Exceptions` if events above the floors may have been published without a row, otherwise `Full`.
    pub(crate) dispatch: Dispatch,
    /// Fingerprint of the publication at the last audit, or when the capture began if there was no audit.
    /// `''` or `wrong` if the stream may have left out rows since. `None` if the auditor must compare all rows.
    pub(crate) publication: Option<String>,
}

/// What a later session needs to continue an unfinished recovery with the same slot. A new recovery mark deletes
/// these values from the row, so that the next session begins the recovery again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Unfinished {
    /// Every transaction that is not visible in `snapshot` commits after this position. If the recovery has
    /// created its slot, this is the slot's consistent point.
    pub(crate) consistent_point: Lsn,
    /// The slot streams every transaction that is not visible in this snapshot.
    pub(crate) snapshot: Snapshot,
    /// If the recovery has kept the slot, the stream may contain transactions that are visible in `snapshot`, but only
    /// before this position. `None` if the recovery has created a new slot, whose stream contains none of them.
    pub(crate) repeated_before: Option<Lsn>,
}

impl EarlierSession {
    /// Returns the columns from which the slot's health is judged.
    pub(crate) fn position(&self) -> RecordedPosition {
        RecordedPosition {
            origin: self.origin,
            confirmed_lsn: self.confirmed_lsn,
            is_final: self.confirmed_is_final,
        }
    }
}

/// Reads the relay's row. Returns `None` if there is no row for this slot.
///
/// # Errors
/// `schema-missing`, also when the table has the schema of an older version.
pub(crate) async fn read(sql: &Sql, slot: &SlotName) -> Result<Option<EarlierSession>> {
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
    let lsn = |column| {
        let lsn: Option<PgLsn> = row.get(column);
        lsn.map(|lsn| Lsn::new(lsn.into()))
    };
    let snapshot: Option<String> = row.get(9);
    let snapshot = snapshot.map(|text| text.parse()).transpose()?;
    let unfinished = lsn(8).zip(snapshot);
    Ok(Some(EarlierSession {
        origin: DatabaseOrigin {
            system_identifier,
            database_oid: row.get(7),
        },
        timeline: row.get::<_, i32>(1).unsigned_abs(),
        confirmed_lsn: lsn(2),
        confirmed_is_final: row.get(3),
        recovering: row.get(4),
        unfinished: unfinished.map(|(consistent_point, snapshot)| Unfinished {
            consistent_point,
            snapshot,
            repeated_before: lsn(12),
        }),
        dispatch: record_keeping::mode(row.get(5)),
        publication: row.get(6),
    }))
}

/// Finds out which published events have a record, from the settings of this command and the relay's row.
///
/// # Errors
/// The errors of [`read`].
pub(crate) async fn read_record_keeping(sql: &Sql, settings: &Settings) -> Result<RecordKeeping> {
    let row = read(sql, &settings.slot).await?;
    Ok(RecordKeeping::of(settings.dispatch, row.as_ref()))
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

/// Which rows the session's first audit compares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Audit {
    /// Only rows that earlier audits have not compared.
    Continue,
    /// All rows, because the slot is ahead of the recorded position or has survived a failover. Either can
    /// happen without a loss, but the relay cannot be sure that nothing is lost.
    Everything,
}

/// The mode of record keeping and the publication, as a session, an audit or a recovery writes them to the row.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RelayMode<'a> {
    pub(crate) records: RecordKeeping,
    pub(crate) publication: &'a str,
}

/// A slot, its cluster, and the relay process that serves it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ServedSlot<'a> {
    pub(crate) slot: &'a SlotName,
    pub(crate) cluster: &'a Cluster,
    pub(crate) instance: &'a str,
}

/// Records that this process serves the slot. A row without an audited publication gets the fingerprint
/// `compared_with`. With [`Audit::Everything`], the audited publication of an existing row becomes NULL instead.
pub(crate) async fn take(
    sql: &Sql,
    served: ServedSlot<'_>,
    confirmed: Lsn,
    audit: Audit,
    mode: RelayMode<'_>,
    compared_with: &str,
) -> Result<()> {
    let (identifier, timeline, database) = names(served.cluster);
    let confirmed = PgLsn::from(confirmed.as_u64());
    sql.execute(
        TAKE,
        &[
            &served.slot.as_str(),
            &identifier,
            &timeline,
            &confirmed,
            &served.instance,
            &(audit == Audit::Everything),
            &mode.records.name(),
            &mode.publication,
            &database,
            &compared_with,
        ],
    )
    .await
    .map_err(outdated)?;
    Ok(())
}

/// Prepares the relay's row before an operator moves the slot ([`WRITE_LEFT`]). `confirmed` is the slot's position
/// before the move. With `dispatch = full`, no position is recorded. If the slot is then ahead of the last recorded
/// position, the next session recovers or compares all rows.
///
/// # Errors
/// Database errors. It is no error if the table does not exist.
pub(crate) async fn write_left(sql: &Sql, slot: &SlotName, confirmed: PgLsn) -> Result<()> {
    let written = sql.execute(WRITE_LEFT, &[&slot.as_str(), &confirmed]).await;
    match written {
        Ok(_) => Ok(()),
        Err(error) if error.code() == Some(&SqlState::UNDEFINED_TABLE) => Ok(()),
        Err(error) => Err(outdated(error)),
    }
}

/// Records the slot's confirmed position.
pub(crate) async fn update(sql: &Sql, slot: &SlotName, confirmed: PgLsn) -> Result<()> {
    sql.execute(UPDATE, &[&slot.as_str(), &confirmed]).await?;
    Ok(())
}

/// Records the relay's condition, for commands that cannot ask the relay. `None` removes it from the row. Does
/// nothing if the row belongs to another relay and another process reads the slot.
///
/// # Errors
/// Database errors.
pub(crate) async fn write_condition(
    sql: &impl GenericClient,
    slot: &SlotName,
    instance: &str,
    condition: Option<&Condition>,
) -> Result<()> {
    let (exact, readable) = condition
        .map(AsciiJson::of)
        .map(|it| (it.exact, it.readable))
        .unzip();
    let values: [&(dyn ToSql + Sync); 4] = [&slot.as_str(), &instance, &exact, &readable];
    sql.execute(WRITE_CONDITION, &values).await?;
    Ok(())
}

/// Records how a pruning run ended, for commands that cannot ask the relay.
///
/// # Errors
/// Database errors.
pub(crate) async fn write_pruning(sql: &Sql, slot: &SlotName, run: &PruneRun) -> Result<()> {
    let AsciiJson { exact, readable } = AsciiJson::of(run);
    sql.execute(WRITE_PRUNING, &[&slot.as_str(), &exact, &readable])
        .await?;
    Ok(())
}

/// Records the last confirmed position when the relay stops cleanly.
pub(crate) async fn write_final(
    sql: &Sql,
    slot: &SlotName,
    confirmed: PgLsn,
    instance: &str,
) -> Result<()> {
    sql.execute(WRITE_FINAL, &[&slot.as_str(), &confirmed, &instance])
        .await?;
    Ok(())
}

/// Records that the relay may continue with the slot on this cluster. Before the call, the caller makes sure
/// that every row in the captured tables has an outcome.
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

/// Moves the records of another cluster to positions that no new event can have. Otherwise the relay
/// would mistake new events for recorded ones. Returns how many records were moved.
pub(crate) async fn move_records(sql: &impl GenericClient) -> Result<u64> {
    Ok(sql.execute(MOVE_RECORDS, &[]).await?)
}

fn names(cluster: &Cluster) -> (String, i32, u32) {
    (
        cluster.system_identifier.to_string(),
        i32::try_from(cluster.timeline).unwrap_or(i32::MAX),
        cluster.database_oid,
    )
}
