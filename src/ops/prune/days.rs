//! Adds the daily partitions of the next days, and drops the partitions of old days as a whole.
//!
//! A partition is dropped only if the row walk ([`rows`]) finds that every row of the day may be deleted. Two
//! walks judge the rows. The first walk holds no lock, and ends as soon as a row has to stay. The second walk
//! holds a lock on the partition, so no row can change between its verdict and the drop.
//!
//! If a day cannot be added or dropped, the report contains a note, and the next run tries again. The
//! rows of a day that was not dropped are deleted one by one, as in a table without partitions.

use std::time::Duration;

use serde::Serialize;
use tokio_postgres::error::{Error as PgError, SqlState};

use super::{
    OnPruneStep, PruneContext, PruneStep, PrunedTable, is_in_the_way, missing_day_grant, records,
    rows,
};
use crate::capture::claim::Captured;
use crate::capture::table::{TableReader, altered_since};
use crate::error::Result;
use crate::mapping::TableSettings;
use crate::ops::walk::{TableWalk, WalkAction};
use crate::postgres::Sql;
use crate::store::days::{self, AddedDay, DayPartition};
use crate::store::dispatch::pruning::GO;

/// Maximum number of attempts to drop a partition. The drop waits for every transaction on the table, and new
/// inserts queue behind it. So each attempt can delay inserts by its lock timeout.
const DROP_ATTEMPTS: u32 = 5;

/// Pause between two attempts to drop a partition, in which the delayed inserts finish.
const DROP_PAUSE: Duration = Duration::from_millis(500);

/// A day whose partition was dropped, or would be dropped without `--dry-run`.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub(crate) struct PrunedDay {
    /// The date in UTC, such as 2026-11-27.
    pub(crate) day: String,
    pub(crate) rows: u64,
}

/// The days for which a partition was added, and notes that say why others could not be added.
#[derive(Debug, Default)]
pub(crate) struct AddedDays {
    pub(crate) added: Vec<String>,
    pub(crate) notes: Vec<String>,
}

/// The verdict on an old day.
enum OldDay {
    /// All rows of the day may be deleted, or the day's partition has already been dropped.
    Goes(PrunedTable),
    Stays,
    /// The partition could not be dropped, because other sessions use the table.
    InUse(PgError),
    Stopped,
}

/// Adds the partitions of today and the next seven days. Does nothing if the table has no daily
/// partitions.
///
/// # Errors
/// Connection errors. Every other error becomes a note.
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
                let what = "no partition was added: the default partition is larger than 16 MB, or partitioned \
                            itself, and inserts would wait while PostgreSQL reads it (docs/how-to/operations.md, \
                            Daily partitions)";
                done.notes.push(what.to_owned());
                break;
            }
            // Do not try the other days, because adding them needs the same lock or right.
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

/// Returns the note about a failure. Returns an error if the connection is closed, because the run
/// cannot continue then.
fn note(what: &str, error: PgError) -> Result<String> {
    if error.is_closed() {
        return Err(error.into());
    }
    // Prefer the hint from the functions of migration 19. It is more precise than the hint of the error code.
    let said = error.as_db_error().and_then(|error| error.hint());
    let said = said.map(str::to_owned);
    let error = altered_since(error);
    let hint = said.as_deref().unwrap_or_else(|| error.hint_text());
    Ok(format!("{what}: {error} ({hint})"))
}

/// Adds the partitions of the coming days, unless this is a dry run. Returns the partitions of old days. If
/// they cannot be dropped, returns none and adds a note with the reason.
async fn add_and_list(
    context: &PruneContext<'_>,
    pruned: &mut PrunedTable,
) -> Result<Vec<DayPartition>> {
    let sql = context.sql;
    if !context.request.is_dry_run() {
        if let Some(grant) = missing_day_grant(sql).await? {
            let what = format!(
                "no partition was added or dropped: as the owner of the table, run {grant}"
            );
            pruned.notes.push(what);
            return Ok(Vec::new());
        }
        let AddedDays { added, notes } = add_ahead(sql).await?;
        pruned.days_added = added;
        pruned.notes = notes;
    }
    match days::before(sql, context.cutoff.sql()).await {
        Ok(old) => Ok(old),
        Err(error) => {
            pruned.notes.push(note("no old day was dropped", error)?);
            Ok(Vec::new())
        }
    }
}

/// Adds the partitions of the coming days, and drops the partitions of old days. Returns false if `on_step`
/// stopped the run.
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
    let old = add_and_list(context, pruned).await?;
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
            let of_day = day.has_row_sql();
            match records::exists_sql(sql, captured, judge.reader, &of_day).await? {
                Ok(has_row) => judge.drop_day(&day, &has_row, pruned, on_step).await,
                Err(why) => {
                    pruned.notes.push(format!("no old day was dropped: {why}"));
                    return Ok(true);
                }
            }
        };
        let goes_on = match ended {
            Ok(OldDay::Goes(gone)) => {
                pruned.add_day(day.day, gone, is_dry_run);
                true
            }
            Ok(OldDay::Stays) => true,
            Ok(OldDay::Stopped) => return Ok(false),
            // Do not try the other days, because each attempt would delay inserts again.
            Ok(OldDay::InUse(error)) => pruned.add_note(&day, error, false)?,
            Err(error) => {
                // Do not try the other days, because dropping them needs the same right.
                let is_refused = error.code() == Some(&SqlState::INSUFFICIENT_PRIVILEGE);
                pruned.add_note(&day, error, !is_refused)?
            }
        };
        if !goes_on {
            return Ok(true);
        }
        if !is_dry_run {
            tokio::time::sleep(context.request.pause).await;
        }
    }
    Ok(true)
}

/// Decides whether the rows of a day may be deleted.
struct DayJudge<'a> {
    context: &'a PruneContext<'a>,
    captured: &'a Captured,
    reader: &'a TableReader,
}

impl DayJudge<'_> {
    /// Drops a day if all its rows may be deleted. `has_row` is an SQL condition on a row `w` of outbox.dispatch. A row
    /// `w` meets the condition if the partition of this day contains the outbox row of the same event.
    async fn drop_day(
        &self,
        day: &DayPartition,
        has_row: &str,
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
            Ok(OldDay::Goes(gone)) => match drop_locked(sql, day, has_row).await {
                Ok(true) => return Ok(OldDay::Goes(gone)),
                Ok(false) => Ok(OldDay::Stays),
                Err(error) if is_in_the_way(&error) || is_waited_for(&error) => {
                    Ok(OldDay::InUse(error))
                }
                Err(error) => Err(error),
            },
            other => other,
        };
        days::roll_back(sql).await?;
        dropped
    }

    /// Judges the rows of a day page by page. Stops at the first page with a row that has to stay.
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
        let (mut gone, mut examined) = (PrunedTable::default(), 0);
        while let Some(page) = walk.next(context.sql).await? {
            examined += page.rows;
            if page.count(GO) < page.rows {
                return Ok(OldDay::Stays);
            }
            gone.add(page);
            let step = PruneStep {
                what: &pruned.table,
                examined,
                deleted: pruned.rows,
                share: None,
            };
            if !on_step(&step) {
                return Ok(OldDay::Stopped);
            }
        }
        Ok(OldDay::Goes(gone))
    }
}

/// Drops a locked day. Returns false if an event of the day is now in quarantine or released, so that the day stays.
///
/// This run has already examined the rows, page by page. `postrider replay` may have released one of their events
/// since. The lock does not prevent a release, because a release changes only `outbox.dispatch`.
async fn drop_locked(sql: &Sql, day: &DayPartition, has_row: &str) -> Result<bool, PgError> {
    let mut attempt = 1;
    loop {
        if days::has_quarantined(sql, has_row).await? {
            return Ok(false);
        }
        match days::drop_locked(sql, day).await {
            Err(error) if is_in_the_way(&error) && attempt < DROP_ATTEMPTS => {
                tokio::time::sleep(DROP_PAUSE).await;
            }
            Ok(()) => return Ok(true),
            Err(error) => return Err(error),
        }
        attempt += 1;
    }
}

/// Whether the drop was refused because another session waits for our lock on the partition. That session may
/// itself hold a lock that the drop needs, so another attempt would only prolong the session's wait.
fn is_waited_for(error: &PgError) -> bool {
    error.code() == Some(&SqlState::OBJECT_IN_USE)
}

impl PrunedTable {
    /// Notes that a day was not dropped. `goes_on` says whether the run still tries later days, and is also
    /// the result.
    fn add_note(&mut self, day: &DayPartition, error: PgError, goes_on: bool) -> Result<bool> {
        let later = if goes_on {
            ""
        } else {
            ", nor was any later day"
        };
        let what = format!("{} was not dropped as a whole{later}", day.day);
        self.notes.push(note(&what, error)?);
        Ok(goes_on)
    }

    fn add_day(&mut self, day: String, gone: PrunedTable, is_dry_run: bool) {
        self.days.push(PrunedDay {
            day,
            rows: gone.rows,
        });
        // In a dry run the partition still exists, and the walk over the table counts these rows later.
        if !is_dry_run {
            self.rows += gone.rows;
            self.oldest = rows::earlier(self.oldest.take(), gone.oldest);
        }
    }
}
