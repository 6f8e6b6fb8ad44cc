//! Reads captured tables over SQL, for rows that the stream does not contain (rows from before the slot,
//! or from a gap in the publication) and for rows of quarantined events.
//!
//! A row from the table is described and mapped like a row from the stream, so both give the same message. This module
//! writes the beginning of a statement: `select ... from`, then the table and a first condition
//! ([`TableReader::rows_sql`]). The caller appends its conditions, order and limit, and supplies the event's position.
//! The caller must run the statement as a simple query, because only a simple query returns each value as the same
//! text that the stream sends.
//!
//! Not here: which rows are read, and when.

mod column_types;
mod describe;
mod lookup;
mod values;

use std::sync::Arc;

use decoder::{PgTimestamp, Value};
use slot_manager::{QualifiedName, cluster, quoted_identifier, quoted_literal, table};
use tokio_postgres::SimpleQueryRow;
use tokio_postgres::error::{Error as PgError, SqlState};

use super::captured::Captured;
use crate::error::{Code, Error, Result};
use crate::event::{CommittedAt, Event, EventId, EventPosition, EventRef, OrderingKey};
use crate::mapping::{EventFault, MapError, Mapper, TableSettings};
use crate::postgres::Sql;

pub(crate) use column_types::{
    columns_apart, is_current_apart, look_up_apart as look_up_types_apart,
};
pub(crate) use describe::{Description, describe};
pub(crate) use lookup::{OldestAgeSql, inserted_xid_text};
pub(crate) use values::RowValues;
use values::SelectedColumn;

/// Value that replaces text that is not UTF-8, because the driver does not return the bytes of such
/// text. This byte is not UTF-8 either, so mapping reports the same fault.
pub(crate) const NOT_UTF8: &[u8] = &[0xFF];

/// Microseconds between the Unix epoch (1970) and PostgreSQL's epoch (2000).
const PG_EPOCH: &str = "946684800000000";

/// The event of a table row, with the topic and ordering key of its lane.
#[derive(Debug)]
pub(crate) struct TableEvent {
    pub(crate) topic: Arc<str>,
    pub(crate) ordering_key: OrderingKey,
    pub(crate) event: Event,
}

/// Reads rows of one captured table. In the reader's statements, the table has the alias `e`.
#[derive(Debug)]
pub(crate) struct TableReader {
    mapper: Mapper,
    columns: Vec<SelectedColumn>,
    /// Index of the column that says when an event happened. `None` if the table has no such column.
    occurred_at: Option<usize>,
    table: String,
    rows: String,
    /// The condition that the table's name still belongs to the captured table.
    is_ours: String,
    /// The expression for the commit time of a row, in microseconds since PostgreSQL's epoch. If the
    /// server does not know the commit time, the expression returns the current time.
    committed: String,
    event_id: String,
    /// The `seq` column, which identifies a row when the relay reads it again. `None` if the table has none.
    seq: Option<String>,
    id: String,
    /// Whether the type of the ids has a sort order in PostgreSQL. Only then can a look-up by id use an
    /// index.
    id_has_order: bool,
    oldest_age: OldestAgeSql,
    /// `schema.table:` in front of ids that are not uuids. `None` if the ids are uuids.
    source_prefix: Option<String>,
}

impl TableReader {
    /// Looks the table up in the catalogue and resolves its mapping.
    ///
    /// # Errors
    /// `publication-drift` when the table does not exist, `column-missing`, `setting-invalid`,
    /// database errors.
    pub(crate) async fn resolve(
        sql: &Sql,
        settings: &TableSettings,
        project: &str,
        captured: &Captured,
    ) -> Result<Self> {
        let table = &settings.table;
        let Description { relation, types } = describe(sql, table).await?.ok_or_else(|| {
            Error::new(Code::PublicationDrift, format!("there is no table {table}"))
        })?;
        let has_commit_time = cluster::tracks_commit_times(sql).await?;
        let identity = captured.identity();
        let mapper = Mapper::resolve(&relation, &types, settings, &identity, project)?;
        let described = Description { relation, types };
        Ok(Self::new(
            mapper,
            &described,
            table,
            captured,
            has_commit_time,
        ))
    }

    fn new(
        mapper: Mapper,
        described: &Description,
        table: &QualifiedName,
        captured: &Captured,
        has_commit_time: bool,
    ) -> Self {
        let of = |name: &str| format!("e.{}", quoted_identifier(name));
        let known = mapper.table_columns();
        let id = of(known.id);
        let Captured { record, shape } = captured;
        let event_id = if known.id_is_uuid {
            id.clone()
        } else {
            lookup::hashed_id_sql(&id, captured)
        };
        let commit_time = has_commit_time.then_some("pg_xact_commit_timestamp(e.xmin)");
        let Description { relation, types } = described;
        let names = || relation.columns.iter().map(|c| c.name.as_str());
        let occurred_at = names().position(|name| known.occurred_at == Some(name));
        let happened = known.occurred_at.map(|time| (of(time), known.time_kind));
        let times: Vec<&str> = commit_time.into_iter().chain(["now()"]).collect();
        let committed = format!(
            "(extract(epoch from coalesce({})) * 1000000)::bigint - {PG_EPOCH}",
            times.join(", ")
        );
        let is_ours = table::has_oid_sql(table, shape.oid);
        let used = mapper.used_columns();
        let columns = relation.columns.iter().enumerate();
        let columns = columns.map(|(n, column)| {
            SelectedColumn::new(column, types.base(column.type_oid), used.contains(&n))
        });
        Self {
            columns: columns.collect(),
            occurred_at,
            table: table.to_string(),
            rows: format!("{table} e where {is_ours}"),
            is_ours,
            committed,
            event_id,
            seq: shape.seq.as_ref().map(|seq| of(&seq.column)),
            source_prefix: (!known.id_is_uuid).then(|| format!("{}:", record.identity)),
            id,
            id_has_order: known.id_has_order,
            oldest_age: lookup::oldest_age(commit_time, happened),
            mapper,
        }
    }

    /// The condition that a row of `e` is the row of the event `event_id`. `None` if the event does not belong
    /// to this table.
    pub(crate) fn is_sql(&self, event_id: &EventId) -> Option<String> {
        let id = match (&event_id.source_id, &self.source_prefix) {
            (None, None) => event_id.to_string(),
            (Some(source_id), Some(prefix)) => source_id.strip_prefix(prefix.as_str())?.to_owned(),
            (Some(_), None) | (None, Some(_)) => return None,
        };
        let (column, id) = (&self.id, quoted_literal(&id));
        let is_same = match (&self.source_prefix, self.id_has_order) {
            (None, _) => format!("{column} = {id}"),
            // Some types have equal values with different texts, such as 1.0 and 1.00, so compare the texts
            // too.
            (Some(_), true) => {
                format!("{column} = {id} and format('%s', {column}) = {id}")
            }
            (Some(_), false) => format!("format('%s', {column}) = {id}"),
        };
        // The table may have been created again, with other rows under the same ids, so compare the event id
        // too.
        let uuid = uuid::Uuid::from_bytes(event_id.uuid);
        Some(format!("({is_same} and {} = '{uuid}')", self.event_id))
    }

    pub(crate) fn oldest_age_sql(&self) -> &OldestAgeSql {
        &self.oldest_age
    }

    /// Returns `select … from` and [`rows_sql`](Self::rows_sql). The caller completes the statement, and runs it as a
    /// simple query.
    pub(crate) fn select_sql(&self) -> String {
        let values: Vec<&str> = self.columns.iter().map(|c| c.value.as_str()).collect();
        let too_large = self.columns.iter().filter_map(|column| {
            let fits = column.fits.as_ref()?;
            let name = quoted_literal(&column.name);
            Some(format!("when not ({fits}) then {name}"))
        });
        let too_large: Vec<String> = too_large.collect();
        let too_large = if too_large.is_empty() {
            "null".to_owned()
        } else {
            format!("case {} end", too_large.join(" "))
        };
        format!(
            "select {}, {}, {too_large}, {}, {}, e.ctid from {}",
            values.join(", "),
            self.committed,
            self.event_id,
            self.seq.as_deref().unwrap_or("null"),
            self.rows
        )
    }

    pub(crate) fn columns(&self) -> std::ops::Range<usize> {
        0..self.columns.len()
    }

    /// The expressions to select when one column is read on its own: the column's value, and the commit
    /// time of the row.
    pub(crate) fn column_sql(&self, column: usize) -> String {
        format!("{}, {}", self.columns[column].value, self.committed)
    }

    /// The expression for the stored size of a column's value in bytes, perhaps compressed. PostgreSQL
    /// computes it without reading the value.
    pub(crate) fn stored_size_sql(&self, column: usize) -> String {
        format!(
            "pg_column_size(e.{})",
            quoted_identifier(&self.columns[column].name)
        )
    }

    /// The id in a row that [`select_sql`](Self::select_sql) returned.
    pub(crate) fn id_of(&self, row: &SimpleQueryRow) -> Option<uuid::Uuid> {
        let text = row.try_get(self.columns.len() + 2).ok().flatten()?;
        uuid::Uuid::parse_str(text).ok()
    }

    /// The `seq` of a row that [`select_sql`](Self::select_sql) returned.
    pub(crate) fn seq_of(&self, row: &SimpleQueryRow) -> Option<i64> {
        let text = row.try_get(self.columns.len() + 3).ok().flatten()?;
        text.parse().ok()
    }

    /// The `ctid`, in its table or partition, of a row that [`select_sql`](Self::select_sql) returned.
    pub(crate) fn ctid_of<'r>(&self, row: &'r SimpleQueryRow) -> Option<&'r str> {
        row.try_get(self.columns.len() + 4).ok().flatten()
    }

    /// Size in bytes of the column values of a row that [`select_sql`](Self::select_sql) returned.
    pub(crate) fn bytes(&self, row: &SimpleQueryRow) -> usize {
        let texts = self.columns().map(|n| row.try_get(n).ok().flatten());
        texts.map(|text| text.map_or(0, str::len)).sum()
    }

    /// The table's name, quoted for SQL.
    pub(crate) fn table_sql(&self) -> &str {
        &self.table
    }

    /// The rows of the table, for the `from` clause of a statement: the table, with the alias `e`, and the beginning of
    /// the `where` clause, to which the caller appends `and` and its conditions.
    ///
    /// The `where` clause checks which table the statement reads. Statements name the table, and another table may have
    /// got the name since the captured tables were looked up. The rows of that table would get wrong event ids, and the
    /// rows of our table would count as deleted. So the statement fails then ([`altered_since`]).
    pub(crate) fn rows_sql(&self) -> &str {
        &self.rows
    }

    /// A statement that fails like [`rows_sql`](Self::rows_sql) if another table has the name now, and reads no table.
    /// A walk over the table ends with it: if another table has taken the name, the last pages may have been empty, and
    /// PostgreSQL may have skipped the check in them.
    pub(crate) fn check_sql(&self) -> String {
        format!("select {}", self.is_ours)
    }

    /// The `seq` column. The relay finds a row again by the value of this column.
    pub(crate) fn seq_sql(&self) -> Option<&str> {
        self.seq.as_deref()
    }

    /// The expression for the event id of a row, as in outbox.dispatch. The expression is null for a row
    /// without an id.
    pub(crate) fn event_id_sql(&self) -> &str {
        &self.event_id
    }

    /// When the event of a row happened, according to the table's time column.
    pub(crate) fn occurred_at<'r>(&self, row: &'r RowValues) -> Option<&'r str> {
        row.text(self.occurred_at?).ok().flatten()
    }

    /// Makes the event of a row, with this position.
    ///
    /// # Errors
    /// [`MapError::Event`] when the row cannot become a message, for example because a value is too large, or
    /// because PostgreSQL cannot send it.
    pub(crate) fn event(
        &mut self,
        row: &RowValues,
        position: EventPosition,
    ) -> Result<TableEvent, MapError> {
        let texts = self.columns().map(|n| row.text(n));
        let values: Vec<Value<'_>> = texts
            .map(|text| match text {
                Ok(Some(text)) => Value::Text(text.as_bytes()),
                Ok(None) => Value::Null,
                Err(_) => Value::Text(NOT_UTF8),
            })
            .collect();
        let (micros, fault) = self.beside(row);
        let at = CommittedAt {
            position,
            time: PgTimestamp::from_micros(micros.unwrap_or_default()),
        };
        if let Some(fault) = fault {
            return Err(self.mapper.refused(&values, at, fault));
        }
        let mapped = match row.text(self.mapper.payload_position()) {
            Ok(_) => self.mapper.map_row(&values, at)?,
            // Refuse a payload that is not UTF-8 here, because the mapping would publish NOT_UTF8 as the payload.
            // For every other column the mapping itself reports the fault.
            Err(_) => {
                let column = self.columns[self.mapper.payload_position()].name.clone();
                let fault = EventFault::NotUtf8 { column };
                return Err(self.mapper.refused(&values, at, fault));
            }
        };
        let origin = EventRef::new(at, mapped.event_id);
        Ok(TableEvent {
            topic: mapped.topic,
            ordering_key: mapped.ordering_key,
            event: Event {
                origin,
                message: mapped.message,
            },
        })
    }

    /// Returns the commit time of the row. Also returns a fault if one of the values is too large, or if
    /// PostgreSQL cannot send it.
    fn beside(&self, row: &RowValues) -> (Option<i64>, Option<EventFault>) {
        match row {
            RowValues::Whole(row) => {
                let text = |n| row.try_get(self.columns.len() + n).ok().flatten();
                let micros = text(0).and_then(|text: &str| text.parse().ok());
                let too_large = text(1).map(|column| EventFault::ValueTooLarge {
                    column: column.to_owned(),
                });
                (micros, too_large)
            }
            RowValues::Parts(parts, fault) => {
                let mut times = parts.iter().flatten().map(|part| part.try_get(1));
                let micros = times.find_map(|text| text.ok().flatten()?.parse().ok());
                (micros, fault.clone())
            }
        }
    }
}

/// Hint for a table that has changed while it was read.
pub(crate) const TRY_AGAIN: &str = "the relay tries again by itself; run a failed command again";

/// Maps an error of a statement over a captured table. Returns `slot-busy` if the error shows that the table was
/// altered after it was looked up, or that another table has its name now. The relay retries after this error, and looks
/// the columns up again. If a needed column no longer exists, the retry reports the missing column.
pub(crate) fn altered_since(error: PgError) -> Error {
    match error.code() {
        // The last three occur if a column has a new type, which does not fit the statement's operators and casts.
        Some(
            &SqlState::UNDEFINED_COLUMN
            | &SqlState::UNDEFINED_TABLE
            | &SqlState::UNDEFINED_FUNCTION
            | &SqlState::DATATYPE_MISMATCH
            | &SqlState::CANNOT_COERCE,
        ) => Error::new(
            Code::SlotBusy,
            "a table was altered or renamed while it was read",
        )
        .caused_by(Error::from(error))
        .hint(TRY_AGAIN),
        _ => error.into(),
    }
}
