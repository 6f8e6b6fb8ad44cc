//! Deletes old events that have a final outcome, and old records that nobody needs.
//!
//! [`proof`] decides from the state of the slot what may be deleted. [`days`] drops daily partitions whose
//! rows may all go, [`rows`] deletes the other rows of the outbox tables, and after that [`records`] deletes
//! rows of outbox.dispatch. Rows and records go in chunks: one short transaction each, along an index, with
//! a pause in between. So the command may be stopped between two chunks, and continues when it is run again.
//!
//! **An outbox row may go** when its outcome is final and no repeat reads it:
//!
//! - Its event is published or discarded, and was recorded before the retention. Without a record, the
//!   row may have been published with `dispatch = exceptions`: then its table's floor must be above it,
//!   and its own time before the retention.
//! - Its commit is below the confirmed position, and its transaction below the floor. A recovery with
//!   `dispatch = exceptions` repeats everything from the floor on, and may leave nothing out.
//!
//! **A record may go** when nothing asks for it any longer:
//!
//! - It is older than the retention, and not in quarantine.
//! - Its row is in no captured table. The auditor and a recovery publish rows without a record.
//! - Its commit is below `restart_lsn`, which is at most the confirmed position. PostgreSQL forgets
//!   newer confirmed positions when it crashes, and then sends the events after an older one again.
//! - The slot has confirmed the end of the WAL at which the row was gone. A row that was moved between
//!   partitions arrives in the stream once more, and only the record shows that it was published.
//!
//! The reasons are in docs/adr/0032-pruning.md and, for partitions, docs/adr/0037-daily-partitions.md.

mod days;
mod proof;
mod records;
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

/// A chunk gives up when it has waited this long for a lock, so that it holds up nobody behind it.
const LOCK_TIMEOUT: &str = "SET lock_timeout = '2s'";

/// Attempts of a chunk that waits for a lock, or meets a row that somebody else moves.
const ATTEMPTS: u32 = 5;

/// Pause before another attempt.
const RETRY_PAUSE: Duration = Duration::from_secs(1);

/// Where [`PruneStep`] names the records instead of a table.
pub(crate) const RECORDS: &str = "outbox.dispatch";

/// Default number of rows that one chunk reads.
pub(crate) const CHUNK: u32 = 5_000;

/// Default pause after each chunk that deleted something.
pub(crate) const PAUSE: Duration = Duration::from_millis(100);

/// What to delete, and how fast.
#[derive(Debug, Clone)]
pub(crate) struct PruneRequest {
    pub(crate) older_than: Duration,
    /// Number of rows that one chunk reads.
    pub(crate) chunk: u32,
    /// Pause after each chunk that deleted something.
    pub(crate) pause: Duration,
    pub(crate) who: Pruning,
}

impl PruneRequest {
    /// What the relay deletes.
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

/// The result; its JSON form, on which programs depend.
#[derive(Debug, Serialize)]
pub(crate) struct PruneReport {
    /// Whether rows were only counted.
    pub(crate) dry_run: bool,
    /// False if it was stopped before the end.
    pub(crate) finished: bool,
    pub(crate) tables: Vec<PrunedTable>,
    pub(crate) dispatch: PrunedRecords,
}

/// The rows of one outbox table.
#[derive(Debug, Default, Serialize)]
pub(crate) struct PrunedTable {
    pub(crate) table: String,
    /// Rows that were deleted, or would be.
    pub(crate) rows: u64,
    /// Time of the oldest of these, RFC 3339.
    pub(crate) oldest: Option<String>,
    /// Rows that stay although they may be old.
    pub(crate) kept: KeptRows,
    /// Daily partitions that were dropped, or would be. Their rows are among `rows`.
    pub(crate) days: Vec<PrunedDay>,
    /// Days that got a partition.
    pub(crate) days_added: Vec<String>,
    /// Why a partition could not be added or dropped.
    pub(crate) notes: Vec<String>,
}

/// Why rows stay.
#[derive(Debug, Default, Serialize)]
pub(crate) struct KeptRows {
    pub(crate) quarantined: u64,
    /// Without an outcome.
    pub(crate) waiting: u64,
    /// Published, but the slot has not confirmed them, or the floor of the table is below them.
    pub(crate) unconfirmed: u64,
    /// Older than capturing: the relay does not know whether anybody needs them.
    pub(crate) not_captured: u64,
    /// Without a record, in a table that does not say when its events happened.
    pub(crate) without_time: u64,
}

/// The rows of outbox.dispatch.
#[derive(Debug, Default, Serialize)]
pub(crate) struct PrunedRecords {
    /// Rows that were deleted, or would be.
    pub(crate) rows: u64,
    /// When the oldest of these was recorded, RFC 3339.
    pub(crate) oldest: Option<String>,
    /// Old records of rows that are still in the outbox.
    pub(crate) of_rows: u64,
    /// Why no record, or not every record, could be deleted now.
    pub(crate) postponed: Option<String>,
}

/// How far the command is.
#[derive(Debug)]
pub(crate) struct PruneStep<'a> {
    /// The table, or what the command waits for.
    pub(crate) what: &'a str,
    pub(crate) examined: u64,
    pub(crate) deleted: u64,
}

/// Receives the progress of the command; returns false to stop it.
pub(crate) type OnPruneStep<'a> = dyn FnMut(&PruneStep<'_>) -> bool + Send + 'a;

/// Everything that the chunks depend on.
struct PruneContext<'a> {
    sql: &'a Sql,
    settings: &'a Settings,
    request: &'a PruneRequest,
    /// Younger rows stay.
    cutoff: SinceTime,
    proof: PruneProof,
}

/// Deletes, or counts, all rows that may go.
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

/// Why records stay although the slot has passed them: with full records an old row has one, so this
/// command may find other ids in the rows than the relay did. Then every record would look as if its row
/// were gone.
fn unknown_rows(context: &PruneContext<'_>, tables: &[PrunedTable]) -> Option<String> {
    let PruneProof::Slot { repeats: false, .. } = context.proof else {
        return None;
    };
    let table = tables.iter().find(|table| {
        let kept = &table.kept;
        let have_records = table.rows + kept.quarantined + kept.unconfirmed;
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
            "nothing was deleted: start the relay once, so that it captures the table, or leave the \
             table out of the settings",
        ),
        _ => error,
    }
}

/// The failed attempts of one chunk. Not a function that takes a closure: the future of an async closure
/// cannot be sent to another task.
#[derive(Debug, Default)]
struct FailedAttempts(u32);

impl FailedAttempts {
    /// Returns after a pause if a lock or another session's change was in the way: then the chunk is worth
    /// another attempt.
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
