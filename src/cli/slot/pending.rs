//! Which events wait for delivery, and how old the oldest is: exact, while that is cheap.
//!
//! An event waits when the capture record of its table has it neither as resolved nor as from before,
//! and it has no record in the dispatch table. (Where published events get no record it may be
//! delivered all the same, and only that nothing waits is known.) Rows beyond `floor_seq` are
//! found along the index; where no such bound is known, tables beyond [`LARGEST_BYTES`] are not read
//! and the answer is not known.

use std::time::Duration;

use slot_manager::quoted_identifier;

use crate::capture::Window;
use crate::capture::claim::{self, Captured};
use crate::error::{Code, Error, Result};
use crate::map::TableSettings;
use crate::postgres::Sql;
use crate::relay::record;
use crate::settings::{Dispatch, Settings};
use crate::table::TableReader;

/// Read in some 100 ms when cached; holds about half a million small events.
const LARGEST_BYTES: u64 = 128 << 20;

/// Bytes of a block, as nearly every server has them.
const BLOCK_BYTES: u64 = 8_192;

/// What waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Pending {
    /// Events without a record.
    pub(super) events: u64,
    /// Since the oldest of them happened, by the server's clock; zero when nothing waits, absent
    /// when a table has no such column.
    pub(super) oldest: Option<Duration>,
}

/// Looks at all captured tables; `None` when it would take long, or cannot be known.
pub(super) async fn look(sql: &Sql, settings: &Settings) -> Result<Option<Pending>> {
    match look_at_all(sql, settings).await {
        Err(error) if is_not_known(&error) => Ok(None),
        looked => looked,
    }
}

async fn look_at_all(sql: &Sql, settings: &Settings) -> Result<Option<Pending>> {
    let mut all = Pending {
        events: 0,
        oldest: Some(Duration::ZERO),
    };
    let earlier = record::read(sql, &settings.slot).await?;
    let repeats = settings.dispatch == Dispatch::Exceptions
        || earlier.is_some_and(|earlier| earlier.dispatch == Dispatch::Exceptions);
    let known = claim::known(sql, &settings.slot, &settings.tables).await?;
    for (table, captured) in settings.tables.iter().zip(&known) {
        let Some(one) = look_at(sql, settings, table, captured).await? else {
            return Ok(None);
        };
        all.events += one.events;
        all.oldest = all.oldest.zip(one.oldest).map(|(a, b)| a.max(b));
    }
    if all.events > 0 && repeats {
        return Ok(None);
    }
    Ok(Some(all))
}

async fn look_at(
    sql: &Sql,
    settings: &Settings,
    table: &TableSettings,
    captured: &Captured,
) -> Result<Option<Pending>> {
    let window = Window::unresolved(captured, false);
    let seq = captured.shape.seq.as_ref().filter(|seq| seq.is_indexed);
    let bytes = u64::from(captured.shape.blocks) * BLOCK_BYTES;
    let bound = match (seq, window.from_seq) {
        (Some(seq), Some(from)) => format!("e.{} > {from}", quoted_identifier(&seq.column)),
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
         and not exists (select from outbox.dispatch d where d.event_id = {id})",
        reader.table_sql(),
        window.condition()
    );
    let row = sql.query_one(&statement, &[]).await?;
    let (events, age): (i64, Option<f64>) = (row.get(0), row.get(1));
    let oldest = match (events, age) {
        (0, _) => Some(Duration::ZERO),
        // What has a time in the future has happened just now.
        (_, age) => age.map(|seconds| Duration::try_from_secs_f64(seconds).unwrap_or_default()),
    };
    Ok(Some(Pending {
        events: events.unsigned_abs(),
        oldest,
    }))
}

/// Whether the answer is missing since our tables or theirs are not there, or not for this role to
/// read.
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
