//! Finds the tables that were partitions of a captured table, or were the captured table itself, and may
//! still have unresolved rows: tables that were detached, moved or renamed.
//!
//! As long as such a table exists, recovery and auditor read it like another captured table, with the
//! identity of the table to which it belonged. The capture record lists these tables
//! (`CaptureRecord::detached`).

use slot_manager::QualifiedName;
use slot_manager::table::{self, FormerPartition};

use super::captured::Captured;
use super::shape::{self, Shape, UnfitColumn};
use super::table::TableReader;
use super::window::{ScanWindow, shown_sql};
use crate::error::{Code, Result};
use crate::mapping::TableSettings;
use crate::postgres::{Snapshot, Sql};
use crate::store::capture_record::{self, CaptureRecord};

/// A table that was part of a captured table.
#[derive(Debug)]
pub(crate) struct DetachedTable {
    /// Index in the settings of the captured table to which it belonged.
    pub(crate) number: usize,
    pub(crate) oid: u32,
    /// Whether running transactions may still write to it through the captured table.
    pub(crate) is_pending: bool,
    pub(crate) state: DetachedState,
}

/// Whether and how the rows of such a table can be read.
#[derive(Debug)]
pub(crate) enum DetachedState {
    /// The table does not exist, or its rows belong to another captured table now.
    Gone,
    Readable(Box<DetachedRows>),
    Unreadable {
        name: QualifiedName,
        why: String,
        /// What the operator has to do.
        remedy: String,
    },
}

/// What is needed to read the rows of such a table.
#[derive(Debug)]
pub(crate) struct DetachedRows {
    pub(crate) settings: TableSettings,
    pub(crate) captured: Captured,
    /// The snapshot `since` of another captured table that now contains this table. The other table publishes
    /// all rows that the snapshot does not show. `None` if there is no such table.
    pub(crate) not_of_another: Option<Snapshot>,
}

impl DetachedRows {
    /// Leaves out the rows that another captured table publishes.
    pub(crate) fn bounded<'a>(&'a self, window: ScanWindow<'a>) -> ScanWindow<'a> {
        ScanWindow {
            not_of_another: self.not_of_another.as_ref(),
            ..window
        }
    }

    /// The condition that no other captured table publishes a row of `e`; `None` for all rows.
    pub(crate) fn not_of_another_sql(&self) -> Option<String> {
        let snapshot = self.not_of_another.as_ref()?;
        Some(shown_sql(&self.captured, snapshot))
    }
}

impl DetachedTable {
    /// The rows, if they can be read.
    pub(crate) fn rows(&self) -> Option<&DetachedRows> {
        match &self.state {
            DetachedState::Readable(rows) => Some(rows),
            DetachedState::Gone | DetachedState::Unreadable { .. } => None,
        }
    }

    /// The name of the table, why its rows cannot be read, and the remedy; `None` if they can be read.
    pub(crate) fn unreadable(&self) -> Option<(&QualifiedName, &str, &str)> {
        match &self.state {
            DetachedState::Unreadable { name, why, remedy } => Some((name, why, remedy)),
            DetachedState::Gone | DetachedState::Readable(_) => None,
        }
    }

    /// Logs that the rows cannot be read.
    pub(crate) fn warn_if_unreadable(&self) {
        if let Some((name, why, remedy)) = self.unreadable() {
            tracing::warn!(
                table = %name, hint = remedy,
                "rows of a detached partition may be unpublished, and the relay cannot read them: {why}"
            );
        }
    }
}

/// Finds the former partitions of the captured tables, each with the rows to read.
///
/// # Errors
/// Errors of a statement.
pub(crate) async fn find(
    sql: &Sql,
    tables: &[TableSettings],
    captured: &[Captured],
) -> Result<Vec<DetachedTable>> {
    let mut detached = Vec::new();
    for (number, (settings, captured)) in tables.iter().zip(captured).enumerate() {
        let oids = captured
            .record
            .former_partitions(&captured.shape.partitions);
        if oids.is_empty() {
            continue;
        }
        let exist = table::former_partitions(sql, &oids).await?;
        let records = capture_record::read(&**sql).await?;
        for oid in oids {
            let found = exist.iter().find(|found| found.oid == oid);
            let state = match found {
                Some(found) => state(sql, settings, captured, found, &records).await?,
                None => DetachedState::Gone,
            };
            detached.push(DetachedTable {
                number,
                oid,
                is_pending: found.is_some_and(|found| found.is_pending),
                state,
            });
        }
    }
    Ok(detached)
}

async fn state(
    sql: &Sql,
    settings: &TableSettings,
    captured: &Captured,
    found: &FormerPartition,
    records: &[CaptureRecord],
) -> Result<DetachedState> {
    let identity = &captured.record.identity;
    let owner = records
        .iter()
        .find(|record| record.identity != *identity && found.within.contains(&record.oid));
    let not_of_another = owner.and_then(|owner| owner.since.clone());
    if owner.is_some() && not_of_another.is_none() {
        return Ok(DetachedState::Gone);
    }
    let unreadable = |why: String, remedy: String| DetachedState::Unreadable {
        name: found.name.clone(),
        why,
        remedy,
    };
    if let Some(needs) = &found.needs {
        let why = format!("the right to read {} is missing", found.name);
        return Ok(unreadable(why, format!("{needs}, or drop the table")));
    }
    let settings = TableSettings {
        table: found.name.clone(),
        ..settings.clone()
    };
    match readable(sql, &settings, captured, found).await {
        Ok(Some(captured)) => Ok(DetachedState::Readable(Box::new(DetachedRows {
            settings,
            captured,
            not_of_another,
        }))),
        Ok(None) => Ok(DetachedState::Gone),
        Err(error) if matches!(error.code(), Code::ColumnMissing | Code::SettingInvalid) => {
            let remedy = format!(
                "give {} the columns of {}, or drop it",
                found.name, captured.record.table
            );
            Ok(unreadable(error.what().to_owned(), remedy))
        }
        Err(error) => Err(error),
    }
}

/// Reads the shape of the table, with the column that numbers the rows of the captured table, if it has that
/// column. On a partition, the catalog does not say that an identity column of the captured table fills it.
async fn shape_of(sql: &Sql, settings: &TableSettings, of: &Captured) -> Result<Option<Shape>> {
    let mut numbered = settings.clone();
    if let Some(seq) = &of.shape.seq {
        numbered.columns.seq = Some(seq.column.clone());
    }
    match shape::read(sql, &numbered).await {
        Err(error) if error.code() == Code::ColumnMissing => shape::read(sql, settings).await,
        shape => shape,
    }
}

/// Describes the table, and checks that its rows can be mapped. Returns `None` if it is gone.
async fn readable(
    sql: &Sql,
    settings: &TableSettings,
    of: &Captured,
    found: &FormerPartition,
) -> Result<Option<Captured>> {
    let Some(mut shape) = shape_of(sql, settings, of).await? else {
        return Ok(None);
    };
    let record = &of.record;
    // Rows that were inserted through the captured table have a value, even if the partition itself has
    // no default.
    if record.has_inserted_xid && shape.unfit_inserted_xid == Some(UnfitColumn::Value) {
        (shape.has_inserted_xid, shape.unfit_inserted_xid) = (true, None);
    }
    let id_suffixes = if record.id_suffixes.knows(found.oid) {
        record.id_suffixes.clone()
    } else {
        record.id_suffixes.with_copy(shape.oid, record.oid)
    };
    let floor = record.unread.get(&found.oid).copied();
    let captured = Captured {
        record: CaptureRecord {
            table: settings.table.clone(),
            oid: shape.oid,
            floor: floor.unwrap_or(record.floor).min(record.floor),
            floor_seq: None,
            numbering: None,
            partitions: Some(shape.partitions.clone()),
            id_suffixes,
            ..record.clone()
        },
        shape,
    };
    TableReader::resolve(sql, settings, "none", &captured).await?;
    Ok(Some(captured))
}
