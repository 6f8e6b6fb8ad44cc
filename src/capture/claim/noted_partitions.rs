//! Notes new partitions in the capture record as soon as the relay sees them.
//!
//! `CaptureRecord::partitions` gets a new partition only when an audit or a recovery ends, and an audit may take long, for
//! example while an event waits for a missing topic. If somebody detached the partition before the audit ends, the relay
//! would never look for its rows. So a new partition is also noted in `CaptureRecord::detached`, which has no effect
//! while the partition is attached. The next audit that ends adds the partition to `partitions`, and removes the note.

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

/// Notes the new partitions of one table. Does nothing if the record belongs to another table.
pub(super) async fn note(sql: &Sql, found: &FoundTable, known: &CaptureRecord) -> Result<()> {
    let new = new_partitions(found, known);
    if new.is_empty() {
        return Ok(());
    }
    capture_record::note_partitions(&**sql, known, &new).await
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
