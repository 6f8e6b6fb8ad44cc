//! Finds an event by its id: the event's uuid, the id in its table, or `schema.table:id`.

use std::time::Duration;

use slot_manager::cluster;
use uuid::Uuid;

use super::named_table;
use super::rows::{self, FoundRow, SearchedTable};
use super::state::{self, EventState, UnrecordedFacts};
use super::{EventReport, EventTableRow};
use crate::capture;
use crate::error::{Code, Error, Result};
use crate::event::{EventId, EventPosition};
use crate::ops::{self, progress};
use crate::postgres::Sql;
use crate::settings::Settings;
use crate::store::dispatch::history::{self, RecordedRow};
use crate::store::relay_row::{self, RecordKeeping};

/// Statement timeout. Only a search without an index can take that long, such as a search through all
/// of outbox.dispatch.
pub(crate) const STATEMENT_TIMEOUT: Duration = Duration::from_secs(15);

/// The longest time to wait for the slot to pass an event that has no record.
const WAIT: Duration = Duration::from_secs(2);

/// How long to wait for a lock on a former table.
const FORMER_LOCK_TIMEOUT: Duration = Duration::from_secs(1);

/// The note about an event without a record while a recovery is due or running.
const RECOVERING: &str = "A recovery is due or running: if the stream has missed the row, the relay publishes it after \
    the recovery, which may wait for failing topics";

/// The text of [`EventReport::meaning`] for a row without a record, if the slot has passed the row and its transaction
/// is below the floor of the table.
const BELOW_FLOOR: &str = "the slot has passed it, and it has no record. The relay looks for such rows only from the \
    `floor` of their table on (outbox.capture), and the transaction of this row is older. So the relay does not publish \
    it. To publish it, insert it again as a new event";

/// Returns all events with this id. There can be several, because the same number may be an id in
/// several tables.
///
/// # Errors
/// `setting-invalid` when `id` begins with the name of a table that does not have the event; `postgres-timeout` when a
/// search takes too long; database errors.
pub(crate) async fn find(sql: &Sql, settings: &Settings, id: &str) -> Result<Vec<EventReport>> {
    let whole = id.trim();
    let named = named_table::read(settings, whole);
    let id = named.map_or(whole, |named| named.uuid);
    let mut tables = match named {
        Some(named) => vec![rows::one(sql, settings, named.number).await?],
        None => rows::all(sql, settings).await?,
    };
    let mut found = Vec::new();
    for (n, table) in tables.iter().enumerate() {
        let id = table.reader.id_in(id).unwrap_or(id);
        found.extend(table.rows(sql, n, id).await?);
    }
    if let (Some(named), true) = (named, found.is_empty()) {
        named.refuse_row_elsewhere(sql, settings).await?;
    }
    let mut records = recorded(sql, &tables, &found, id).await?;
    if let Some(named) = named {
        let identity = &tables[0].captured.record.identity;
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
                    let rows = table.rows(sql, n, id).await?;
                    found.extend(rows.into_iter().filter(is_found));
                }
            }
        }
    }
    let not_searched = find_in_former(sql, settings, &mut tables, &records, &mut found).await?;
    let mut reports = Vec::new();
    for row in found {
        let record = records.iter().position(|r| r.event_id == row.event_id);
        let record = record.map(|n| records.swap_remove(n));
        reports.push(match record {
            Some(record) => of_record(record, Some(row.row)),
            None => unrecorded(sql, settings, &mut tables[row.table], row).await?,
        });
    }
    reports.extend(records.into_iter().map(|record| {
        let mut report = of_record(record, None);
        if report.state == EventState::Quarantined && !not_searched.is_empty() {
            report.meaning = format!("{}{}", state::NOT_SEARCHED, not_searched.join("; "));
        }
        report
    }));
    match named_table::unknown(settings, whole) {
        Some(error) if reports.is_empty() => Err(error),
        _ => Ok(reports),
    }
}

/// Searches the former tables for the rows of the records that have no row in `found` yet. Adds these rows to `found`,
/// and the searched tables to `tables`. Returns the former tables that could not be searched, each with the remedy or
/// the error.
async fn find_in_former(
    sql: &Sql,
    settings: &Settings,
    tables: &mut Vec<SearchedTable>,
    records: &[RecordedRow],
    found: &mut Vec<FoundRow>,
) -> Result<Vec<String>> {
    let has_row = |found: &[FoundRow], record: &RecordedRow| {
        found.iter().any(|row| row.event_id == record.event_id)
    };
    if records.iter().all(|record| has_row(found, record)) {
        return Ok(Vec::new());
    }
    let former = rows::former(sql, settings, tables).await?;
    let mut not_searched = former.unreadable;
    // Somebody may hold a lock on a former table for long, for example to archive it.
    sql.limit_lock_waits(FORMER_LOCK_TIMEOUT).await?;
    for table in former.tables {
        for record in records {
            let uuid = record.event_id.to_string();
            let id = match record.source_id.as_deref() {
                Some(source_id) => table.reader.id_in(source_id),
                None => Some(&*uuid),
            };
            let Some(id) = id.filter(|_| !has_row(found, record)) else {
                continue;
            };
            match table.rows(sql, tables.len(), id).await {
                Ok(mut rows) => {
                    rows.retain(|row| row.event_id == record.event_id);
                    found.extend(rows);
                }
                Err(error) => not_searched.push(format!("{}: {error}", table.name)),
            }
        }
        tables.push(table);
    }
    sql.limit_lock_waits(ops::LOCK_TIMEOUT).await?;
    Ok(not_searched)
}

/// Returns the records of the found rows. If `id` is a uuid, also returns the record of the event with this uuid.
///
/// If there are no found rows and no such record, returns the records with one of these source ids: `id` itself, and
/// `id` after the prefix `schema.table:` of each table.
async fn recorded(
    sql: &Sql,
    tables: &[SearchedTable],
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
    table: &mut SearchedTable,
    row: FoundRow,
) -> Result<EventReport> {
    let record = &table.captured.record;
    let earlier = relay_row::read(sql, &settings.slot).await?;
    let records = RecordKeeping::of(settings.dispatch, earlier.as_ref());
    let is_recovering = earlier.as_ref().is_some_and(|row| row.recovering.is_some());
    let is_below_floor = row.xid < record.floor && !row.is_uncompared;
    let mut is_passed = is_below_floor;
    if row.is_ours && !is_passed {
        // The row is visible, so its commit lies before the end of the WAL. A slot that has confirmed this end
        // has passed the row.
        let end = cluster::wal_end(sql).await?;
        (_, is_passed) = progress::wait_until_confirmed(sql, &settings.slot, end, WAIT).await?;
        // A recovery may still publish the row from its table, even if the slot has passed the row.
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
        meaning: if state == EventState::Missing && is_below_floor {
            BELOW_FLOOR.to_owned()
        } else if state.waits() && is_recovering {
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
    table: &mut SearchedTable,
    row: &FoundRow,
) -> Result<Option<(String, String)>> {
    let event_id = EventId {
        uuid: row.event_id.into_bytes(),
        source_id: table
            .reader
            .source_prefix()
            .map(|_| row.name.clone().into_boxed_str()),
    };
    let Some(values) = capture::rows::find(sql, &table.reader, &event_id).await? else {
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
