//! Updates the capture record of a table that was renamed, or that was replaced by another table of the
//! same name. If the table was replaced, decides whether the new table is a copy of the old one.
//!
//! The decision matters only if the ids are not uuids and the table has no column `inserted_xid`. Rows of a copy
//! keep their event ids. A table that was created again may number its rows from 1 again, so its rows need
//! other event ids. If the new rows had the event ids of earlier rows, the relay would treat them as already
//! published. A restored backup has the same problem: the backup lacks the latest rows, so new rows get the ids
//! of the lost rows.
//!
//! So this module takes the newest dispatch rows, and looks for the table rows to which they belong. In a
//! copy, each of these table rows exists, with the same key and topic, and with a time that is not later than
//! the commit time in the dispatch row. If in doubt, this module gives the rows other event ids, because
//! sending events again is better than losing them.

use std::collections::HashMap;
use std::fmt;

use outbox_event::EventUuids;
use slot_manager::table;
use tokio_postgres::SimpleQueryMessage;
use tokio_postgres::error::{Error as PgError, SqlState};
use uuid::Uuid;

use super::{Captured, FoundTable};
use crate::capture::rows::is_of_a_value;
use crate::capture::table::{RowValues, TableReader, altered_since};
use crate::error::{Error, Result};
use crate::event::EventPosition;
use crate::mapping::TableSettings;
use crate::postgres::Sql;
use crate::store::capture_record::CaptureRecord;
use crate::store::dispatch::history::{self, RecordedRow};

/// Maximum number of records whose rows are compared.
const COMPARED: usize = 1_000;

/// Whether the table that replaced a captured table contains copies of the captured table's rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum RowOrigin {
    /// The table is a copy: it contains the outbox rows of the newest records. The field is the number of records that
    /// were compared.
    Copy(usize),
    /// The rows are new, or nothing proves that they are copies. The text says why.
    New(String),
}

impl fmt::Display for RowOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Copy(rows) => write!(
                f,
                "the table is a copy, because it has the rows of the newest {rows} records: its rows keep \
                 their event ids"
            ),
            Self::New(why) => write!(
                f,
                "the rows of the table get event ids that differ from those in the earlier table, because \
                 {why}; if the table is a copy, its rows are published again. With a column inserted_xid \
                 (`postrider init --apply`), the relay recognises copied rows"
            ),
        }
    }
}

/// Returns the record with the table's present name and OID, and with the event id suffix for this OID. Also
/// returns the origin of the table's rows, if their event ids depend on the origin.
///
/// # Errors
/// Database errors; the errors of [`TableReader::resolve`].
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
    // The rows of former tables keep their event ids, so record the suffix of each former table. The record has room
    // for a limited number of suffixes, and a new suffix may push out an earlier one. So begin with the tables that
    // the relay needs least.
    let former = known.settled.keys().chain(&record.detached);
    // `former` has only tables with rows of their own. A partitioned table has none, so add its OID here.
    for oid in former.chain([&known.oid]) {
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
    match origin {
        Some(RowOrigin::Copy(_)) => record.id_suffixes = id_suffixes,
        Some(RowOrigin::New(_)) | None => {
            record.id_suffixes = record.id_suffixes.with_new(shape.oid, known.oid);
        }
    }
    Ok((record, origin))
}

/// Decides whether the table is a copy of the table that it replaced. Compares the newest records with the rows to
/// which they belong. Returns `None` if the row ids are uuids, because such rows keep their event ids in any case.
///
/// `captured` describes the table as a copy: its id suffixes give copied rows the event ids of the earlier table.
async fn origin(
    sql: &Sql,
    settings: &TableSettings,
    captured: &Captured,
) -> Result<Option<RowOrigin>> {
    // The project does not matter, because only the last part of a topic's name is compared.
    let mut reader = TableReader::resolve(sql, settings, "none", captured).await?;
    let Some(prefix) = reader.source_prefix() else {
        return Ok(None);
    };
    let new = |why: &str| Ok(Some(RowOrigin::New(why.to_owned())));
    let Some(select) = reader.sample_sql() else {
        return new("the table has no time column, by which a copied row could be recognised");
    };
    let id = table::lookup_column(sql, captured.shape.oid, reader.id_column()).await?;
    if !reader.finds_ids_by_index() || id.is_none_or(|id| !id.is_indexed) {
        return new("no index finds a row by its id");
    }
    let records = history::newest_of_table(sql, prefix, COMPARED).await?;
    let records = of_event_ids(records, &reader, &EventUuids::new(&captured.identity()));
    if records.is_empty() {
        return new("no recent record belongs to a row with the same event id");
    }
    let statement = format!(
        "{select} and ({})",
        reader.has_any_id_sql(&ids(&records, &reader))
    );
    let answer = match sql.simple_query(&statement).await {
        Ok(answer) => answer,
        // A missing right does not show whether the table is a copy. So return the error, and the relay tries again.
        Err(error) if error.code() == Some(&SqlState::INSUFFICIENT_PRIVILEGE) => {
            let hint = format!("GRANT SELECT ON {} TO <relay user>", settings.table);
            return Err(Error::from(error).hint(hint));
        }
        Err(error) if !cannot_be_compared(&error) => return Err(altered_since(error)),
        Err(error) => {
            tracing::warn!(table = %settings.table, "cannot compare the rows: {error}");
            return new("its rows cannot be compared with their records");
        }
    };
    let rows: Vec<ComparedRow> = answer
        .into_iter()
        .filter_map(|message| match message {
            SimpleQueryMessage::Row(row) => ComparedRow::of(&mut reader, row),
            _ => None,
        })
        .collect();
    Ok(Some(judge(&rows, &records)))
}

/// Keeps only the records whose row would have the same event id in a copy of the replaced table. Only these records
/// can show whether the table is a copy. The event id is computed from the row's id, and from the identity and the
/// suffix of the table. `uuids` has the identity and the suffix that a copy would have.
///
/// The other records belong to two kinds of rows:
///
/// - Rows that had an `inserted_xid`, from which the event id was computed, too.
/// - Rows of an even earlier table of the same name, which had another suffix.
fn of_event_ids(
    records: Vec<RecordedRow>,
    reader: &TableReader,
    uuids: &EventUuids,
) -> Vec<RecordedRow> {
    let is_of_table = |record: &RecordedRow| {
        let id = record.source_id.as_deref().and_then(|id| reader.id_in(id));
        id.is_some_and(|id| uuids.event_uuid(id, None) == record.event_id)
    };
    records.into_iter().filter(is_of_table).collect()
}

/// Returns the id of each record's row, which is a part of the source id.
fn ids<'r>(records: &'r [RecordedRow], reader: &TableReader) -> Vec<&'r str> {
    let source_ids = records
        .iter()
        .filter_map(|found| found.source_id.as_deref());
    source_ids.filter_map(|id| reader.id_in(id)).collect()
}

/// Whether a statement failed because of the values in the table. Such a statement would fail again.
fn cannot_be_compared(error: &PgError) -> bool {
    is_of_a_value(error) && error.code() != Some(&SqlState::OUT_OF_MEMORY)
}

/// The values of a table row that are compared with its record.
#[derive(Debug)]
struct ComparedRow {
    id: Uuid,
    /// The topic and the ordering key; `None` if the row cannot become a message.
    stream: Option<(String, String)>,
    /// When the event happened: RFC 3339 in UTC, with milliseconds. Empty if the row has no time or an
    /// infinite time.
    happened_at: String,
}

impl ComparedRow {
    fn of(reader: &mut TableReader, row: tokio_postgres::SimpleQueryRow) -> Option<Self> {
        let id = reader.id_of(&row)?;
        let happened_at = reader.sampled_time_of(&row).unwrap_or_default().to_owned();
        // The position does not matter: nothing is published.
        let event = reader.event(&RowValues::Whole(row), EventPosition::default());
        let stream = event.ok().map(|event| {
            let key = event.ordering_key.as_str().to_owned();
            (event.topic.to_string(), key)
        });
        Some(Self {
            id,
            stream,
            happened_at,
        })
    }

    /// Returns why this row cannot be the row of the record, or `None` if it can.
    fn differs_from(&self, found: &RecordedRow) -> Option<&'static str> {
        let last = |topic: &str| topic.rsplit('/').next().map(str::to_owned);
        // A record without a topic belongs to a quarantined event whose row could not become a message. Such a
        // record has no topic or key to compare.
        if let Some(topic) = &found.topic {
            let is_same = self.stream.as_ref().is_some_and(|(own, key)| {
                last(own) == last(topic)
                    && *key == found.ordering_key.as_deref().unwrap_or_default()
            });
            if !is_same {
                return Some("another key or topic than its record");
            }
        }
        // Both texts have the same format, so comparing the texts compares the times.
        let is_older =
            !self.happened_at.is_empty() && self.happened_at <= found.record.committed_at;
        (!is_older).then_some("a later time than its record, or no time")
    }
}

/// Decides whether the table is a copy, from the newest `records` and from the table's `rows` with the ids of these
/// records. In a copy, each record has its row, no row differs from its record, and at least one record names a topic.
fn judge(rows: &[ComparedRow], records: &[RecordedRow]) -> RowOrigin {
    let mut by_id: HashMap<Uuid, Vec<&ComparedRow>> = HashMap::new();
    for row in rows {
        by_id.entry(row.id).or_default().push(row);
    }
    for found in records {
        let id = found.source_id.as_deref().unwrap_or_default();
        let Some(rows) = by_id.get(&found.event_id) else {
            return RowOrigin::New(format!("row {id} has a record and is not in the table"));
        };
        if let Some(differs) = rows.iter().find_map(|row| row.differs_from(found)) {
            return RowOrigin::New(format!("row {id} has {differs}"));
        }
    }
    match records.iter().filter(|found| found.topic.is_some()).count() {
        0 => RowOrigin::New("no recent record names a topic".to_owned()),
        _ => RowOrigin::Copy(records.len()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::dispatch::history::tests::published;

    fn row(id: u128, key: &str, happened_at: &str) -> ComparedRow {
        let topic = "projects/none/topics/order.events";
        ComparedRow {
            id: Uuid::from_u128(id),
            stream: Some((topic.to_owned(), key.to_owned())),
            happened_at: happened_at.to_owned(),
        }
    }

    fn record(id: u128, key: &str) -> RecordedRow {
        let topic = "projects/demo/topics/order.events";
        published(Uuid::from_u128(id), topic, key, "2026-11-27T08:30:00.000Z")
    }

    const BEFORE: &str = "2026-11-27T08:29:59.999Z";
    const AFTER: &str = "2026-11-27T08:30:00.001Z";

    fn is_copy(rows: &[ComparedRow], records: &[RecordedRow]) -> bool {
        matches!(judge(rows, records), RowOrigin::Copy(_))
    }

    #[test]
    fn a_table_with_the_rows_of_all_records_is_a_copy() {
        let records = [record(1, "a"), record(2, "b")];
        let rows = [row(1, "a", BEFORE), row(2, "b", BEFORE)];
        assert!(is_copy(&rows, &records));
        // Undelivered rows have no record, so the table may have more rows than there are records.
        let [first, second] = rows;
        assert!(is_copy(&[first, second, row(3, "a", AFTER)], &records));
        // A quarantined event may belong to a row that cannot become a message.
        let mut refused = record(3, "");
        (refused.topic, refused.ordering_key) = (None, None);
        let mut unmappable = row(3, "", BEFORE);
        unmappable.stream = None;
        assert!(is_copy(
            &[row(1, "a", BEFORE), unmappable],
            &[record(1, "a"), refused]
        ));
    }

    #[test]
    fn a_table_is_new_if_a_row_is_missing_or_different_or_nothing_proves_that_it_is_a_copy() {
        let records = [record(1, "a"), record(2, "b")];
        for rows in [
            vec![],
            vec![row(1, "a", BEFORE)],
            vec![row(1, "a", BEFORE), row(2, "b", "")],
            vec![row(1, "a", BEFORE), row(2, "b", AFTER)],
            vec![row(1, "b", BEFORE), row(2, "b", BEFORE)],
            vec![row(1, "a", BEFORE), row(2, "b", BEFORE), row(2, "b", AFTER)],
        ] {
            assert!(!is_copy(&rows, &records), "{rows:?}");
        }
        assert!(!is_copy(&[row(1, "a", BEFORE)], &[]));
    }
}
