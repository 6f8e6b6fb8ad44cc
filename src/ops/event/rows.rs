//! Finds the rows with a given id in the captured tables and in former tables.

use slot_manager::QualifiedName;
use tokio_postgres::error::SqlState;
use uuid::Uuid;

use super::EventTableRow;
use crate::capture::claim::{self, Captured};
use crate::capture::detached;
use crate::capture::table::{TableReader, altered_since, inserted_xid_text};
use crate::error::{Code, Error, Result};
use crate::mapping::TableSettings;
use crate::ops::walk;
use crate::postgres::Sql;
use crate::settings::Settings;

/// Maximum number of rows that the search returns per table. A table can contain the same id more than
/// once if the id is not its primary key.
const ROWS_SHOWN: usize = 20;

/// A captured table or a former table, and the reader of its rows.
pub(super) struct SearchedTable {
    pub(super) name: QualifiedName,
    pub(super) captured: Captured,
    pub(super) reader: TableReader,
}

/// A row with the id that was searched for.
pub(super) struct FoundRow {
    /// The index of the table in the caller's list of tables.
    pub(super) table: usize,
    pub(super) event_id: Uuid,
    pub(super) name: String,
    pub(super) row: EventTableRow,
    pub(super) is_ours: bool,
    pub(super) is_uncompared: bool,
    pub(super) xid: u64,
}

/// Prepares the search in all captured tables.
///
/// # Errors
/// Errors of `claim::as_if_claimed` and of [`TableReader::resolve`].
pub(super) async fn all(sql: &Sql, settings: &Settings) -> Result<Vec<SearchedTable>> {
    let captured =
        claim::as_if_claimed(sql, &settings.slot, &settings.tables, settings.start).await?;
    let mut tables = Vec::new();
    for (table, captured) in settings.tables.iter().zip(captured) {
        tables.push(SearchedTable::new(sql, settings, table, captured).await?);
    }
    Ok(tables)
}

/// Prepares the search in one captured table: the table at the index `number` of `Settings::tables`. Needs no lock on
/// the other tables, and no right to read them.
///
/// # Errors
/// The errors of [`all`].
pub(super) async fn one(sql: &Sql, settings: &Settings, number: usize) -> Result<SearchedTable> {
    let tables = &settings.tables;
    let captured =
        claim::one_as_if_claimed(sql, &settings.slot, tables, number, settings.start).await?;
    SearchedTable::new(sql, settings, &tables[number], captured).await
}

/// The former tables: detached partitions, and tables that a captured table has replaced (`capture::detached`). The row
/// of a recorded event may be in one of them.
pub(super) struct SearchedFormerTables {
    pub(super) tables: Vec<SearchedTable>,
    /// The tables that our role cannot read, each with the remedy.
    pub(super) unreadable: Vec<String>,
}

/// Prepares the search in former tables. `searched` are the captured tables, which were searched before.
///
/// # Errors
/// The errors of [`all`].
pub(super) async fn former(
    sql: &Sql,
    settings: &Settings,
    searched: &[SearchedTable],
) -> Result<SearchedFormerTables> {
    let configured = |of: &SearchedTable| {
        let mut tables = settings.tables.iter();
        tables.find(|table| table.table == of.name).cloned()
    };
    let (tables, captured): (Vec<TableSettings>, Vec<Captured>) = searched
        .iter()
        .filter_map(|of| Some((configured(of)?, of.captured.clone())))
        .unzip();
    let mut former = SearchedFormerTables {
        tables: Vec::new(),
        unreadable: Vec::new(),
    };
    for table in detached::find_all(sql, &tables, &captured).await? {
        // `find_all` takes every captured table that is not in `tables` for one that the settings no longer name. If only
        // some of the configured tables were searched, leave out the others.
        let is_configured =
            |name: &QualifiedName| settings.tables.iter().any(|one| one.table == *name);
        if let Some((name, _, remedy)) = table.unreadable()
            && !is_configured(name)
        {
            former.unreadable.push(format!("{name}: {remedy}"));
        }
        if let Some(rows) = table.rows() {
            let (table, captured) = (&rows.settings, rows.captured.clone());
            let table = SearchedTable::new(sql, settings, table, captured).await?;
            former.tables.push(table);
        }
    }
    Ok(former)
}

impl SearchedTable {
    async fn new(
        sql: &Sql,
        settings: &Settings,
        table: &TableSettings,
        captured: Captured,
    ) -> Result<Self> {
        let project = settings.project().unwrap_or("none");
        let reader = TableReader::resolve(sql, table, project, &captured).await?;
        Ok(Self {
            name: table.table.clone(),
            captured,
            reader,
        })
    }

    /// Returns rows that have this id, at most [`ROWS_SHOWN`]. `n` is the value for [`FoundRow::table`].
    ///
    /// # Errors
    /// `postgres-timeout` if the search takes too long; database errors.
    pub(super) async fn rows(&self, sql: &Sql, n: usize, id: &str) -> Result<Vec<FoundRow>> {
        if self.reader.source_prefix().is_none() && Uuid::parse_str(id).is_err() {
            return Ok(Vec::new());
        }
        let statement = format!(
            "select {event_id}, {name}, {seq}::bigint, {inserted}, \
                 to_char({at} at time zone 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.MS\"Z\"'), \
                 {ours}, {uncompared}, ({xid})::text \
             from {rows} and ({has_id}) limit {ROWS_SHOWN}",
            event_id = self.reader.event_id_sql(),
            name = self.reader.name_sql(),
            seq = self.reader.seq_sql().unwrap_or("null"),
            inserted = inserted_xid_text(&self.captured),
            at = self
                .reader
                .happened_at_sql()
                .unwrap_or_else(|| "null::timestamptz".to_owned()),
            ours = walk::ours_sql(&self.captured),
            uncompared = walk::uncompared_sql(&self.captured),
            xid = self.captured.inserted_xid_sql(),
            rows = self.reader.rows_sql(),
            has_id = self.reader.has_id_sql(id),
        );
        let rows = match sql.query_typed(&statement, &[]).await {
            Ok(rows) => rows,
            // The id has the wrong type for this table, such as text instead of a number, so no row has it.
            Err(error) if is_of_another_type(&error) => return Ok(Vec::new()),
            Err(error) if error.code() == Some(&SqlState::QUERY_CANCELED) => {
                let what = format!("searching {} for the id took too long", self.name);
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
                table: self.name.to_string(),
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
}

fn is_of_another_type(error: &tokio_postgres::Error) -> bool {
    error
        .code()
        .is_some_and(|code| code.code().starts_with("22"))
}
