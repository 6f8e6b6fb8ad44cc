//! Finds the capture record of an earlier table that a newly configured table takes over.
//!
//! The settings may change from one table to another table of the same partition tree. The new table can be
//! the partitioned table to which the earlier table was attached. It can also be a partition of the earlier
//! table, even a detached one. Some rows of the earlier table might be undelivered. If the new table got a
//! new record, these rows would count as older than the start of capturing, and would never be published. So
//! the new table takes over the record of the earlier table.

use slot_manager::SlotName;

use super::FoundTable;
use crate::store::capture_record::CaptureRecord;

/// Returns the records that the table `found` may take over: records of `slot` that belong to no configured table, and
/// whose table shares rows with `found`. `known` has the records of the configured tables.
pub(super) fn of<'r>(
    found: &FoundTable,
    known: &[Option<&'r CaptureRecord>],
    records: &'r [CaptureRecord],
    slot: &SlotName,
) -> Vec<&'r CaptureRecord> {
    let is_left = |record: &CaptureRecord| {
        let mut known = known.iter().flatten();
        known.all(|known| known.identity != record.identity)
    };
    let of_slot = records.iter().filter(|record| record.slot == slot.as_str());
    of_slot
        .filter(|record| is_left(record) && share_rows(found, record))
        .collect()
}

/// Whether the two tables share rows. They do if the recorded table is `found`, or a table above or below it in
/// the partition tree. They also do if `found` contains a partition that belongs or belonged to the recorded
/// table.
fn share_rows(found: &FoundTable, record: &CaptureRecord) -> bool {
    let shape = &found.shape;
    let now: Vec<u32> = shape
        .partitions
        .split(',')
        .filter_map(|oid| oid.parse().ok())
        .collect();
    let contains = |oid: &u32| shape.oid == *oid || shape.below.contains(oid) || now.contains(oid);
    shape.above.contains(&record.oid)
        || contains(&record.oid)
        || record.former_partitions("").iter().any(contains)
        || record.uncaptured.keys().any(contains)
}

/// Whether the record belongs to an earlier table. If so, the table `found` takes the record over.
pub(super) fn takes_over(found: &FoundTable, record: &CaptureRecord) -> bool {
    record.oid != found.shape.oid && record.table != found.table
}

/// Whether one of the tables takes over the record of an earlier table.
pub(crate) fn has_taken_over(found: &[FoundTable], known: &[Option<&CaptureRecord>]) -> bool {
    let mut both = found.iter().zip(known);
    both.any(|(found, known)| known.is_some_and(|known| takes_over(found, known)))
}
