//! Counts the events that wait for delivery, and finds the age of the oldest. If counting would cost too
//! much, the result is a lower bound, or unknown.
//!
//! An event counts as waiting if all of these conditions hold:
//!
//! - Its row was committed after the capture of the table began (`since`).
//! - The transaction of the row is not below the floor of the table.
//! - The event has no record in `outbox.dispatch`.
//!
//! With `dispatch = exceptions`, published events may lack a record. Some of the counted events may then be
//! published already. So the result is unknown, unless the count is zero.
//!
//! The count reads only a part of a large table. Which part depends on the table:
//!
//! - The table has an index on `seq`, and the relay has stored `floor_seq`: the count reads the rows with a `seq` above
//!   `floor_seq`. It misses a waiting event with a lower `seq`, if its transaction is not below the floor. If there are
//!   more than [`MOST_ROWS`] rows, `ends` counts only the first and the last of them, and searches in between for the
//!   oldest waiting event.
//! - Any other table: the count reads the whole table up to a size of [`LARGEST_BYTES`]. Of a larger table, it reads
//!   only the first and the last blocks. For a larger partitioned table, the number is unknown.

mod ends;

use std::time::Duration;

use serde::Serialize;
use slot_manager::quoted_identifier;

use crate::capture::ScanWindow;
use crate::capture::claim::{self, Captured};
use crate::capture::table::{OldestAgeSql, TableReader};
use crate::error::{Code, Error, Result};
use crate::mapping::TableSettings;
use crate::postgres::Sql;
use crate::settings::Settings;
use crate::store::dispatch::has_no_row_sql;
use crate::store::relay_row;

/// Maximum size of the part of a table that is read without an index. A cached table of this size, with
/// about half a million small events, takes about 100 ms to read.
const LARGEST_BYTES: u64 = 128 << 20;

/// Maximum number of rows that are counted along an index, so that the count stays fast. If a table has more,
/// half of this number is counted at each end.
const MOST_ROWS: u32 = 200_000;

/// PostgreSQL's default block size, used by nearly every server.
const BLOCK_BYTES: u64 = 8_192;

/// The time from which the age of an event is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum AgeClock {
    /// The time of the commit.
    Commit,
    /// The value of `occurred_at`. Services may write any time into this column.
    OccurredAt,
}

/// The age of an event, by PostgreSQL's clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct EventAge {
    pub(crate) age: Duration,
    pub(crate) by: AgeClock,
}

impl EventAge {
    /// An age that is counted from the commit of the event.
    pub(crate) fn by_commit(age: Duration) -> Self {
        let by = AgeClock::Commit;
        Self { age, by }
    }
}

/// The events that wait for delivery.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PendingEvents {
    /// Events without a record.
    pub(crate) events: u64,
    /// Age of the oldest event; zero if no event waits. The age counts from the event's commit if the server
    /// records commit times (`track_commit_timestamp`) or if the relay has reported the age. Otherwise it
    /// counts from `occurred_at`. `None` if the age of a table's waiting events is not known in any of
    /// these ways.
    pub(crate) oldest: Option<EventAge>,
    /// Whether only a part of a table was read. If so, there may be more events, and older ones.
    pub(crate) is_lower_bound: bool,
}

impl PendingEvents {
    const NONE: Self = Self {
        events: 0,
        oldest: Some(EventAge {
            age: Duration::ZERO,
            by: AgeClock::Commit,
        }),
        is_lower_bound: false,
    };

    fn and(self, other: Self) -> Self {
        Self {
            events: self.events + other.events,
            oldest: self.oldest.zip(other.oldest).map(|(a, b)| a.max(b)),
            is_lower_bound: self.is_lower_bound || other.is_lower_bound,
        }
    }

    /// Returns the age of the oldest event, for a comparison with `limit`. `None` if the known age is below
    /// the limit, but the true age may be above it.
    pub(crate) fn oldest_against(&self, limit: Duration) -> Option<Duration> {
        let oldest = self.oldest.map(|oldest| oldest.age);
        oldest.filter(|oldest| !self.is_lower_bound || *oldest >= limit)
    }
}

/// Counts the waiting events of all captured tables. Returns `None` if counting would take too long, or
/// if the number cannot be known.
pub(crate) async fn read(sql: &Sql, settings: &Settings) -> Result<Option<PendingEvents>> {
    match read_all(sql, settings).await {
        Err(error) if is_not_known(&error) => Ok(None),
        found => found,
    }
}

async fn read_all(sql: &Sql, settings: &Settings) -> Result<Option<PendingEvents>> {
    let mut all = PendingEvents::NONE;
    let records = relay_row::read_record_keeping(sql, settings).await?;
    let known = claim::known(sql, &settings.slot, &settings.tables).await?;
    let mut is_known = true;
    for (table, captured) in settings.tables.iter().zip(&known) {
        match read_table(sql, settings, table, captured).await? {
            Some(one) => all = all.and(one),
            None => is_known = false,
        }
    }
    all.is_lower_bound |= !is_known;
    // If no event waits in the part that was read, events may still wait in the rest, so the result is
    // unknown.
    let says_nothing = all.events == 0 && all.is_lower_bound;
    if says_nothing || (all.events > 0 && records.may_lack_records()) {
        return Ok(None);
    }
    Ok(Some(all))
}

/// Counts the waiting events of one table. Returns `None` for a partitioned table that has no usable index
/// and is too large to be read completely.
async fn read_table(
    sql: &Sql,
    settings: &Settings,
    table: &TableSettings,
    captured: &Captured,
) -> Result<Option<PendingEvents>> {
    let window = ScanWindow::recent(captured);
    // Only topic names contain the project, and the count uses no topics, so any project will do.
    let project = settings.project().unwrap_or("none");
    let reader = TableReader::resolve(sql, table, project, captured).await?;
    let rows = CountedRows {
        sql,
        reader: &reader,
        window,
    };
    let seq = captured.shape.seq.as_ref().filter(|seq| seq.is_indexed);
    let blocks = captured.shape.blocks;
    match (seq, window.from_seq) {
        (Some(seq), Some(from)) => {
            let seq = format!("e.{}", quoted_identifier(&seq.column));
            ends::by_seq(&rows, &seq, from).await.map(Some)
        }
        _ if u64::from(blocks) * BLOCK_BYTES <= LARGEST_BYTES => rows.count("true").await.map(Some),
        _ if !captured.shape.is_partitioned() => ends::by_block(&rows, blocks).await.map(Some),
        _ => Ok(None),
    }
}

/// The rows of a table among which the waiting events are counted.
struct CountedRows<'a> {
    sql: &'a Sql,
    reader: &'a TableReader,
    window: ScanWindow<'a>,
}

impl CountedRows<'_> {
    /// Counts the waiting events among the rows that meet `bound`, an SQL condition on the row `e`.
    async fn count(&self, bound: &str) -> Result<PendingEvents> {
        let id = self.reader.event_id_sql();
        let OldestAgeSql {
            since_commit,
            since_occurred_at,
        } = self.reader.oldest_age_sql();
        let statement = format!(
            "select count(*), {since_commit}, {since_occurred_at} from {} and {bound} and {} and {id} is not null \
             and {}",
            self.reader.rows_sql(),
            self.window.condition(),
            has_no_row_sql(id)
        );
        let row = self.sql.query_one(&statement, &[]).await?;
        let events: i64 = row.get(0);
        // A time in the future counts as now.
        let age = |column, by| {
            let seconds: Option<f64> = row.get(column);
            let age = Duration::try_from_secs_f64(seconds?).unwrap_or_default();
            Some(EventAge { age, by })
        };
        let oldest = match events {
            0 => PendingEvents::NONE.oldest,
            _ => age(1, AgeClock::Commit).or_else(|| age(2, AgeClock::OccurredAt)),
        };
        Ok(PendingEvents {
            events: events.unsigned_abs(),
            oldest,
            is_lower_bound: false,
        })
    }
}

/// Whether the error only means that the number is unknown, for example because a table does not exist or is
/// locked, or because this role lacks the privilege to read it.
fn is_not_known(error: &Error) -> bool {
    let codes = [
        Code::SchemaMissing,
        Code::PrivilegeMissing,
        Code::PublicationDrift,
        Code::ColumnMissing,
        Code::SettingInvalid,
        Code::TableCaptured,
        Code::SlotBusy,
        Code::PostgresTimeout,
        Code::DiskFull,
    ];
    codes.contains(&error.code())
}
