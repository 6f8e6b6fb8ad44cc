//! Reads a sample of a table's rows. `mapping` checks the settings of the table with this sample.
//!
//! The sample has three parts, none of which contains a payload:
//!
//! - the rows with the highest ids, which are the newest rows if the ids grow with each insert; or any rows if
//!   PostgreSQL cannot sort the ids;
//! - the first of the rows that wait for delivery, because an old row may block the relay;
//! - the topics of the waiting rows, up to a limit, because the topic of a later row may be missing.

use std::collections::HashMap;

use decoder::{OwnedRelation, Value};
use slot_manager::quoted_identifier;
use tokio_postgres::Row;

use crate::capture::ScanWindow;
use crate::capture::claim::Captured;
use crate::capture::table::{self, TableReader};
use crate::mapping::{Mapper, TableSettings};
use crate::postgres::Sql;
use crate::store::dispatch::has_no_row_sql;

/// Maximum number of newest rows, and also of waiting rows. Enough to include every usual kind of event.
const SAMPLE: usize = 500;

/// Maximum number of combinations of values in the columns that determine the topic.
const TOPICS: usize = 200;

/// Statement timeout for reading the sample. It is short because the sample is optional, and sorting a
/// large table whose id has no index would take too long.
const SAMPLE_TIMEOUT: &str = "set statement_timeout = '2s'";

/// A sample of a table's rows.
#[derive(Debug, Default)]
pub(super) struct TableSample {
    pub(super) rows: Vec<SampledRow>,
    /// Rows with only the columns that determine the topic. There is one row for each combination of values that
    /// occurs among the waiting rows.
    pub(super) topics: Vec<SampledRow>,
    /// The error that prevented reading the waiting rows; `None` if they were read.
    pub(super) waiting_unread: Option<tokio_postgres::Error>,
}

/// One row, with its values as text.
#[derive(Debug)]
pub(super) struct SampledRow {
    row: Row,
    columns: usize,
    /// Whether the event of the row waits for delivery.
    pub(super) waits: bool,
}

impl SampledRow {
    /// The values, in the order of the table's description.
    pub(super) fn values(&self) -> Vec<Value<'_>> {
        let value = |n| match self.row.try_get(n) {
            Ok(Some(text)) => Value::Text(str::as_bytes(text)),
            Ok(None) => Value::Null,
            Err(_) => Value::Text(table::NOT_UTF8),
        };
        (0..self.columns).map(value).collect()
    }
}

/// A table from which a sample is read.
pub(super) struct SampledTable<'a> {
    sql: &'a Sql,
    relation: &'a OwnedRelation,
    settings: &'a TableSettings,
    mapper: &'a Mapper,
    /// Two parts of an SQL statement: the condition that the row `e` waits for delivery, and the `order by`
    /// for such rows. `None` if it is unknown which rows wait.
    waiting: Option<(String, String)>,
}

impl<'a> SampledTable<'a> {
    /// `captured` is the table with its capture record, if that is known.
    pub(super) async fn new(
        sql: &'a Sql,
        relation: &'a OwnedRelation,
        settings: &'a TableSettings,
        mapper: &'a Mapper,
        captured: Option<&Captured>,
    ) -> Self {
        let waiting = match captured {
            Some(captured) => waiting(sql, settings, captured).await,
            None => None,
        };
        Self {
            sql,
            relation,
            settings,
            mapper,
            waiting,
        }
    }

    /// Reads the sample.
    ///
    /// # Errors
    /// The time limit cannot be set, or the statement that reads the newest rows fails.
    pub(super) async fn read(mut self) -> Result<TableSample, tokio_postgres::Error> {
        let mut sample = TableSample::default();
        self.sql.batch_execute(SAMPLE_TIMEOUT).await?;
        let mut rows = HashMap::new();
        match self.first_waiting().await {
            Ok(waiting) => rows.extend(waiting),
            Err(error) => {
                sample.waiting_unread = Some(error);
                self.waiting = None;
            }
        }
        match self.topics_of_waiting().await {
            Ok(topics) => sample.topics = topics,
            Err(error) => sample.waiting_unread = Some(error),
        }
        rows.extend(self.newest().await?);
        sample.rows = rows.into_values().collect();
        Ok(sample)
    }

    /// Returns the newest rows, each with its table OID and `ctid` as one text.
    async fn newest(&self) -> Result<Vec<(String, SampledRow)>, tokio_postgres::Error> {
        let known = self.mapper.table_columns();
        let order = if known.id_has_order {
            format!("order by e.{} desc", quoted_identifier(known.id))
        } else {
            String::new()
        };
        let waits = self.waiting.as_ref().map_or("false", |(waits, _)| waits);
        self.rows(waits, &format!("{order} limit {SAMPLE}")).await
    }

    /// Returns the first waiting rows, each with its table OID and `ctid` as one text.
    async fn first_waiting(&self) -> Result<Vec<(String, SampledRow)>, tokio_postgres::Error> {
        match &self.waiting {
            Some((waits, order)) => {
                let end = format!("where {waits} {order} limit {SAMPLE}");
                self.rows("true", &end).await
            }
            None => Ok(Vec::new()),
        }
    }

    /// Reads rows, each with its table OID and `ctid` as one text, which identifies the row. `waits` is the SQL
    /// condition that the row `e` waits for delivery. `end` is the rest of the statement, which selects the rows.
    async fn rows(
        &self,
        waits: &str,
        end: &str,
    ) -> Result<Vec<(String, SampledRow)>, tokio_postgres::Error> {
        let statement = format!(
            "select {}, coalesce(({waits}), false), e.tableoid::text || e.ctid::text from {} e {end}",
            self.values(None),
            self.settings.table
        );
        let rows = self.sql.query(&statement, &[]).await?;
        let columns = self.relation.columns.len();
        let row = |row: Row| {
            let place = row.get(columns + 1);
            let waits = row.get(columns);
            (
                place,
                SampledRow {
                    row,
                    columns,
                    waits,
                },
            )
        };
        Ok(rows.into_iter().map(row).collect())
    }

    async fn topics_of_waiting(&self) -> Result<Vec<SampledRow>, tokio_postgres::Error> {
        let used = self.mapper.topic_columns();
        let Some((waits, _)) = self.waiting.as_ref().filter(|_| !used.is_empty()) else {
            return Ok(Vec::new());
        };
        let statement = format!(
            "select distinct {} from {} e where {waits} limit {TOPICS}",
            self.values(Some(&used)),
            self.settings.table
        );
        let rows = self.sql.query(&statement, &[]).await?;
        let columns = self.relation.columns.len();
        let row = |row| SampledRow {
            row,
            columns,
            waits: true,
        };
        Ok(rows.into_iter().map(row).collect())
    }

    /// Returns SQL expressions for the values of the row `e` as text, in the order of the table's description.
    /// Without `used`, the payload is null. With `used`, all columns except those in `used` are null.
    fn values(&self, used: Option<&[usize]>) -> String {
        let payload = self.settings.columns.payload.as_deref();
        let payload = payload.unwrap_or("payload");
        let columns = self.relation.columns.iter().enumerate();
        let values: Vec<String> = columns
            .map(|(n, column)| {
                let is_read = used.map_or(column.name != payload, |used| used.contains(&n));
                if !is_read {
                    return "null::text".to_owned();
                }
                // `format` prints values as the stream sends them. A cast to text prints some types
                // differently.
                let name = quoted_identifier(&column.name);
                // Do not use `is not null`, which is false for a composite value that contains a null.
                format!("case when e.{name} is distinct from null then format('%s', e.{name}) end")
            })
            .collect();
        values.join(", ")
    }
}

/// Returns two parts of an SQL statement: the condition that the row `e` waits for delivery, and the `order
/// by` for such rows.
async fn waiting(
    sql: &Sql,
    settings: &TableSettings,
    captured: &Captured,
) -> Option<(String, String)> {
    let window = ScanWindow::recent(captured);
    // Only topic names contain the project, and the condition uses no topics, so any project will do.
    let reader = TableReader::resolve(sql, settings, "none", captured).await;
    let reader = reader.ok()?;
    let id = reader.event_id_sql();
    let mut waits = format!(
        "{} and {id} is not null and {}",
        window.condition(),
        has_no_row_sql(id)
    );
    let seq = captured.shape.seq.as_ref().filter(|seq| seq.is_indexed);
    let Some(seq) = seq else {
        return Some((waits, String::new()));
    };
    let seq = format!("e.{}", quoted_identifier(&seq.column));
    if let Some(from) = window.from_seq {
        waits = format!("{seq} > {from} and {waits}");
    }
    Some((waits, format!("order by {seq}")))
}
