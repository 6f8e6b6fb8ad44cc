//! Deletes old events that have a final outcome, and old records that nobody needs.
//!
//! A record is a row of outbox.dispatch. A run has four steps:
//!
//! 1. [`proof`] decides from the state of the slot what may be deleted.
//! 2. [`days`] drops the daily partitions whose rows may all be deleted.
//! 3. [`rows`] deletes rows of the other partitions and tables.
//! 4. [`records`] deletes records.
//!
//! Steps 3 and 4 delete in chunks along an index. Each chunk is one short transaction, and a pause follows it. So an
//! operator may stop the command between two chunks, and a later run deletes the rest.
//!
//! **An outbox row with a record may be deleted** if all of these conditions hold:
//!
//! - The event is published or discarded, and its record is older than the retention.
//! - The commit of the event is below the confirmed position of the slot.
//! - The transaction of the row is below the floor of its table. A recovery with `dispatch = exceptions` publishes all
//!   rows from the floor on again, so these rows must stay.
//!
//! If the slot is lost or has another fault, its confirmed position proves nothing about events. The dispatch mode
//! decides what is deleted in this case:
//!
//! - `dispatch = full`: every row that meets the first condition, and no record.
//! - `dispatch = exceptions`: nothing.
//!
//! **An outbox row without a record** may belong to an event that was published with `dispatch = exceptions`. The row
//! may be deleted if all of these conditions hold:
//!
//! - The row has an id, and the event is older than the retention.
//! - The row was inserted after the capture of its table began.
//! - The transaction of the row is below the floor of its table. If the relay has changed to `dispatch = full` since,
//!   the floor at the time of this change counts.
//! - The relay has compared the table or partition of the row with the records. Until then the floor proves nothing
//!   about the row.
//!
//! **A record may be deleted** if all of these conditions hold:
//!
//! - The event is published or discarded, and its record is older than the retention.
//! - The outbox row of the event is in no captured table. Without the record, the auditor or a recovery would publish
//!   the row again.
//! - The outbox row is in no former table either, such as a detached partition, because a former table may be attached
//!   again.
//! - The commit of the event is below the slot's `restart_lsn`. After a crash, PostgreSQL may return to an older
//!   confirmed position, and send later events again. But it sends no event below `restart_lsn`.
//! - The slot has confirmed the WAL up to the deletion of the outbox row. An update may have moved the row to another
//!   partition before its deletion. The slot streams such a row a second time, and only the record shows that the event
//!   was published.
//!
//! The reasons are in docs/adr/0032-pruning.md and, for partitions, docs/adr/0037-daily-partitions.md.

mod days;
mod distance;
mod proof;
pub(super) mod records;
mod rights;
mod rows;

use std::time::Duration;

use serde::Serialize;
use tokio_postgres::error::{Error as PgError, SqlState};

pub(crate) use self::days::{AddedDays, PrunedDay, add_ahead};
use self::proof::PruneProof;
pub(crate) use self::rights::{Pruning, missing_day_grant, require_rights};
use crate::capture::claim;
use crate::error::{Code, Error, Result};
use crate::ops::since::{Since, SinceTime};
use crate::ops::walk;
use crate::postgres::Sql;
use crate::settings::Settings;

/// How long a chunk waits for a lock. After this time the chunk gives up, so that sessions that queue behind it
/// can continue.
const LOCK_TIMEOUT: &str = "SET lock_timeout = '2s'";

/// Maximum number of attempts of a chunk that has to wait for a lock, or finds a row that another
/// session is moving.
const ATTEMPTS: u32 = 5;

/// Pause before the next attempt of a chunk.
const RETRY_PAUSE: Duration = Duration::from_secs(1);

/// Value of [`PruneStep::what`] while the run waits for the slot before it deletes the first record.
pub(crate) const WAITING: &str = "waiting up to 20 s for the slot to pass the deleted rows, \
    so that their old records can be deleted";

/// Value of [`PruneStep::what`] while records are deleted.
pub(crate) const RECORDS: &str = "outbox.dispatch";

/// Default number of rows that one chunk reads.
pub(crate) const CHUNK: u32 = 5_000;

/// Default pause after each chunk that deleted rows.
pub(crate) const PAUSE: Duration = Duration::from_millis(100);

/// What to delete, and how fast.
#[derive(Debug, Clone)]
pub(crate) struct PruneRequest {
    pub(crate) older_than: Duration,
    /// Number of rows that one chunk reads.
    pub(crate) chunk: u32,
    /// Pause after each chunk that deleted rows.
    pub(crate) pause: Duration,
    pub(crate) who: Pruning,
}

impl PruneRequest {
    /// Returns the request of a relay with the setting `prune_after`.
    pub(crate) fn of_relay(older_than: Duration) -> Self {
        Self {
            older_than,
            chunk: CHUNK,
            pause: PAUSE,
            who: Pruning::Relay,
        }
    }

    /// Whether rows are only counted.
    fn is_dry_run(&self) -> bool {
        self.who == (Pruning::Command { dry_run: true })
    }
}

/// The result of a run. Programs depend on its JSON form.
#[derive(Debug, Serialize)]
pub(crate) struct PruneReport {
    /// Whether rows were only counted.
    pub(crate) dry_run: bool,
    /// False if the run was stopped before its end.
    pub(crate) finished: bool,
    pub(crate) tables: Vec<PrunedTable>,
    pub(crate) dispatch: PrunedRecords,
}

/// The rows of one outbox table.
#[derive(Debug, Default, Serialize)]
pub(crate) struct PrunedTable {
    pub(crate) table: String,
    /// Rows that were deleted, or in a dry run would be.
    pub(crate) rows: u64,
    /// Time of the oldest of these rows, RFC 3339.
    pub(crate) oldest: Option<String>,
    /// Rows that are kept for another reason than their age.
    pub(crate) kept: KeptRows,
    /// Daily partitions that were dropped, or in a dry run would be. Their rows are included in `rows`.
    pub(crate) days: Vec<PrunedDay>,
    /// Days that got a partition.
    pub(crate) days_added: Vec<String>,
    /// Why a partition could not be added or dropped.
    pub(crate) notes: Vec<String>,
}

/// Numbers of rows that stay, by reason.
#[derive(Debug, Default, Serialize)]
pub(crate) struct KeptRows {
    pub(crate) quarantined: u64,
    /// Rows without an outcome.
    pub(crate) waiting: u64,
    /// Rows of published or discarded events that the slot has not confirmed yet.
    pub(crate) unconfirmed: u64,
    /// Rows of published or discarded events that the slot has confirmed, but whose transactions are not below the
    /// floor of the table yet.
    pub(crate) above_floor: u64,
    /// Rows from before the capture. They stay, because the relay does not know whether anybody needs them.
    pub(crate) not_captured: u64,
    /// Rows without a record, in a table that does not say when its events happened, so their age is
    /// unknown.
    pub(crate) without_time: u64,
}

/// The rows of outbox.dispatch.
#[derive(Debug, Default, Serialize)]
pub(crate) struct PrunedRecords {
    /// Rows that were deleted, or in a dry run would be.
    pub(crate) rows: u64,
    /// When the oldest of these rows was recorded, RFC 3339.
    pub(crate) oldest: Option<String>,
    /// Old records that stay, because their rows are still in the outbox.
    pub(crate) of_rows: u64,
    /// Why some or all old records have to stay until a later run.
    pub(crate) postponed: Option<String>,
    /// Former tables that cannot be searched. All records that may belong to their rows stay.
    pub(crate) notes: Vec<String>,
}

/// The progress of a run.
#[derive(Debug)]
pub(crate) struct PruneStep<'a> {
    /// The name of the table, or a description of the command's current work.
    pub(crate) what: &'a str,
    pub(crate) examined: u64,
    pub(crate) deleted: u64,
    /// Estimated share of the old rows that have been read, from 0 to 1. `None` if it is unknown.
    pub(crate) share: Option<f64>,
}

/// A function that receives the progress of a run. It returns false to stop the run.
pub(crate) type OnPruneStep<'a> = dyn FnMut(&PruneStep<'_>) -> bool + Send + 'a;

/// Everything that the chunks depend on.
struct PruneContext<'a> {
    sql: &'a Sql,
    settings: &'a Settings,
    request: &'a PruneRequest,
    /// The run keeps all rows and records of this time and later.
    cutoff: SinceTime,
    proof: PruneProof,
}

/// Deletes, or in a dry run counts, all rows and records that may be deleted.
///
/// # Errors
/// `privilege-missing` with the GRANT; `slot-missing`, `slot-lost` and others if nothing proves which
/// rows are published; database errors.
pub(crate) async fn run(
    sql: &Sql,
    settings: &Settings,
    request: &PruneRequest,
    on_step: &mut OnPruneStep<'_>,
) -> Result<PruneReport> {
    let proof = proof::find(sql, settings).await?;
    require_rights(sql, settings, request.who).await?;
    walk::prepare(sql).await?;
    sql.batch_execute(LOCK_TIMEOUT).await?;
    let context = PruneContext {
        sql,
        settings,
        request,
        cutoff: Since::Ago(request.older_than).resolve(sql).await?,
        proof,
    };
    let captured = claim::known(sql, &settings.slot, &settings.tables)
        .await
        .map_err(never_captured)?;
    let mut report = PruneReport {
        dry_run: request.is_dry_run(),
        finished: true,
        tables: Vec::new(),
        dispatch: PrunedRecords::default(),
    };
    for (table, captured) in settings.tables.iter().zip(&captured) {
        let mut pruned = PrunedTable {
            table: table.table.to_string(),
            ..PrunedTable::default()
        };
        let finished = days::prune(&context, table, captured, &mut pruned, on_step).await?
            && rows::prune(&context, table, captured, &mut pruned, on_step).await?;
        report.tables.push(pruned);
        if !finished {
            report.finished = false;
            return Ok(report);
        }
    }
    if let Some(why) = unknown_rows(&context, &report.tables) {
        report.dispatch.postponed = Some(why);
        return Ok(report);
    }
    let (pruned, finished) = records::prune(&context, &captured, on_step).await?;
    report.dispatch = pruned;
    report.finished = finished;
    Ok(report)
}

/// Returns the reason to keep all records if a table has old rows, and none of them has a record.
///
/// In this case the settings of this command may name another id column than the relay's settings. The command then
/// computes wrong event ids, so every record looks as if its row were gone.
///
/// Returns `None` if published events may lack a record, because old rows without a record are then no sign of wrong
/// settings.
fn unknown_rows(context: &PruneContext<'_>, tables: &[PrunedTable]) -> Option<String> {
    let PruneProof::Slot { repeats: false, .. } = context.proof else {
        return None;
    };
    let table = tables.iter().find(|table| {
        let kept = &table.kept;
        let have_records = table.rows + kept.quarantined + kept.unconfirmed + kept.above_floor;
        kept.waiting > 0 && have_records == 0
    })?;
    Some(format!(
        "none of the {} old rows of {} has a record: either their topics have failed for long, or the \
         settings of this command name other columns than those of the relay (`postrider audit` shows them)",
        table.kept.waiting, table.table
    ))
}

fn never_captured(error: Error) -> Error {
    match error.code() {
        Code::SlotBusy => error.hint(
            "nothing was deleted: start the relay once, so that it captures the table, or remove the table \
             from the settings",
        ),
        _ => error,
    }
}

/// Counts the failed attempts of one chunk. A retry function with a closure would not work, because the future
/// of an async closure cannot be sent to another task.
#[derive(Debug, Default)]
struct FailedAttempts(u32);

impl FailedAttempts {
    /// Returns `Ok` after a pause if the caller should try the chunk again, because a lock or a change of
    /// another session stopped it. Returns an error after the last attempt, and for any other failure.
    async fn again(&mut self, error: PgError) -> Result<()> {
        if !is_in_the_way(&error) {
            return Err(crate::capture::table::altered_since(error));
        }
        self.0 += 1;
        if self.0 < ATTEMPTS {
            tokio::time::sleep(RETRY_PAUSE).await;
            return Ok(());
        }
        Err(Error::new(
            Code::PostgresTimeout,
            "another session holds a lock on the rows or the table",
        )
        .caused_by(error)
        .hint(
            "the chunks before this one are deleted: prune again later; `postrider explain \
             postgres-timeout` shows how to find the other session",
        ))
    }
}

fn is_in_the_way(error: &PgError) -> bool {
    let codes = [
        SqlState::LOCK_NOT_AVAILABLE,
        SqlState::T_R_SERIALIZATION_FAILURE,
        SqlState::T_R_DEADLOCK_DETECTED,
    ];
    error.code().is_some_and(|code| codes.contains(code))
}
