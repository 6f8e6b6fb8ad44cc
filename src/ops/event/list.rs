//! Lists the newest events of a key, of a topic, or since a time.
//!
//! The list has two parts: first the waiting events, which are read from the tables, then the events with a
//! record, which are read from outbox.dispatch along its primary key. If published events may lack a record,
//! the list leaves out the first part, because nothing tells a waiting event from a published event without a
//! record. The list then contains only the events that were quarantined, and the events that were published
//! while `dispatch` was `full`.

use super::find::of_record_alone;
use super::state::EventState;
use super::{EventQuery, EventReport, EventTableRow};
use crate::capture::ScanWindow;
use crate::capture::claim::{self, Captured};
use crate::capture::rows::Rows;
use crate::capture::scan::{self, Scan};
use crate::capture::table::{RowValues, TableReader};
use crate::error::Result;
use crate::event::EventPosition;
use crate::mapping::{MapError, TableSettings};
use crate::postgres::Sql;
use crate::settings::Settings;
use crate::store::dispatch::history;
use crate::store::relay_row;
pub(crate) use crate::store::relay_row::RecordKeeping;

/// The search for waiting events reads rows without a record, oldest first. It stops in a table once it has
/// read this many rows there.
const WAITING_MAX: usize = 10_000;

/// The newest events that match. Programs depend on the JSON form.
#[derive(Debug, serde::Serialize)]
pub(crate) struct EventListing {
    pub(crate) events: Vec<EventReport>,
    /// `full` or `exceptions`. With `exceptions`, only events with a record are listed.
    #[serde(rename = "dispatch")]
    pub(crate) records: RecordKeeping,
    /// Whether the search stopped at its limit, so that more events may be waiting.
    pub(crate) more_wait: bool,
}

/// Lists the newest events.
///
/// # Errors
/// `postgres-timeout` when the search takes too long; database errors.
pub(crate) async fn list(
    sql: &Sql,
    settings: &Settings,
    query: &EventQuery<'_>,
    limit: usize,
) -> Result<EventListing> {
    let filter = query.filter(sql).await?;
    let recorded = history::newest(sql, &filter, limit).await;
    let recorded = recorded.map_err(|error| query.took_long(error))?;
    let records = relay_row::read_record_keeping(sql, settings).await?;
    let (mut events, more_wait) = if records.may_lack_records() {
        (Vec::new(), false)
    } else {
        waiting(sql, settings, query).await?
    };
    events.extend(recorded.into_iter().map(of_record_alone));
    events.truncate(limit);
    Ok(EventListing {
        events,
        records,
        more_wait,
    })
}

/// Returns the waiting events that match, and whether the search stopped at its limit. The events of each
/// table are sorted newest first.
async fn waiting(
    sql: &Sql,
    settings: &Settings,
    query: &EventQuery<'_>,
) -> Result<(Vec<EventReport>, bool)> {
    scan::prepare(sql).await?;
    let captured =
        claim::as_if_claimed(sql, &settings.slot, &settings.tables, settings.start).await?;
    let (mut found, mut more) = (Vec::new(), false);
    for (table, captured) in settings.tables.iter().zip(&captured) {
        more |= waiting_in(sql, settings, table, captured, query, &mut found).await?;
    }
    found.reverse();
    Ok((found, more))
}

async fn waiting_in(
    sql: &Sql,
    settings: &Settings,
    table: &TableSettings,
    captured: &Captured,
    query: &EventQuery<'_>,
    found: &mut Vec<EventReport>,
) -> Result<bool> {
    let project = settings.project().unwrap_or("none");
    let mut reader = TableReader::resolve(sql, table, project, captured).await?;
    let mut scan = Scan::new(ScanWindow::recent(captured), &reader, &[]);
    let (mut rows, mut examined) = (Rows::new(), 0);
    while let Some(candidates) = scan.next(sql).await? {
        examined += candidates.len();
        rows.add(candidates);
        while !rows.is_empty() {
            for row in rows.portion(sql, &reader).await? {
                let (topic, key) = lane(&mut reader, &row.values);
                let is_short = |topic: &str, asked: &str| topic.rsplit('/').next() == Some(asked);
                let has_topic = query.topic.is_none_or(|asked| {
                    topic
                        .as_deref()
                        .is_some_and(|topic| topic == asked || is_short(topic, asked))
                });
                if !has_topic || query.key.is_some_and(|asked| key.as_deref() != Some(asked)) {
                    continue;
                }
                let state = EventState::Waiting;
                found.push(EventReport {
                    event_id: row.id.to_string(),
                    source_id: None,
                    state,
                    meaning: state.meaning(None, None, true),
                    topic: topic.filter(|_| settings.project().is_ok()),
                    ordering_key: key,
                    message_id: None,
                    replay: None,
                    earlier_messages: Vec::new(),
                    row: Some(EventTableRow {
                        table: table.table.to_string(),
                        seq: None,
                        inserted_xid: None,
                        occurred_at: reader.occurred_at(&row.values).map(str::to_owned),
                    }),
                    record: None,
                });
            }
        }
        if examined >= WAITING_MAX {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The topic and the ordering key of a row's event, as far as they are known.
fn lane(reader: &mut TableReader, row: &RowValues) -> (Option<String>, Option<String>) {
    let (topic, key) = match reader.event(row, EventPosition::default()) {
        Ok(event) => (Some(event.topic), event.ordering_key),
        Err(MapError::Event(error)) => (error.known.topic, error.known.ordering_key),
        Err(MapError::ColumnMissing { .. } | MapError::Setting { .. }) => return (None, None),
    };
    let topic = topic.map(|topic| topic.to_string());
    (topic, Some(key.as_str().to_owned()))
}
