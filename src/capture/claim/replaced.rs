//! Updates the capture record of a table that was renamed, or that was replaced by another table of the same
//! name. Decides whether the other table is a copy.
//!
//! The decision matters only if ids are numbered and the table has no column `inserted_xid`. A copy keeps
//! the event ids. A table that was created again may number its rows from 1 again, so its rows need other
//! event ids. With the ids of earlier rows, the relay would take them for published rows. To decide, this
//! module compares a sample of the rows with their records. If in doubt, the rows get other event ids,
//! because repeating events is better than losing them.

use std::collections::HashMap;
use std::fmt;

use outbox_event::EventUuids;
use tokio_postgres::SimpleQueryMessage;
use tokio_postgres::error::SqlState;
use uuid::Uuid;

use super::{Captured, FoundTable};
use crate::capture::table::{RowValues, TableReader};
use crate::error::Result;
use crate::event::EventPosition;
use crate::mapping::TableSettings;
use crate::postgres::Sql;
use crate::store::capture_record::CaptureRecord;
use crate::store::dispatch::history::{self, RecordedRow};

/// Rows to compare at each end of the table.
const SAMPLE_ROWS: usize = 500;
/// Number of ids above the highest id of the table that must have no record.
const LATER_IDS: i64 = 1_000;

/// Whether the rows of a table that has the name of a captured table were copied from that captured table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum RowOrigin {
    /// The table is a copy: this number of sampled rows fit their records.
    Copy(usize),
    /// The rows are new, or nothing proves that they are copies. The text says why.
    New(String),
}

impl fmt::Display for RowOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Copy(rows) => write!(
                f,
                "the table is a copy, because the records of {rows} sampled rows fit these rows: its rows keep \
                 their event ids"
            ),
            Self::New(why) => write!(
                f,
                "the rows of the table get other event ids than the rows of the earlier table, because {why}; if \
                 the table is a copy, its rows are published again. With a column inserted_xid (`postrider init \
                 --apply`), the relay recognises copied rows"
            ),
        }
    }
}

/// Returns the updated record for the table that was found. Also returns the origin of its rows, if their
/// event ids depend on the origin.
///
/// # Errors
/// Errors of a statement; those of [`TableReader::resolve`].
pub(super) async fn brought_up(
    sql: &Sql,
    settings: &TableSettings,
    found: &FoundTable,
    known: &CaptureRecord,
) -> Result<(CaptureRecord, Option<RowOrigin>)> {
    let FoundTable { table, shape } = found;
    let mut record = CaptureRecord {
        table: table.clone(),
        oid: shape.oid,
        ..known.clone()
    };
    if known.oid == shape.oid {
        return Ok((record, None));
    }
    let before = known.partitions.clone();
    let before = CaptureRecord {
        partitions: Some(before.unwrap_or_else(|| known.oid.to_string())),
        ..known.clone()
    };
    record.detached = before.former_partitions(&shape.partitions);
    record.partitions = None;
    for oid in &record.detached {
        if !record.id_suffixes.knows(*oid) {
            record.id_suffixes = record.id_suffixes.with_copy(*oid, known.oid);
        }
    }
    if shape.has_xid_in_ids() || known.id_suffixes.knows(shape.oid) {
        return Ok((record, None));
    }
    let id_suffixes = record.id_suffixes.with_copy(shape.oid, known.oid);
    let as_copy = Captured {
        record: CaptureRecord {
            id_suffixes: id_suffixes.clone(),
            ..record.clone()
        },
        shape: shape.clone(),
    };
    let origin = origin(sql, settings, &as_copy).await?;
    if let Some(RowOrigin::Copy(_)) = origin {
        record.id_suffixes = id_suffixes;
    }
    Ok((record, origin))
}

/// Compares a sample of the rows with their records, under the assumption that the table is a copy. Returns
/// `None` if the ids are uuids.
async fn origin(
    sql: &Sql,
    settings: &TableSettings,
    captured: &Captured,
) -> Result<Option<RowOrigin>> {
    // The project does not matter, because only the last part of a topic's name is compared.
    let mut reader = TableReader::resolve(sql, settings, "none", captured).await?;
    if reader.source_prefix().is_none() {
        return Ok(None);
    }
    let new = |why: &str| Ok(Some(RowOrigin::New(why.to_owned())));
    let Some(statement) = sample_sql(captured, &reader) else {
        return new("the table has no time column, by which a copied row could be recognised");
    };
    let answer = match sql.simple_query(&statement).await {
        Ok(answer) => answer,
        Err(error) if error.code() == Some(&SqlState::INSUFFICIENT_PRIVILEGE) => {
            return new("the relay may not read the table");
        }
        Err(error) if error.code().is_some() => {
            tracing::warn!(table = %settings.table, "cannot read a sample of the rows: {error}");
            return new("no sample of its rows could be read");
        }
        Err(error) => return Err(error.into()),
    };
    let rows: Vec<SampledRow> = answer
        .into_iter()
        .filter_map(|message| match message {
            SimpleQueryMessage::Row(row) => SampledRow::of(&mut reader, row),
            _ => None,
        })
        .collect();
    let ids: Vec<Uuid> = rows.iter().map(|row| row.id).collect();
    let records = history::of_events(sql, &ids).await?;
    Ok(Some(match judge(&rows, &records) {
        RowOrigin::Copy(_) if has_later_records(sql, captured, &reader, &rows).await? => {
            let why = "there are records of rows with higher ids than those in the table";
            RowOrigin::New(why.to_owned())
        }
        origin => origin,
    }))
}

/// The statement that reads the rows at both ends of the table; `None` without a time column.
fn sample_sql(captured: &Captured, reader: &TableReader) -> Option<String> {
    let select = reader.sample_sql()?;
    let seq = captured.shape.numbered().and(reader.seq_sql());
    Some(match seq {
        Some(seq) => {
            let end = |order| format!("({select} order by {seq} {order} limit {SAMPLE_ROWS})");
            format!("{} union all {}", end("asc"), end("desc"))
        }
        // Without an index, an order would sort the whole table.
        None => format!("{select} limit {SAMPLE_ROWS}"),
    })
}

/// A row of the table, as far as it is compared with a record.
#[derive(Debug)]
struct SampledRow {
    id: Uuid,
    seq: Option<i64>,
    topic: String,
    ordering_key: String,
    /// RFC 3339 in UTC, with milliseconds; empty for an infinite time.
    happened_at: String,
}

impl SampledRow {
    fn of(reader: &mut TableReader, row: tokio_postgres::SimpleQueryRow) -> Option<Self> {
        let (id, seq) = (reader.id_of(&row)?, reader.seq_of(&row));
        let happened_at = reader.sampled_time_of(&row)?.to_owned();
        // The position does not matter: nothing is published.
        let event = reader
            .event(&RowValues::Whole(row), EventPosition::default())
            .ok()?;
        Some(Self {
            id,
            seq,
            topic: event.topic.to_string(),
            ordering_key: event.ordering_key.as_str().to_owned(),
            happened_at,
        })
    }
}

/// Decides from the sampled rows and the records of their event ids.
fn judge(rows: &[SampledRow], records: &[RecordedRow]) -> RowOrigin {
    let records: HashMap<Uuid, &RecordedRow> = records
        .iter()
        .map(|found| (found.event_id, found))
        .collect();
    let last = |topic: &str| topic.rsplit('/').next().map(str::to_owned);
    let mut fitting = 0;
    for row in rows {
        let Some(found) = records.get(&row.id) else {
            continue;
        };
        let is_its_row = found.topic.as_deref().and_then(last) == last(&row.topic)
            && found.ordering_key.as_deref().unwrap_or_default() == row.ordering_key;
        // Both texts have the same form, so their order is the order of the times.
        let is_not_newer = row.happened_at <= found.record.committed_at;
        if !is_its_row || !is_not_newer {
            let id = found.source_id.as_deref().unwrap_or_default();
            let differs = if is_its_row { "time" } else { "key or topic" };
            return RowOrigin::New(format!("row {id} has another {differs} than its record"));
        }
        fitting += usize::from(!row.happened_at.is_empty());
    }
    match (fitting, rows.len()) {
        (0, 0) => RowOrigin::New("the table is empty".to_owned()),
        (0, sampled) => RowOrigin::New(format!("none of {sampled} sampled rows has a record")),
        (fitting, _) => RowOrigin::Copy(fitting),
    }
}

/// Whether there is a record of a row with a higher id than the highest id of the table. A backup that was
/// restored lacks the latest rows, and will give their ids to new rows.
async fn has_later_records(
    sql: &Sql,
    captured: &Captured,
    reader: &TableReader,
    rows: &[SampledRow],
) -> Result<bool> {
    let seq = captured.shape.numbered();
    let Some(highest) = rows.iter().filter_map(|row| row.seq).max() else {
        return Ok(false);
    };
    if seq.is_none_or(|seq| seq.column != reader.id_column()) {
        return Ok(false);
    }
    let uuids = EventUuids::new(&captured.identity());
    let later = (1..=LATER_IDS).filter_map(|n| highest.checked_add(n));
    let later: Vec<Uuid> = later
        .map(|id| uuids.event_uuid(&id.to_string(), None))
        .collect();
    Ok(!history::of_events(sql, &later).await?.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::dispatch::history::tests::published;

    fn row(id: u128, key: &str, happened_at: &str) -> SampledRow {
        SampledRow {
            id: Uuid::from_u128(id),
            seq: None,
            topic: "projects/none/topics/order.events".to_owned(),
            ordering_key: key.to_owned(),
            happened_at: happened_at.to_owned(),
        }
    }

    fn record(id: u128, key: &str) -> RecordedRow {
        let topic = "projects/demo/topics/order.events";
        published(Uuid::from_u128(id), topic, key, "2026-11-27T08:30:00.000Z")
    }

    const BEFORE: &str = "2026-11-27T08:29:59.999Z";
    const AFTER: &str = "2026-11-27T08:30:00.001Z";

    fn is_copy(rows: &[SampledRow], records: &[RecordedRow]) -> bool {
        matches!(judge(rows, records), RowOrigin::Copy(_))
    }

    #[test]
    fn rows_that_fit_their_records_are_copies() {
        let records = [record(1, "a"), record(2, "b")];
        assert!(is_copy(
            &[row(1, "a", BEFORE), row(2, "b", BEFORE)],
            &records
        ));
        // Rows older than capturing and undelivered rows have no record.
        assert!(is_copy(
            &[row(2, "b", BEFORE), row(3, "a", AFTER)],
            &records
        ));
    }

    #[test]
    fn rows_are_new_if_one_does_not_fit_or_nothing_proves_that_they_are_copies() {
        let records = [record(1, "a"), record(2, "b")];
        for rows in [
            vec![],
            vec![row(3, "a", BEFORE)],
            vec![row(1, "a", "")],
            vec![row(1, "a", BEFORE), row(2, "b", AFTER)],
            vec![row(1, "b", BEFORE)],
        ] {
            assert!(!is_copy(&rows, &records), "{rows:?}");
        }
    }
}
