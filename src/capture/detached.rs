//! Finds former tables. A former table was a partition of a captured table, or the captured table itself, until
//! it was detached, moved or renamed. Its rows keep the identity of the captured table to which they belonged.
//!
//! - As long as such a table may have unresolved rows, the recovery and the auditor read it like a captured table
//!   (`CaptureRecord::detached`).
//! - Once all its rows have an outcome, the table is *settled* (`CaptureRecord::settled`). The relay no longer
//!   reads all its rows, but looks up single rows there: the rows of events in quarantine that an operator
//!   releases, and the rows of old records before it deletes the records.
//! - A *displaced* table has a capture record, but the settings no longer name it, or another captured table has its
//!   name. The relay treats it like a settled table, although some of its rows may have no outcome.

mod settled;

use decoder::Lsn;
use slot_manager::QualifiedName;
use slot_manager::table::{self, FormerPartition};

pub(crate) use self::settled::{find_all, find_settled, former_oids};
use super::captured::Captured;
use super::shape::{self, Shape, UnfitColumn};
use super::table::{TRY_AGAIN, TableReader};
use super::window::{ScanWindow, shown_sql};
use crate::error::{Code, Error, Result};
use crate::mapping::TableSettings;
use crate::postgres::{Snapshot, Sql};
use crate::store::capture_record::{self, CaptureRecord};

/// A former table (detached, settled or displaced).
#[derive(Debug)]
pub(crate) struct DetachedTable {
    /// The captured table to which this table belonged, as an index into `Settings::tables`. 0 for a displaced table
    /// that the settings no longer name.
    pub(crate) number: usize,
    pub(crate) oid: u32,
    /// Whether running transactions may still write to this table through the captured table.
    pub(crate) is_pending: bool,
    /// Whether the table is a partition of a table that is not captured, usually because the settings no longer name
    /// the parent.
    pub(crate) is_uncaptured: bool,
    /// False for a displaced table that the settings no longer name.
    pub(crate) is_in_settings: bool,
    /// For a settled table: a position in the WAL after the commits of all its rows. For a displaced table: the highest
    /// position. `None` if audits and recoveries still read the table.
    pub(crate) settled: Option<Lsn>,
    pub(crate) state: DetachedState,
}

/// Whether and how the rows of a detached table can be read.
#[derive(Debug)]
pub(crate) enum DetachedState {
    /// The table does not exist, or all its rows are published through another captured table.
    Gone,
    Readable(Box<DetachedRows>),
    Unreadable {
        name: QualifiedName,
        why: String,
        /// What the operator has to do.
        remedy: String,
    },
}

/// A detached table whose rows can be read: the settings by which its rows are mapped, and the bounds of the rows that
/// may be unresolved.
#[derive(Debug)]
pub(crate) struct DetachedRows {
    pub(crate) settings: TableSettings,
    pub(crate) captured: Captured,
    /// Set if another captured table now contains this table: the snapshot with which the capture of that table
    /// began. Rows that are not visible in this snapshot are published through that table.
    pub(crate) not_of_another: Option<Snapshot>,
}

impl DetachedRows {
    /// Returns the window without the rows that are published through another captured table.
    pub(crate) fn bounded<'a>(&'a self, window: ScanWindow<'a>) -> ScanWindow<'a> {
        ScanWindow {
            not_of_another: self.not_of_another.as_ref(),
            ..window
        }
    }

    /// The condition that a row of `e` is not published through another captured table. `None` if no row is
    /// published through another table.
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

    /// The name of the table, why its rows cannot be read, and the remedy. `None` if they can be read or if
    /// the table is gone.
    pub(crate) fn unreadable(&self) -> Option<(&QualifiedName, &str, &str)> {
        match &self.state {
            DetachedState::Unreadable { name, why, remedy } => Some((name, why, remedy)),
            DetachedState::Gone | DetachedState::Readable(_) => None,
        }
    }

    /// Logs a warning if the rows cannot be read.
    pub(crate) fn warn_if_unreadable(&self) {
        if let Some((name, why, remedy)) = self.unreadable() {
            tracing::warn!(
                table = %name, hint = remedy,
                "rows of a former table may be unpublished, and the relay cannot read them: {why}"
            );
        }
    }
}

/// Finds the former tables that may have unresolved rows, each with the rows to read.
///
/// # Errors
/// Database errors.
pub(crate) async fn find(
    sql: &Sql,
    tables: &[TableSettings],
    captured: &[Captured],
) -> Result<Vec<DetachedTable>> {
    let owners = owners(sql, captured).await?;
    let mut detached = Vec::new();
    for (number, (settings, one)) in tables.iter().zip(captured).enumerate() {
        let oids = unresolved_of(one).into_iter().map(|oid| (oid, None));
        detached.extend(describe(sql, (number, settings, one), &owners, oids.collect()).await?);
    }
    Ok(detached)
}

fn unresolved_of(captured: &Captured) -> Vec<u32> {
    let Captured { record, shape } = captured;
    record.former_partitions(&shape.partitions)
}

/// Describes former tables of one captured table. `tables` has their OIDs, and for a settled table the position
/// at which it was settled.
async fn describe(
    sql: &Sql,
    (number, settings, captured): (usize, &TableSettings, &Captured),
    owners: &[CaptureRecord],
    tables: Vec<(u32, Option<Lsn>)>,
) -> Result<Vec<DetachedTable>> {
    if tables.is_empty() {
        return Ok(Vec::new());
    }
    let oids: Vec<u32> = tables.iter().map(|(oid, _)| *oid).collect();
    let exist = table::former_partitions(sql, &oids).await?;
    let mut described = Vec::with_capacity(tables.len());
    for (oid, settled) in tables {
        let found = exist.iter().find(|found| found.oid == oid);
        let owner = found.and_then(|found| other_owner(captured, found, owners));
        // A scan leaves out the rows that another captured table publishes, so that they are not published twice.
        // Nothing scans a settled table: the relay looks up single rows there, and must find these rows too.
        let owner_of_rows = owner.filter(|_| settled.is_none());
        let state = match found {
            Some(found) => state(sql, settings, captured, found, owner_of_rows).await?,
            None => DetachedState::Gone,
        };
        described.push(DetachedTable {
            number,
            oid,
            is_pending: found.is_some_and(|found| found.is_pending),
            is_uncaptured: found.is_some_and(|found| {
                let is_attached = found.within.iter().any(|table| *table != oid);
                is_attached && owner.is_none()
            }),
            is_in_settings: true,
            settled,
            state,
        });
    }
    Ok(described)
}

/// Reads the capture records of the tables whose rows are published: the captured tables, and those of other slots.
async fn owners(sql: &Sql, captured: &[Captured]) -> Result<Vec<CaptureRecord>> {
    let mut records = capture_record::read(&**sql).await?;
    records.retain(|record| !is_displaced(record, captured));
    Ok(records)
}

/// Whether nobody publishes the rows of the record's table: the record belongs to the slot of the `captured` tables,
/// but to none of them.
fn is_displaced(record: &CaptureRecord, captured: &[Captured]) -> bool {
    let is_of_slot = captured.iter().any(|one| one.record.slot == record.slot);
    let is_captured = |one: &Captured| one.record.identity == record.identity;
    is_of_slot && !captured.iter().any(is_captured)
}

/// Returns the record of another captured table that now contains this table.
fn other_owner<'r>(
    captured: &Captured,
    found: &FormerPartition,
    owners: &'r [CaptureRecord],
) -> Option<&'r CaptureRecord> {
    let identity = &captured.record.identity;
    let mut records = owners.iter();
    records.find(|record| record.identity != *identity && found.within.contains(&record.oid))
}

async fn state(
    sql: &Sql,
    settings: &TableSettings,
    captured: &Captured,
    found: &FormerPartition,
    owner: Option<&CaptureRecord>,
) -> Result<DetachedState> {
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
    let readable = readable(sql, &settings, captured, found).await;
    if !matches!(readable, Ok(Some(_))) {
        refuse_renamed(sql, found, readable.is_err()).await?;
    }
    match readable {
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

/// Returns an error if a partition was detached since `before`, even if it was attached again, or if the table
/// itself was renamed or replaced. A scan of the table may then have missed rows.
///
/// # Errors
/// `slot-busy` when rows may be missing; database errors.
pub(crate) async fn refuse_detached(
    sql: &Sql,
    settings: &TableSettings,
    before: &Shape,
) -> Result<()> {
    let now = shape::read(sql, settings).await?;
    let is_back = now
        .as_ref()
        .is_some_and(|now| now.was_attached_again_since(before));
    let left: Vec<u32> = before
        .leaves()
        .filter(|leaf| {
            now.as_ref()
                .is_none_or(|now| now.leaves().all(|n| n != *leaf))
        })
        .collect();
    // Ignore dropped partitions: their rows are gone.
    let is_left = !left.is_empty() && !table::former_partitions(sql, &left).await?.is_empty();
    if !is_left && !is_back {
        return Ok(());
    }
    let what = format!(
        "a partition of {} was detached, or the table was replaced, while the relay read it",
        settings.table
    );
    Err(Error::new(Code::SlotBusy, what).hint("no action needed: the relay reads it again"))
}

/// Reads the shape of the detached table, with the same `seq` column as the captured table, if the detached table has
/// this column.
///
/// The `seq` column of the captured table may be its id column: see `shape`. The relay uses an id column only if a
/// sequence fills it. In a detached table, the catalogue does not show such a sequence, because the sequence of an
/// identity column belongs to the captured table. So this function names the `seq` column in the settings.
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

/// Returns an error if the detached table still exists, but could not be read under its name. Otherwise it would count
/// as dropped, and its rows would never be read again. `has_name` says whether a table was found under the name: then
/// this function returns an error only if the detached table has another name now.
///
/// # Errors
/// `slot-busy` when the table was renamed; database errors.
async fn refuse_renamed(sql: &Sql, found: &FormerPartition, has_name: bool) -> Result<()> {
    let now = table::former_partitions(sql, &[found.oid]).await?;
    let is_renamed = |now: &FormerPartition| !has_name || now.name != found.name;
    if now.iter().any(is_renamed) {
        return Err(renamed(found));
    }
    Ok(())
}

fn renamed(found: &FormerPartition) -> Error {
    let what = format!("{} was renamed while it was looked up", found.name);
    Error::new(Code::SlotBusy, what).hint(TRY_AGAIN)
}

/// Describes the detached table, and checks that its rows can be mapped. Returns `None` if the table is
/// gone.
async fn readable(
    sql: &Sql,
    settings: &TableSettings,
    of: &Captured,
    found: &FormerPartition,
) -> Result<Option<Captured>> {
    let Some(mut shape) = shape_of(sql, settings, of).await? else {
        return Ok(None);
    };
    if shape.oid != found.oid {
        return Err(renamed(found));
    }
    let record = &of.record;
    // Rows that were inserted through the captured table have a value in `inserted_xid`, even if the
    // partition itself has no default for that column. So the column counts as filled.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capture::claim::tests::{found, record};

    fn captured(identity: &str, oid: u32) -> Captured {
        Captured {
            record: record(identity, identity, oid),
            shape: found(identity, oid).shape,
        }
    }

    #[test]
    fn only_a_table_of_our_slot_that_is_not_captured_is_displaced() {
        let tables = [captured("a.first", 1), captured("a.last", 2)];
        let displaced = record("a.displaced", "a.displaced", 3);
        let of_other_slot = CaptureRecord {
            slot: "another".into(),
            ..displaced.clone()
        };
        assert!(is_displaced(&displaced, &tables));
        assert!(!is_displaced(&of_other_slot, &tables));
        assert!(!is_displaced(&displaced, &[]));
        for table in &tables {
            assert!(!is_displaced(&table.record, &tables));
        }
    }
}
