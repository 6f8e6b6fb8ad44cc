//! Finds an event by its id: the event's uuid, the id in its table, or `schema.table:id`.

use std::time::Duration;

use slot_manager::cluster;
use tokio_postgres::error::SqlState;
use uuid::Uuid;

use super::named_table::{self, NamedTable};
use super::state::{EventState, UnrecordedFacts};
use super::{EventReport, EventTableRow};
use crate::capture::claim::{self, Captured};
use crate::capture::rows;
use crate::capture::table::{TableReader, altered_since, inserted_xid_text};
use crate::error::{Code, Error, Result};
use crate::event::{EventId, EventPosition};
use crate::mapping::TableSettings;
use crate::ops::{progress, walk};
use crate::postgres::Sql;
use crate::settings::Settings;
use crate::store::dispatch::history::{self, RecordedRow};
use crate::store::relay_row::{self, RecordKeeping};

/// Statement timeout. Only a search without an index can take that long, such as a search through all
/// of outbox.dispatch.
pub(crate) const STATEMENT_TIMEOUT: Duration = Duration::from_secs(15);

/// How long to wait until the slot has passed an event without a record.
const WAIT: Duration = Duration::from_secs(2);

/// Maximum number of rows that the search returns per table. A table can contain the same id more than
/// once if the id is not its primary key.
const ROWS_SHOWN: usize = 20;

/// The note about an event without a record while a recovery is due or running.
const RECOVERING: &str = "A recovery is due or running: if the stream has missed the row, the relay publishes it after \
    the recovery, which may wait for failing topics";

/// A captured table, and the reader of its rows.
struct SearchedTable<'a> {
    settings: &'a TableSettings,
    captured: &'a Captured,
    reader: TableReader,
}

struct FoundRow {
    table: usize,
    event_id: Uuid,
    name: String,
    row: EventTableRow,
    is_ours: bool,
    is_uncompared: bool,
    xid: u64,
}

/// Returns all events with this id. There can be several, because the same number may be an id in
/// several tables.
///
/// # Errors
/// `setting-invalid` when the id names a table to which the event does not belong; `postgres-timeout` when a
/// search takes too long; database errors.
pub(crate) async fn find(sql: &Sql, settings: &Settings, id: &str) -> Result<Vec<EventReport>> {
    let whole = id.trim();
    let named = named_table::read(settings, whole);
    let id = named.map_or(whole, |named| named.uuid);
    let captured =
        claim::as_if_claimed(sql, &settings.slot, &settings.tables, settings.start).await?;
    let mut tables = Vec::new();
    for (table, captured) in settings.tables.iter().zip(&captured) {
        tables.push(searched(sql, settings, table, captured).await?);
    }
    let mut found = Vec::new();
    for (n, table) in tables.iter().enumerate() {
        let id = table.reader.id_in(id).unwrap_or(id);
        found.extend(rows_of(sql, n, table, id).await?);
    }
    if let Some(named) = named {
        found = of_named_table(settings, named, found)?;
    }
    let of_tables = match named {
        Some(named) => &tables[named.number..=named.number],
        None => &tables[..],
    };
    let mut records = recorded(sql, of_tables, &found, id).await?;
    if let Some(named) = named {
        let identity = &captured[named.number].record.identity;
        let refused = named.keep_own(settings, identity, &mut records);
        if found.is_empty() && records.is_empty() {
            refused?;
        }
    }
    for record in &records {
        let is_found = |row: &FoundRow| row.event_id == record.event_id;
        if let Some(source_id) = record
            .source_id
            .as_deref()
            .filter(|_| !found.iter().any(is_found))
        {
            for (n, table) in tables.iter().enumerate() {
                if let Some(id) = table.reader.id_in(source_id) {
                    let rows = rows_of(sql, n, table, id).await?;
                    found.extend(rows.into_iter().filter(is_found));
                }
            }
        }
    }
    let mut reports = Vec::new();
    for row in found {
        let record = records.iter().position(|r| r.event_id == row.event_id);
        let record = record.map(|n| records.swap_remove(n));
        reports.push(match record {
            Some(record) => of_record(record, Some(row.row)),
            None => unrecorded(sql, settings, &mut tables[row.table], row).await?,
        });
    }
    reports.extend(records.into_iter().map(|record| of_record(record, None)));
    match named_table::unknown(settings, whole) {
        Some(error) if reports.is_empty() => Err(error),
        _ => Ok(reports),
    }
}

async fn searched<'a>(
    sql: &Sql,
    settings: &Settings,
    table: &'a TableSettings,
    captured: &'a Captured,
) -> Result<SearchedTable<'a>> {
    let project = settings.project().unwrap_or("none");
    Ok(SearchedTable {
        settings: table,
        captured,
        reader: TableReader::resolve(sql, table, project, captured).await?,
    })
}

/// Returns those of the rows that belong to the named table.
///
/// # Errors
/// `setting-invalid` if the named table has no such row, but another table has the event with this uuid. A
/// row of another table whose id only has the same text is another event, and is ignored.
fn of_named_table(
    settings: &Settings,
    named: NamedTable<'_>,
    found: Vec<FoundRow>,
) -> Result<Vec<FoundRow>> {
    let (of_table, others): (Vec<_>, Vec<_>) =
        found.into_iter().partition(|row| row.table == named.number);
    let uuid = Uuid::parse_str(named.uuid).ok();
    match others.iter().find(|other| Some(other.event_id) == uuid) {
        Some(other) if of_table.is_empty() => {
            let table = &other.row.table;
            Err(named.of_another(settings, table, &format!("{table}:{}", named.uuid)))
        }
        _ => Ok(of_table),
    }
}

/// Checks that the event with this uuid can belong to the named table. If no table has a row with this uuid
/// any more, the event may have belonged to any table. Returns the table's identity.
///
/// # Errors
/// `setting-invalid` if the row is in another table; database errors.
pub(crate) async fn check_named_table(
    sql: &Sql,
    settings: &Settings,
    named: NamedTable<'_>,
) -> Result<String> {
    let mut captured =
        claim::as_if_claimed(sql, &settings.slot, &settings.tables, settings.start).await?;
    let mut found = Vec::new();
    for (n, (table, captured)) in settings.tables.iter().zip(&captured).enumerate() {
        let table = searched(sql, settings, table, captured).await?;
        found.extend(rows_of(sql, n, &table, named.uuid).await?);
    }
    of_named_table(settings, named, found)?;
    Ok(captured.swap_remove(named.number).record.identity)
}

/// Returns the records of the found rows, and of the event with this uuid. If there are neither such
/// rows nor such records, returns the records with this source id.
async fn recorded(
    sql: &Sql,
    tables: &[SearchedTable<'_>],
    found: &[FoundRow],
    id: &str,
) -> Result<Vec<RecordedRow>> {
    let mut ids: Vec<Uuid> = found.iter().map(|row| row.event_id).collect();
    let uuid = Uuid::parse_str(id).ok();
    ids.extend(uuid);
    if !ids.is_empty() {
        let records = history::of_events(sql, &ids).await?;
        if !records.is_empty() || !found.is_empty() {
            return Ok(records);
        }
    }
    let prefixes = tables.iter().filter_map(|t| t.reader.source_prefix());
    let mut source_ids: Vec<String> = prefixes.map(|prefix| format!("{prefix}{id}")).collect();
    if uuid.is_none() {
        source_ids.push(id.to_owned());
    }
    if source_ids.is_empty() {
        return Ok(Vec::new());
    }
    match history::of_source_ids(sql, &source_ids).await {
        Err(error) if error.code() == Code::PostgresTimeout => Err(Error::new(
            Code::PostgresTimeout,
            format!(
                "no row with the id {id} is in the outbox, and searching outbox.dispatch for it took \
                 too long"
            ),
        )
        .hint(
            "give the event's uuid (the attribute `event_id` of the message), which has an index; or \
             CREATE INDEX CONCURRENTLY ON outbox.dispatch (source_id) WHERE source_id IS NOT NULL",
        )),
        records => records,
    }
}

/// Returns rows of one table that have this id, at most [`ROWS_SHOWN`].
async fn rows_of(
    sql: &Sql,
    n: usize,
    table: &SearchedTable<'_>,
    id: &str,
) -> Result<Vec<FoundRow>> {
    let SearchedTable {
        settings,
        captured,
        reader,
    } = table;
    if reader.source_prefix().is_none() && Uuid::parse_str(id).is_err() {
        return Ok(Vec::new());
    }
    let statement = format!(
        "select {event_id}, {name}, {seq}::bigint, {inserted}, \
             to_char({at} at time zone 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.MS\"Z\"'), \
             {ours}, {uncompared}, ({xid})::text \
         from {table} e where {has_id} limit {ROWS_SHOWN}",
        event_id = reader.event_id_sql(),
        name = reader.name_sql(),
        seq = reader.seq_sql().unwrap_or("null"),
        inserted = inserted_xid_text(captured),
        at = reader
            .happened_at_sql()
            .unwrap_or_else(|| "null::timestamptz".to_owned()),
        ours = walk::ours_sql(captured),
        uncompared = walk::uncompared_sql(captured),
        xid = captured.inserted_xid_sql(),
        table = reader.table_sql(),
        has_id = reader.has_id_sql(id),
    );
    let rows = match sql.query_typed(&statement, &[]).await {
        Ok(rows) => rows,
        // The id has the wrong type for this table, such as text instead of a number, so no row has it.
        Err(error) if is_of_another_type(&error) => return Ok(Vec::new()),
        Err(error) if error.code() == Some(&SqlState::QUERY_CANCELED) => {
            let what = format!("searching {} for the id took too long", settings.table);
            return Err(Error::new(Code::PostgresTimeout, what)
                .hint("create an index on the column with the ids, or give the event's uuid"));
        }
        Err(error) => return Err(altered_since(error)),
    };
    let row = |row: &tokio_postgres::Row| FoundRow {
        table: n,
        event_id: row.get(0),
        name: row.get(1),
        row: EventTableRow {
            table: settings.table.to_string(),
            seq: row.get(2),
            inserted_xid: row.get(3),
            occurred_at: row.get(4),
        },
        is_ours: row.get(5),
        is_uncompared: row.get(6),
        xid: row.get::<_, &str>(7).parse().unwrap_or_default(),
    };
    Ok(rows.iter().map(row).collect())
}

fn is_of_another_type(error: &tokio_postgres::Error) -> bool {
    error
        .code()
        .is_some_and(|code| code.code().starts_with("22"))
}

/// Returns the report of a record, without a search for its row.
pub(crate) fn of_record_alone(found: RecordedRow) -> EventReport {
    let state = EventState::recorded(&found.record.state);
    let meaning = state.meaning(Some(&found.record), message(&found).as_deref(), true);
    EventReport {
        meaning,
        ..of_record(found, None)
    }
}

/// Returns the message id, with the name of the replay that published the message.
fn message(found: &RecordedRow) -> Option<String> {
    let id = found.message_id.as_ref()?;
    Some(match &found.replay {
        Some(replay) => format!("{id} by replay {replay}"),
        None => id.clone(),
    })
}

fn of_record(found: RecordedRow, row: Option<EventTableRow>) -> EventReport {
    let state = EventState::recorded(&found.record.state);
    let message = message(&found);
    EventReport {
        event_id: found.event_id.to_string(),
        meaning: state.meaning(Some(&found.record), message.as_deref(), row.is_some()),
        state,
        source_id: found.source_id,
        topic: found.topic,
        ordering_key: found.ordering_key,
        message_id: found.message_id,
        replay: found.replay,
        earlier_messages: found.earlier_messages,
        row,
        record: Some(found.record),
    }
}

/// Returns the report of a row without a record.
async fn unrecorded(
    sql: &Sql,
    settings: &Settings,
    table: &mut SearchedTable<'_>,
    row: FoundRow,
) -> Result<EventReport> {
    let record = &table.captured.record;
    let earlier = relay_row::read(sql, &settings.slot).await?;
    let records = RecordKeeping::of(settings.dispatch, earlier.as_ref());
    let is_recovering = earlier.as_ref().is_some_and(|row| row.recovering.is_some());
    let is_below_floor = row.xid < record.floor && !row.is_uncompared;
    let mut is_passed = is_below_floor;
    if row.is_ours && !is_passed {
        // The row is visible, so its commit lies before the end of the WAL.
        let end = cluster::wal_end(sql).await?;
        (_, is_passed) = progress::wait_until_confirmed(sql, &settings.slot, end, WAIT).await?;
        // A recovery publishes rows from the tables even if the slot has passed them.
        is_passed &= !is_recovering;
        // The relay may have written the record while we waited.
        if let Some(found) = history::of_events(sql, &[row.event_id]).await?.pop() {
            return Ok(of_record(found, Some(row.row)));
        }
    }
    let state = EventState::unrecorded(UnrecordedFacts {
        is_ours: row.is_ours,
        is_passed,
        may_lack_record: records.may_lack_records() || row.xid < record.recorded_from,
        records,
    });
    let lane = lane(sql, table, &row).await?;
    let (topic, ordering_key) = lane.unzip();
    Ok(EventReport {
        event_id: row.event_id.to_string(),
        source_id: table.reader.source_prefix().map(|_| row.name),
        meaning: if state.waits() && is_recovering {
            format!("{}. {RECOVERING}", state.meaning(None, None, true))
        } else {
            state.meaning(None, None, true)
        },
        state,
        topic: topic.filter(|_| settings.project().is_ok()),
        ordering_key,
        message_id: None,
        replay: None,
        earlier_messages: Vec::new(),
        row: Some(row.row),
        record: None,
    })
}

/// Returns the topic and ordering key of a row's event. `None` if the row is gone or cannot be mapped.
async fn lane(
    sql: &Sql,
    table: &mut SearchedTable<'_>,
    row: &FoundRow,
) -> Result<Option<(String, String)>> {
    let event_id = EventId {
        uuid: row.event_id.into_bytes(),
        source_id: table
            .reader
            .source_prefix()
            .map(|_| row.name.clone().into_boxed_str()),
    };
    let Some(values) = rows::find(sql, &table.reader, &event_id).await? else {
        return Ok(None);
    };
    // The mapping needs a position, but topic and key do not depend on it.
    let event = table.reader.event(&values, EventPosition::default());
    Ok(event.ok().map(|event| {
        (
            event.topic.to_string(),
            event.ordering_key.as_str().to_owned(),
        )
    }))
}
