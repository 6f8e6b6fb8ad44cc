//! Notes new partitions in the capture record as soon as the relay sees them.
//!
//! `CaptureRecord::partitions` names only the partitions whose rows an audit or a recovery has covered. An audit may
//! take long to end, for example while an event waits for a missing topic. If a partition were detached before that, and
//! no record named it, the relay would never look for its rows. So a new partition is noted in
//! `CaptureRecord::detached`, which has no effect while the partition is attached. The next audit that ends names the
//! partition in `partitions`, and removes the note.

use super::{FoundTable, find_tables, matched};
use crate::error::Result;
use crate::mapping::TableSettings;
use crate::postgres::Sql;
use crate::store::capture_record::{self, CaptureRecord};
use slot_manager::SlotName;

/// Notes the new partitions of all captured tables. Only the session that holds the slot may call this.
///
/// # Errors
/// The errors of [`find_tables`].
pub(crate) async fn note_partitions(
    sql: &Sql,
    slot: &SlotName,
    tables: &[TableSettings],
) -> Result<()> {
    let found = find_tables(sql, tables).await?;
    let records = capture_record::read(&**sql).await?;
    for (found, known) in found.iter().zip(matched(&found, &records, slot)) {
        if let Some(known) = known {
            note(sql, found, known).await?;
        }
    }
    Ok(())
}

/// Notes the new partitions of one table. Does nothing if the record is of another table.
pub(super) async fn note(sql: &Sql, found: &FoundTable, known: &CaptureRecord) -> Result<()> {
    let new = new_partitions(found, known);
    if new.is_empty() {
        return Ok(());
    }
    // Rows that a partition had when it was attached may be older than the floor. Rows that are inserted later are not.
    let filled = |oid: &&u32| found.shape.filled.contains(oid);
    let filled: Vec<u32> = new.iter().filter(filled).copied().collect();
    capture_record::note_partitions(&**sql, known, &new, &filled).await
}

fn new_partitions(FoundTable { shape, .. }: &FoundTable, known: &CaptureRecord) -> Vec<u32> {
    if known.oid != shape.oid || !shape.is_partitioned() {
        return Vec::new();
    }
    let noted = known.former_partitions("");
    shape
        .leaves()
        .filter(|leaf| !noted.contains(leaf))
        .collect()
}
