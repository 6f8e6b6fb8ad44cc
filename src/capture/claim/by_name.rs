//! Finds the capture record of a table whose OID no record has, by the table's name.
//!
//! The table then gets the identity of the record. The stream may still contain rows of the earlier table with this
//! identity. If one transaction inserted rows with equal ids into both tables, these rows would get the same event id,
//! and one of them would be lost. So the name decides only if the table seems to have had no other captured name
//! before: while it had another name, both tables were captured at the same time.

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
    // Whether a table was renamed to another captured name, and a new table got its name. Another new table may have
    // had this name in between, because the tables may have been rotated several times.
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
