//! Finds the capture record of a table by the table's name, if no record has the table's OID.
//!
//! The new table then gets the identity of the earlier table, from which event ids are computed.
//!
//! This would be wrong if both tables were captured at the same time, the new table under another configured name. One
//! transaction may then have inserted rows with equal ids into both tables, and the stream may still contain both rows.
//! They would get the same event id, and one of them would be lost. So the name decides only if the new table seems to
//! have had no other captured name.

use slot_manager::QualifiedName;

use super::FoundTable;
use crate::store::capture_record::CaptureRecord;

/// Returns the record of each table by its OID, or else by its name.
pub(super) fn known_by_name<'r>(
    found: &[FoundTable],
    records: &'r [CaptureRecord],
) -> Vec<Option<&'r CaptureRecord>> {
    let by_oid = |found: &FoundTable| records.iter().find(|known| known.oid == found.shape.oid);
    let taken: Vec<&str> = found
        .iter()
        .filter_map(by_oid)
        .map(|known| known.identity.as_str())
        .collect();
    let is_free = |known: &&CaptureRecord| !taken.contains(&known.identity.as_str());
    // Whether the table of the record was renamed to another captured name, and a new table has its earlier name now.
    // The tables may have been rotated several times, so any other new table may have had this name in between.
    let is_passed_on = |known: &CaptureRecord| {
        let mut new = found.iter().filter(|found| by_oid(found).is_none());
        !is_free(&known) && new.any(|found| found.table == known.table)
    };
    let by_name = |found: &FoundTable| {
        let named = latest(records.iter().filter(is_free), &found.table)?;
        let of_slot = records.iter().filter(|other| other.slot == named.slot);
        let mut others = of_slot.filter(|other| other.identity != named.identity);
        let had_another = others.any(|other| other.had(found.shape.oid) || is_passed_on(other));
        (!had_another).then_some(named)
    };
    found
        .iter()
        .map(|found| by_oid(found).or_else(|| by_name(found)))
        .collect()
}

/// Returns the record with this name. If tables of this name were replaced several times, old records have the
/// name too. The auditor no longer raises their floors, so the record with the highest floor is the latest.
pub(super) fn latest<'r>(
    records: impl Iterator<Item = &'r CaptureRecord>,
    table: &QualifiedName,
) -> Option<&'r CaptureRecord> {
    let of_name = records.filter(|known| known.table == *table);
    of_name.max_by_key(|known| known.floor)
}
