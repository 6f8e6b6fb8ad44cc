//! Counts the events that wait for delivery, and finds the age of the oldest. The result is exact, or
//! unknown if it would cost too much.
//!
//! An event waits if it has no record in `outbox.dispatch` and, by the capture record of its table, is
//! neither resolved nor older than capturing. If published events may lack a record, such an event may
//! have been delivered, so the result is known only if no event waits.
//!
//! With an index on `seq`, at most [`MOST_ROWS`] rows beyond `floor_seq` are read; a row that got a lower
//! `seq` than older rows is not counted. Without this bound, tables larger than [`LARGEST_BYTES`] are
//! not read. If there are more rows, or the table is larger, the result is unknown.

use std::time::Duration;

use slot_manager::quoted_identifier;

use crate::capture::ScanWindow;
use crate::capture::claim::{self, Captured};
use crate::capture::table::TableReader;
use crate::error::{Code, Error, Result};
use crate::mapping::TableSettings;
use crate::postgres::Sql;
use crate::settings::Settings;
use crate::store::dispatch::has_no_row_sql;
use crate::store::relay_row;

/// Maximum size of a table that is read without an index. A cached table of this size, with about
/// half a million small events, takes about 100 ms to read.
const LARGEST_BYTES: u64 = 128 << 20;

/// Maximum number of rows that are read along an index.
const MOST_ROWS: u32 = 200_000;

/// PostgreSQL's default block size, used by nearly every server.
const BLOCK_BYTES: u64 = 8_192;

/// The events that wait for delivery.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PendingEvents {
    /// Events without a record.
    pub(crate) events: u64,
    /// Age of the oldest event, by `occurred_at` and the server's clock. Zero if no event waits; `None`
    /// if a table with waiting events has no such column.
    pub(crate) oldest: Option<Duration>,
}

/// Counts the waiting events of all captured tables. `None` if that would take long, or if the number
/// cannot be known.
pub(crate) async fn read(sql: &Sql, settings: &Settings) -> Result<Option<PendingEvents>> {
    match read_all(sql, settings).await {
        Err(error) if is_not_known(&error) => Ok(None),
        found => found,
    }
}

async fn read_all(sql: &Sql, settings: &Settings) -> Result<Option<PendingEvents>> {
    let mut all = PendingEvents {
        events: 0,
        oldest: Some(Duration::ZERO),
    };
    let records = relay_row::read_record_keeping(sql, settings).await?;
    let known = claim::known(sql, &settings.slot, &settings.tables).await?;
    for (table, captured) in settings.tables.iter().zip(&known) {
        let Some(one) = read_table(sql, settings, table, captured).await? else {
            return Ok(None);
        };
        all.events += one.events;
        all.oldest = all.oldest.zip(one.oldest).map(|(a, b)| a.max(b));
    }
    if all.events > 0 && records.may_lack_records() {
        return Ok(None);
    }
    Ok(Some(all))
}

async fn read_table(
    sql: &Sql,
    settings: &Settings,
    table: &TableSettings,
    captured: &Captured,
) -> Result<Option<PendingEvents>> {
    let window = ScanWindow::recent(captured);
    let seq = captured.shape.seq.as_ref().filter(|seq| seq.is_indexed);
    let bytes = u64::from(captured.shape.blocks) * BLOCK_BYTES;
    let bound = match (seq, window.from_seq) {
        (Some(seq), Some(from)) => {
            let seq = quoted_identifier(&seq.column);
            let bound = format!("e.{seq} > {from}");
            let more = format!(
                "select from {} e where {bound} order by e.{seq} offset {MOST_ROWS} limit 1",
                table.table
            );
            if sql.query_opt(&more, &[]).await?.is_some() {
                return Ok(None);
            }
            bound
        }
        _ if bytes <= LARGEST_BYTES => "true".to_owned(),
        _ => return Ok(None),
    };
    // The topics of the rows do not matter here.
    let project = settings.project().unwrap_or("none");
    let reader = TableReader::resolve(sql, table, project, captured).await?;
    let id = reader.event_id_sql();
    let age = reader.oldest_age_sql().unwrap_or("null::float8");
    let statement = format!(
        "select count(*), {age} from {} e where {bound} and {} and {id} is not null \
         and {}",
        reader.table_sql(),
        window.condition(),
        has_no_row_sql(id)
    );
    let row = sql.query_one(&statement, &[]).await?;
    let (events, age): (i64, Option<f64>) = (row.get(0), row.get(1));
    let oldest = match (events, age) {
        (0, _) => Some(Duration::ZERO),
        // A time in the future counts as now.
        (_, age) => age.map(|seconds| Duration::try_from_secs_f64(seconds).unwrap_or_default()),
    };
    Ok(Some(PendingEvents {
        events: events.unsigned_abs(),
        oldest,
    }))
}

/// Whether the error only means that the number is unknown, for example because a table does not exist
/// or this role may not read it.
fn is_not_known(error: &Error) -> bool {
    let codes = [
        Code::SchemaMissing,
        Code::PrivilegeMissing,
        Code::PublicationDrift,
        Code::ColumnMissing,
        Code::SettingInvalid,
        Code::TableCaptured,
        Code::SlotBusy,
    ];
    codes.contains(&error.code())
}
