//! Refuses tables whose rows a relay on another slot publishes.
//!
//! The other slot may have captured the same table, a partition of the table, or a table of which the
//! table is a partition. In each case both relays would publish the same rows.

use slot_manager::SlotName;

use super::{FoundTable, matched};
use crate::error::{Code, Error, Result};
use crate::store::capture_record::CaptureRecord;

/// Returns the records of the tables and of their partitions.
pub(crate) fn with_partitions<'r>(
    found: &[FoundTable],
    records: &'r [CaptureRecord],
) -> Vec<&'r CaptureRecord> {
    let is_partition = |record: &&CaptureRecord| {
        let mut found = found.iter();
        found.any(|found| found.shape.below.contains(&record.oid))
    };
    let own = matched(found, records).into_iter().flatten();
    own.chain(records.iter().filter(is_partition)).collect()
}

/// Refuses tables whose rows another relay publishes.
///
/// # Errors
/// `table-captured`.
pub(crate) fn refuse_others(
    found: &[FoundTable],
    records: &[CaptureRecord],
    slot: &SlotName,
) -> Result<()> {
    refuse_partial_overlap(found, records, slot)?;
    let owned = with_partitions(found, records);
    let other = owned
        .into_iter()
        .find(|record| record.slot != slot.as_str());
    let Some(other) = other else { return Ok(()) };
    let what = captured_through(other, slot);
    let is_above = |found: &&FoundTable| found.shape.below.contains(&other.oid);
    Err(match found.iter().find(is_above) {
        None => Error::new(Code::TableCaptured, what),
        Some(FoundTable { table, .. }) => Error::new(
            Code::TableCaptured,
            format!("{what}, because it is a partition of {table}"),
        )
        .hint(
            "detach the partition; if the relay of that slot is gone for good: `postrider recover --adopt`",
        ),
    })
}

/// Refuses tables that share rows with a table of another slot, if this relay could not take over all
/// rows of that table: the other table is larger than ours, or ours has no record yet. Without a record,
/// rows that the other relay has not delivered would count as older than the capture.
///
/// # Errors
/// `table-captured`.
pub(crate) fn refuse_partial_overlap(
    found: &[FoundTable],
    records: &[CaptureRecord],
    slot: &SlotName,
) -> Result<()> {
    for (found, known) in found.iter().zip(matched(found, records)) {
        let shape = &found.shape;
        let is_partial = |record: &&CaptureRecord| {
            shape.above.contains(&record.oid)
                || known.is_none() && shape.below.contains(&record.oid)
        };
        let mut others = records.iter().filter(|record| record.slot != slot.as_str());
        if let Some(other) = others.find(is_partial) {
            let what = format!(
                "{}, because it shares rows with {} (one of them is a partition of the other)",
                captured_through(other, slot),
                found.table
            );
            return Err(Error::new(Code::TableCaptured, what).hint(format!(
                "deliver these rows through slot \"{}\" alone; if its relay is gone for good, capture {} \
                 here and run `postrider recover --adopt`",
                other.slot, other.table
            )));
        }
    }
    Ok(())
}

fn captured_through(other: &CaptureRecord, slot: &SlotName) -> String {
    format!(
        "table {} is captured through slot \"{}\": a second relay on slot \"{slot}\" would publish its rows \
         twice",
        other.table, other.slot
    )
}
