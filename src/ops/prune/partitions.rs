//! Drops whole daily partitions of `outbox.events`, which is much cheaper than to delete their rows.
//!
//! A partition is dropped if all its rows may go, by the rules that also decide about single rows. One
//! transaction locks the partition against writers, judges its rows page by page, and drops it. Nobody
//! inserts into a past day, so that lock disturbs nobody. Only the drop itself needs a lock on the whole table,
//! for a moment. It waits at most [`DROP_LOCK_TIMEOUT`] for that lock, because new INSERTs wait behind it.
//!
//! If one row has to stay, the partition stays, and its other rows are deleted in chunks. A later run drops it.

use std::time::Duration;

use slot_manager::QualifiedName;
use slot_manager::table::{self, DayPartition};
use tokio_postgres::error::{Error as PgError, SqlState};

use super::{OnPruneStep, PruneContext, PruneStep};
use crate::capture::claim::Captured;
use crate::capture::table::TableReader;
use crate::error::Result;
use crate::ops::walk::{TableWalk, WalkAction};
use crate::postgres::Sql;
use crate::store::dispatch::pruning::GO;
use crate::store::partitions;

/// The table that may have daily partitions.
const TABLE: (&str, &str) = ("outbox", "events");

/// How long a drop waits for its lock on the table. New INSERTs wait behind it meanwhile.
const DROP_LOCK_TIMEOUT: &str = "SET LOCAL lock_timeout = '100ms'";

/// Attempts of a drop, and the pause in which the writers continue.
const DROP_ATTEMPTS: u32 = 10;
const DROP_PAUSE: Duration = Duration::from_millis(300);

/// What was dropped, or would be.
#[derive(Debug, Default)]
pub(super) struct DroppedPartitions {
    pub(super) names: Vec<String>,
    pub(super) rows: u64,
    pub(super) oldest: Option<String>,
}

/// A condition on the outbox row `e` of a record `w`; empty if the table has no daily partitions. A row is
/// created before its event is recorded, so PostgreSQL need not look for it in the partitions of later days.
/// The extra day allows for clocks that differ. Without the condition, each record would cost a look-up in
/// every partition.
pub(super) async fn not_later_sql(sql: &Sql, captured: &Captured) -> Result<&'static str> {
    Ok(if is_ours(captured) && has_days(sql).await? {
        "and e.created_at < w.dispatched_at + interval '1 day'"
    } else {
        ""
    })
}

fn is_ours(captured: &Captured) -> bool {
    captured.record.table == QualifiedName::new(TABLE.0, TABLE.1) && captured.shape.is_partitioned()
}

async fn has_days(sql: &Sql) -> Result<bool> {
    Ok(!table::day_partitions(sql, "'infinity'::timestamptz")
        .await?
        .is_empty())
}

/// Drops all daily partitions that may go, and adds those of the next days. A dry run only counts the old ones.
/// The second value is false if `on_step` stopped it after a drop.
///
/// # Errors
/// `privilege-missing`; database errors.
pub(super) async fn drop_old(
    context: &PruneContext<'_>,
    (captured, reader): (&Captured, &TableReader),
    verdict: &str,
    on_step: &mut OnPruneStep<'_>,
) -> Result<(DroppedPartitions, bool)> {
    let mut dropped = DroppedPartitions::default();
    let mut is_stopped = false;
    let sql = context.sql;
    if !is_ours(captured) {
        return Ok((dropped, true));
    }
    if !context.request.is_dry_run() {
        partitions::add(sql).await?;
    }
    for day in table::day_partitions(sql, context.cutoff.sql()).await? {
        sql.batch_execute(&format!("BEGIN; {DROP_LOCK_TIMEOUT}"))
            .await?;
        let walk = TableWalk::new(
            captured,
            reader,
            context.request.chunk,
            verdict.to_owned(),
            WalkAction::Look,
        );
        let ended = drop_one(context, &day, walk.within(&day), on_step).await;
        // Ends the transaction also after an error, unless the connection is gone.
        let is_dropped = matches!(ended, Ok(Some(_)));
        let end = if is_dropped { "COMMIT" } else { "ROLLBACK" };
        sql.batch_execute(end).await?;
        match ended {
            Ok(Some((rows, oldest))) => {
                let step = PruneStep {
                    what: &day.name,
                    looked_at: rows,
                    deleted: rows,
                };
                is_stopped = !on_step(&step);
                dropped.names.push(day.name);
                // A dry run meets these rows again.
                if !context.request.is_dry_run() {
                    dropped.rows += rows;
                    dropped.oldest = dropped.oldest.take().or(oldest);
                }
            }
            Ok(None) => {}
            Err(error) if is_locked(&error) => {}
            Err(error) => return Err(error.into()),
        }
        if is_stopped {
            return Ok((dropped, false));
        }
    }
    Ok((dropped, true))
}

/// Judges the rows of one partition, and drops it. Returns its number of rows and the time of the oldest;
/// `None` if it stays.
async fn drop_one(
    context: &PruneContext<'_>,
    day: &DayPartition,
    mut walk: TableWalk<'_>,
    on_step: &mut OnPruneStep<'_>,
) -> Result<Option<(u64, Option<String>)>, PgError> {
    let sql = context.sql;
    let is_dry_run = context.request.is_dry_run();
    if !is_dry_run && !partitions::lock(sql, &day.name).await? {
        return Ok(None);
    }
    let (mut rows, mut oldest) = (0, None);
    while let Some(page) = walk.next(sql).await? {
        rows += page.rows;
        if page.count(GO) < page.rows {
            return Ok(None);
        }
        let first = page.groups.into_iter().find_map(|group| group.oldest);
        oldest = oldest.or(first);
        let step = PruneStep {
            what: &day.name,
            looked_at: rows,
            deleted: 0,
        };
        if !on_step(&step) {
            return Ok(None);
        }
    }
    if is_dry_run {
        return Ok(Some((rows, oldest)));
    }
    drop_locked(sql, day).await?;
    Ok(Some((rows, oldest)))
}

/// Drops the partition. Tries a few times if other sessions hold locks on the table.
async fn drop_locked(sql: &Sql, day: &DayPartition) -> Result<(), PgError> {
    let mut attempts = 1;
    loop {
        sql.batch_execute("SAVEPOINT judged").await?;
        match partitions::drop_locked(sql, &day.name).await {
            Err(error) if attempts < DROP_ATTEMPTS && is_locked(&error) => {
                sql.batch_execute("ROLLBACK TO judged").await?;
                attempts += 1;
                tokio::time::sleep(DROP_PAUSE).await;
            }
            ended => return ended,
        }
    }
}

fn is_locked(error: &PgError) -> bool {
    let codes = [
        SqlState::LOCK_NOT_AVAILABLE,
        SqlState::T_R_DEADLOCK_DETECTED,
    ];
    error.code().is_some_and(|code| codes.contains(code))
}
