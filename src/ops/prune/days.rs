//! Daily partitions: adds those of the next days, and drops old days as a whole.
//!
//! A day is dropped only if each of its rows may go, by the verdicts of the row walk ([`rows`]). The rows
//! are judged twice. The first walk holds no lock and ends at the first row that stays. The second one
//! holds a lock on the partition, so that nothing can change between the last verdict and the drop.
//!
//! A failure to add or drop a day is a note in the report. Its rows are then deleted one by one, as in a
//! table without partitions, and the next run tries again.

use std::time::Duration;

use serde::Serialize;
use tokio_postgres::error::Error as PgError;

use super::{OnPruneStep, PruneContext, PruneStep, PrunedTable, is_in_the_way, rows};
use crate::capture::claim::Captured;
use crate::capture::table::TableReader;
use crate::error::{Error, Result};
use crate::mapping::TableSettings;
use crate::ops::walk::{TableWalk, WalkAction};
use crate::postgres::Sql;
use crate::store::days::{self, AddedDay, DayPartition};
use crate::store::dispatch::pruning::GO;

/// Attempts to drop a day, whose lock waits for every transaction that uses the table. Each one may
/// delay inserts by its lock timeout.
const DROP_ATTEMPTS: u32 = 5;

/// Pause between them, in which the delayed inserts finish.
const DROP_PAUSE: Duration = Duration::from_millis(500);

/// A day that was dropped, or would be.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub(crate) struct PrunedDay {
    /// Such as 2026-11-27, in UTC.
    pub(crate) day: String,
    pub(crate) rows: u64,
}

/// Days that were added, and why others were not.
#[derive(Debug, Default)]
pub(crate) struct AddedDays {
    pub(crate) added: Vec<String>,
    pub(crate) notes: Vec<String>,
}

/// The verdict on an old day.
enum OldDay {
    /// All its rows may go, or are gone.
    Goes(PrunedTable),
    Stays,
    /// Other sessions use the table all the time.
    InUse(PgError),
    Stopped,
}

/// Adds the partitions of today and the next seven days. Does nothing if the table has no daily
/// partitions.
///
/// # Errors
/// Connection errors. All others become notes.
pub(crate) async fn add_ahead(sql: &Sql) -> Result<AddedDays> {
    let mut done = AddedDays::default();
    let missing = match days::missing(sql).await {
        Ok(missing) => missing,
        Err(error) => {
            done.notes.push(note("no partition was added", error)?);
            return Ok(done);
        }
    };
    for day in missing {
        let why = match days::add(sql, &day).await {
            Ok(AddedDay::Added) => {
                done.added.push(day);
                continue;
            }
            Ok(AddedDay::Covered) => continue,
            Ok(AddedDay::RowsInDefault) => {
                "the default partition has rows of that day, and they are pruned there one by one"
            }
            Ok(AddedDay::NameTaken) => "another table has its name",
            Ok(AddedDay::LargeDefault) => {
                let what = "no partition was added: the default partition is larger than 16 MB, and \
                            inserts would wait while PostgreSQL reads it (docs/how-to/operations.md, \
                            Daily partitions)";
                done.notes.push(what.to_owned());
                break;
            }
            // The other days would need the same lock or right.
            Err(error) => {
                let what = format!("no partition was added for {day}");
                done.notes.push(note(&what, error)?);
                break;
            }
        };
        done.notes.push(format!("no partition for {day}: {why}"));
    }
    Ok(done)
}

/// The note about a failure. A closed connection is not one, because nothing can follow.
fn note(what: &str, error: PgError) -> Result<String> {
    if error.is_closed() {
        return Err(error.into());
    }
    let error = Error::from(error);
    Ok(format!("{what}: {error} ({})", error.hint_text()))
}

/// Adds the days ahead and drops old ones. Returns false if it was stopped.
pub(super) async fn prune(
    context: &PruneContext<'_>,
    table: &TableSettings,
    captured: &Captured,
    pruned: &mut PrunedTable,
    on_step: &mut OnPruneStep<'_>,
) -> Result<bool> {
    if pruned.table != days::TABLE || !captured.shape.is_partitioned() {
        return Ok(true);
    }
    let sql = context.sql;
    let is_dry_run = context.request.is_dry_run();
    if !is_dry_run {
        let AddedDays { added, notes } = add_ahead(sql).await?;
        pruned.days_added = added;
        pruned.notes = notes;
    }
    let old = match days::before(sql, context.cutoff.sql()).await {
        Ok(old) => old,
        Err(error) => {
            pruned.notes.push(note("no old day was dropped", error)?);
            return Ok(true);
        }
    };
    let project = context.settings.project().unwrap_or("none");
    let judge = DayJudge {
        context,
        captured,
        reader: &TableReader::resolve(sql, table, project, captured).await?,
    };
    for day in old {
        let ended = if is_dry_run {
            judge.judge(&day, pruned, on_step).await
        } else {
            judge.drop_day(&day, pruned, on_step).await
        };
        match ended {
            Ok(OldDay::Goes(gone)) => pruned.add_day(day.day, gone, is_dry_run),
            Ok(OldDay::Stays) => {}
            // Further attempts would delay inserts for nothing.
            Ok(OldDay::InUse(error)) => {
                let what = format!(
                    "{} was not dropped as a whole, nor was any later day",
                    day.day
                );
                pruned.notes.push(note(&what, error)?);
                return Ok(true);
            }
            Ok(OldDay::Stopped) => return Ok(false),
            Err(error) => {
                let what = format!("{} was not dropped as a whole", day.day);
                pruned.notes.push(note(&what, error)?);
            }
        }
        if !is_dry_run {
            tokio::time::sleep(context.request.pause).await;
        }
    }
    Ok(true)
}

/// Decides whether the rows of a day may go.
struct DayJudge<'a> {
    context: &'a PruneContext<'a>,
    captured: &'a Captured,
    reader: &'a TableReader,
}

impl DayJudge<'_> {
    /// Drops a day if all its rows may go.
    async fn drop_day(
        &self,
        day: &DayPartition,
        pruned: &PrunedTable,
        on_step: &mut OnPruneStep<'_>,
    ) -> Result<OldDay, PgError> {
        match self.judge(day, pruned, on_step).await? {
            OldDay::Goes(_) => {}
            other => return Ok(other),
        }
        let sql = self.context.sql;
        if !days::lock(sql, day).await? {
            return Ok(OldDay::Stays);
        }
        let dropped = match self.judge(day, pruned, on_step).await {
            Ok(OldDay::Goes(gone)) => match drop_locked(sql, day).await {
                Ok(()) => return Ok(OldDay::Goes(gone)),
                Err(error) if is_in_the_way(&error) => Ok(OldDay::InUse(error)),
                Err(error) => Err(error),
            },
            other => other,
        };
        days::roll_back(sql).await?;
        dropped
    }

    /// Judges all rows of a day, up to the first one that stays.
    async fn judge(
        &self,
        day: &DayPartition,
        pruned: &PrunedTable,
        on_step: &mut OnPruneStep<'_>,
    ) -> Result<OldDay, PgError> {
        let Self {
            context,
            captured,
            reader,
        } = self;
        let verdict = rows::verdict_sql(context, captured);
        let chunk = context.request.chunk;
        let mut walk = TableWalk::new(captured, reader, chunk, verdict, WalkAction::Count);
        walk.restrict_to(&day.has_row_sql());
        let (mut gone, mut looked_at) = (PrunedTable::default(), 0);
        while let Some(page) = walk.next(context.sql).await? {
            looked_at += page.rows;
            if page.count(GO) < page.rows {
                return Ok(OldDay::Stays);
            }
            gone.add(page);
            let step = PruneStep {
                what: &pruned.table,
                looked_at,
                deleted: pruned.rows,
            };
            if !on_step(&step) {
                return Ok(OldDay::Stopped);
            }
        }
        Ok(OldDay::Goes(gone))
    }
}

async fn drop_locked(sql: &Sql, day: &DayPartition) -> Result<(), PgError> {
    let mut attempt = 1;
    loop {
        match days::drop_locked(sql, day).await {
            Err(error) if is_in_the_way(&error) && attempt < DROP_ATTEMPTS => {
                tokio::time::sleep(DROP_PAUSE).await;
            }
            ended => return ended,
        }
        attempt += 1;
    }
}

impl PrunedTable {
    fn add_day(&mut self, day: String, gone: PrunedTable, is_dry_run: bool) {
        self.days.push(PrunedDay {
            day,
            rows: gone.rows,
        });
        // A dry run meets these rows again when it walks the table.
        if !is_dry_run {
            self.rows += gone.rows;
            self.oldest = rows::earlier(self.oldest.take(), gone.oldest);
        }
    }
}
