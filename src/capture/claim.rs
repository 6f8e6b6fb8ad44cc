//! Matches capture records with tables, and decides whether this relay may capture a table.
//!
//! - The relay recognises a table by its OID, so a rename or `SET SCHEMA` changes nothing.
//! - If no record has the OID, the name decides (`by_name`). So a table keeps its record if it was dropped and created
//!   again, restored or swapped. `replaced` decides whether the new table is a copy of the old one.
//! - Suppose a captured table was renamed to another configured name, and a new table got its earlier name. The
//!   renamed table keeps its record, because it keeps its OID. The new table gets a record of its own, which begins
//!   with the same `since` and `floor` (`new_record`).
//! - If the settings name another table of the same partition tree, that table takes over the record of the
//!   earlier table (`relatives`).
//! - The relay refuses a table whose rows another slot captures (`owner`).
//!
//! Only the functions that take an SQL session do IO.

mod by_name;
mod new_record;
mod noted_partitions;
mod owner;
mod relatives;
mod replaced;
mod stale;

use decoder::Lsn;
use slot_manager::{QualifiedName, SlotName, table};

use self::by_name::{known_by_name, latest};
pub(crate) use self::new_record::identity_of_first;
use self::new_record::new_record;
pub(crate) use self::noted_partitions::note_partitions;
pub(crate) use self::owner::{
    refuse_attached, refuse_others, refuse_partial_overlap, with_partitions,
};
pub(crate) use self::relatives::has_taken_over;
pub(crate) use self::stale::{refuse_current, refuse_replaced};
pub(crate) use super::captured::Captured;
use super::shape::{self, FoundTable};
use super::tops::{self, Top, Tops};
use crate::error::{Code, Error, Result};
use crate::mapping::TableSettings;
use crate::postgres::{Snapshot, Sql, current_snapshot};
use crate::settings::Start;
use crate::store::capture_record::{self, CaptureRecord};

/// The input of [`claim`]: the tables, and how the capture of new tables begins.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CaptureStart<'a> {
    pub(crate) start: Start,
    /// The configured tables.
    pub(crate) tables: &'a [TableSettings],
    /// Fingerprint of the publication.
    pub(crate) publication: &'a str,
    /// Whether no relay has completed its first start with the slot. If so, `start = all` applies even to tables
    /// that already have a record, because the command that wrote the record may have had another setting.
    pub(crate) is_first: bool,
    /// The position at which the slot begins, if a command has just created the slot. The new capture records
    /// contain this position.
    pub(crate) since_lsn: Option<Lsn>,
    /// The moment when the capture of new tables begins; `None` means now.
    pub(crate) moment: Option<&'a CaptureMoment>,
    /// Whether the caller is a session. If a table takes over the record of an earlier table, a session changes
    /// the record and starts a recovery. A command leaves the record unchanged, so that the next session sees the
    /// earlier table in the record and starts the recovery.
    pub(crate) is_session: bool,
}

/// The moment when the capture of new tables begins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CaptureMoment {
    /// A row that is visible in this snapshot was committed before capturing began.
    pub(crate) since: Snapshot,
    /// The highest `seq` of each table, read before the snapshot was taken.
    pub(crate) tops: Tops,
}

impl CaptureMoment {
    async fn now(sql: &Sql, found: &[FoundTable]) -> Result<Self> {
        let tops = tops::tops(sql, found).await?;
        let since = current_snapshot(&**sql).await?;
        Ok(Self { since, tops })
    }

    /// Returns the highest `seq` of the table at index `n`. A scan may skip the rows up to this `seq`, because they
    /// were committed before capturing began.
    ///
    /// Returns `None` if no `seq` is known, or if a transaction was open all the time from the reading of the `seq` to
    /// the snapshot `since`. Such a transaction may commit rows with a lower `seq` later, and a scan would skip them.
    fn top(&self, n: usize) -> Option<&Top> {
        let have_ended = self.since.xmin() >= self.tops.next_xid;
        self.tops.seqs.get(n)?.as_ref().filter(|_| have_ended)
    }
}

/// Looks up the configured tables in the catalogue.
///
/// # Errors
/// `publication-drift` when a table is missing; `column-missing`; database errors.
pub(crate) async fn find_tables(sql: &Sql, tables: &[TableSettings]) -> Result<Vec<FoundTable>> {
    let mut found = Vec::with_capacity(tables.len());
    for settings in tables {
        let table = settings.table.clone();
        let shape = shape::read(sql, settings).await?.ok_or_else(|| {
            Error::new(Code::PublicationDrift, format!("there is no table {table}"))
        })?;
        found.push(FoundTable { table, shape });
    }
    Ok(found)
}

/// Returns the record of each table, in the order of `found`, and `None` for a table that is not captured
/// yet. A table without a record takes over the record of an earlier table of `slot` that shares rows with it.
pub(crate) fn matched<'r>(
    found: &[FoundTable],
    records: &'r [CaptureRecord],
    slot: &SlotName,
) -> Vec<Option<&'r CaptureRecord>> {
    let mut known = known_by_name(found, records);
    for (n, found) in found.iter().enumerate() {
        if known[n].is_none() {
            let earlier = relatives::of(found, &known, records, slot);
            known[n] = earlier.first().copied();
        }
    }
    known
}

/// Returns the value of `start` that applies. The first relay of a slot also publishes the old rows if
/// `init` or `slot create` recorded `start = all` for any table, even if `setting` is `new`.
pub(crate) fn start(setting: Start, is_first: bool, known: &[Option<&CaptureRecord>]) -> Start {
    let wants_all = known.iter().flatten().any(|known| known.since.is_none());
    if is_first && wants_all {
        Start::All
    } else {
        setting
    }
}

/// Reads the records of the tables, brings them up to date, and adds records for tables that are
/// captured from now on.
///
/// # Errors
/// `table-captured`; `schema-missing`; database errors.
pub(crate) async fn claim(
    sql: &Sql,
    slot: &SlotName,
    found: Vec<FoundTable>,
    begin: CaptureStart<'_>,
    instance: &str,
) -> Result<Vec<Captured>> {
    let CaptureStart {
        start,
        publication,
        is_first,
        since_lsn,
        tables,
        moment,
        is_session,
    } = begin;
    let records = capture_record::read(&**sql).await?;
    let known = matched(&found, &records, slot);
    refuse_others(&found, &records, slot)?;
    // Insert the new records first. A new record may continue the record of a renamed table. `new_record` finds that
    // record by the table's earlier name, which `bring_up_to_date` overwrites. If `bring_up_to_date` ran first, a
    // crash before the insert would lose the name.
    if known.iter().any(Option::is_none) {
        let moment = match moment {
            Some(moment) => moment,
            None => &CaptureMoment::now(sql, &found).await?,
        };
        // Tables without a record, with their indexes in `found`.
        let new = found.iter().zip(&known).enumerate();
        let new: Vec<(usize, &FoundTable)> = new
            .filter(|(_, (_, known))| known.is_none())
            .map(|(n, (found, _))| (n, found))
            .collect();
        // A new identity must differ from the identities of the other new records, too.
        let mut all = records.clone();
        for (n, found) in new {
            let mut new = new_record(found, &all, slot, start, &moment.since);
            if is_first && start == Start::All {
                (new.since, new.floor) = (None, 0);
            }
            // A scan may start at the highest `seq` only if all present rows were committed before capturing
            // began.
            let is_from_now = new.since.as_ref() == Some(&moment.since);
            let top = moment.top(n).filter(|_| is_from_now);
            all.push(CaptureRecord {
                publication: Some(publication.to_owned()),
                since_lsn,
                floor_seq: top.map(|top| top.seq),
                numbering: top.map(|top| top.numbering.clone()),
                ..new
            });
        }
        capture_record::insert(&**sql, &all[records.len()..], instance).await?;
    }
    for ((found, known), settings) in found.iter().zip(&known).zip(tables) {
        if let Some(known) = known {
            if is_session || !relatives::takes_over(found, known) {
                bring_up_to_date(sql, settings, found, known).await?;
            }
            if is_first && start == Start::All && known.since.is_some() {
                capture_record::capture_all(&**sql, known).await?;
            }
            if is_first && start == Start::New && known.since.is_none() {
                tracing::warn!(
                    table = %found.table,
                    "`start = new` has no effect: `init` or `slot create` recorded `start = all` for \
                     this table, so its old rows are published too"
                );
            }
        }
    }
    // Read the records again, because another relay may have written them first.
    known_of(sql, slot, found).await
}

/// Updates the records of captured tables that were renamed or created again, that got the column `inserted_xid`, or
/// that have new partitions. Only the session that holds the slot may call this.
///
/// # Errors
/// `slot-busy` if a table has no record. In this case no record is updated, because an update may overwrite the earlier
/// name of a renamed table. The next session may need that name to create the missing record (see [`claim`]). Also the
/// errors of [`find_tables`].
pub(crate) async fn refresh(sql: &Sql, slot: &SlotName, tables: &[TableSettings]) -> Result<()> {
    let found = find_tables(sql, tables).await?;
    let records = capture_record::read(&**sql).await?;
    let known = matched(&found, &records, slot);
    let known = found.iter().zip(known);
    let known = known.map(|(found, known)| known.ok_or_else(|| not_captured(&found.table)));
    let known = known.collect::<Result<Vec<_>>>()?;
    for ((found, known), settings) in found.iter().zip(known).zip(tables) {
        bring_up_to_date(sql, settings, found, known).await?;
    }
    Ok(())
}

/// Returns the tables as they are now, each with its record.
///
/// # Errors
/// `slot-busy` when a table has no record; `table-captured`; the errors of [`find_tables`].
pub(crate) async fn known(
    sql: &Sql,
    slot: &SlotName,
    tables: &[TableSettings],
) -> Result<Vec<Captured>> {
    known_of(sql, slot, find_tables(sql, tables).await?).await
}

async fn known_of(sql: &Sql, slot: &SlotName, found: Vec<FoundTable>) -> Result<Vec<Captured>> {
    let records = capture_record::read(&**sql).await?;
    refuse_others(&found, &records, slot)?;
    let known = matched(&found, &records, slot);
    let known: Vec<Option<CaptureRecord>> = known.into_iter().map(Option::<&_>::cloned).collect();
    let captured = found.into_iter().zip(known);
    captured
        .map(|(FoundTable { table, shape }, record)| {
            let record = record.ok_or_else(|| not_captured(&table))?;
            Ok(Captured { record, shape })
        })
        .collect()
}

/// Returns the tables as they are now, each with its record. A table without a record gets the record
/// that the relay would write now. Unlike [`known`], accepts tables that another slot captures.
///
/// # Errors
/// The errors of [`find_tables`].
pub(crate) async fn as_if_claimed(
    sql: &Sql,
    slot: &SlotName,
    tables: &[TableSettings],
    start: Start,
) -> Result<Vec<Captured>> {
    as_if_claimed_beside(sql, slot, tables, &[], start).await
}

/// Like [`as_if_claimed`], but only for one of the `tables`. Of the other tables, it looks up only the OIDs, which
/// needs no lock and no right.
///
/// # Errors
/// Errors of [`find_tables`].
pub(crate) async fn one_as_if_claimed(
    sql: &Sql,
    slot: &SlotName,
    tables: &[TableSettings],
    number: usize,
    start: Start,
) -> Result<Captured> {
    let mut others = Vec::new();
    for (n, other) in tables.iter().enumerate() {
        if n != number {
            others.push((&other.table, table::oid(sql, &other.table).await?));
        }
    }
    let one = &tables[number..=number];
    let mut captured = as_if_claimed_beside(sql, slot, one, &others, start).await?;
    Ok(captured.swap_remove(0))
}

/// Like [`as_if_claimed`], but no table takes over a record that belongs to one of `others`: these are the
/// other captured tables, each with its OID.
async fn as_if_claimed_beside(
    sql: &Sql,
    slot: &SlotName,
    tables: &[TableSettings],
    others: &[(&QualifiedName, Option<u32>)],
    start: Start,
) -> Result<Vec<Captured>> {
    let found = find_tables(sql, tables).await?;
    let mut records = capture_record::read(&**sql).await?;
    let now = current_snapshot(&**sql).await?;
    let mut captured = Vec::with_capacity(found.len());
    let is_own = |record: &CaptureRecord| {
        let of_found = found.iter().any(|found| found.shape.oid == record.oid);
        let mut others = others.iter();
        of_found || others.all(|(name, oid)| record.table != **name && Some(record.oid) != *oid)
    };
    let own: Vec<CaptureRecord> = records.iter().filter(|r| is_own(r)).cloned().collect();
    let known = matched(&found, &own, slot);
    for ((found, known), settings) in found.iter().zip(known).zip(tables) {
        let record = match known {
            Some(known) => replaced::brought_up(sql, settings, found, known).await?.0,
            None => {
                let new = new_record(found, &records, slot, start, &now);
                records.push(new.clone());
                new
            }
        };
        let shape = found.shape.clone();
        captured.push(Captured { record, shape });
    }
    Ok(captured)
}

fn not_captured(table: &QualifiedName) -> Error {
    let what = format!("a table was created again, and {table} has no record in outbox.capture");
    Error::new(Code::SlotBusy, what).hint(
        "a running relay captures the table within seconds; if no relay runs: `postrider init --apply`",
    )
}

async fn bring_up_to_date(
    sql: &Sql,
    settings: &TableSettings,
    found: &FoundTable,
    known: &CaptureRecord,
) -> Result<()> {
    let FoundTable { table, shape } = found;
    if known.oid != shape.oid || known.table != *table {
        let what = if relatives::takes_over(found, known) {
            "the settings name another table of the same partition tree: it takes over the capture record of \
             the earlier table, so undelivered rows of the earlier table are published"
        } else {
            "a captured table was renamed or created again: its rows are captured as before"
        };
        tracing::warn!(%table, identity = known.identity, before = %known.table, "{what}");
        let (moved, origin) = replaced::brought_up(sql, settings, found, known).await?;
        if let Some(origin) = origin {
            tracing::warn!(%table, "{origin}");
        }
        capture_record::moved(&**sql, &moved, known.oid).await?;
        noted_partitions::note(sql, found, &moved).await?;
    } else {
        noted_partitions::note(sql, found, known).await?;
    }
    if shape.has_inserted_xid && !known.has_inserted_xid {
        let added = CaptureRecord {
            added_xids: shape.missing_xids.clone(),
            ..known.clone()
        };
        capture_record::xids_added(&**sql, &added).await?;
    }
    Ok(())
}

#[cfg(test)]
pub(super) mod tests;
