//! Refuses tables whose rows a relay on another slot publishes.
//!
//! The other slot may have captured the same table, one of its partitions, or a partitioned table that
//! contains it. In each case both relays would publish the same rows.

use slot_manager::publication::PublicationState;
use slot_manager::{QualifiedName, SlotName};

use super::{FoundTable, known_by_name, matched, relatives};
use crate::error::{Code, Error, Result};
use crate::postgres::Sql;
use crate::store::capture_record::{self, CaptureRecord};

/// Returns the records of the tables and of their partitions.
pub(crate) fn with_partitions<'r>(
    found: &[FoundTable],
    records: &'r [CaptureRecord],
    slot: &SlotName,
) -> Vec<&'r CaptureRecord> {
    let is_partition = |record: &&CaptureRecord| {
        let mut found = found.iter();
        found.any(|found| found.shape.below.contains(&record.oid))
    };
    let own = matched(found, records, slot).into_iter().flatten();
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
    let owned = with_partitions(found, records, slot);
    let other = owned
        .into_iter()
        .find(|record| record.slot != slot.as_str());
    let Some(other) = other else { return Ok(()) };
    let is_above = |found: &&FoundTable| found.shape.below.contains(&other.oid);
    let root = found.iter().find(is_above).map(|found| &found.table);
    Err(refused(other, slot, root))
}

/// Returns an error if another slot has captured one of the session's tables, or a table that is now a
/// partition of one of them. `state` has the tables of the session and their partitions. Unlike
/// [`refuse_others`], reads no catalogue, because the supervisor calls this every few seconds.
///
/// # Errors
/// `table-captured`; database errors.
pub(crate) async fn refuse_attached(
    sql: &Sql,
    slot: &SlotName,
    state: &PublicationState,
) -> Result<()> {
    let records = capture_record::read(&**sql).await?;
    for other in records.iter().filter(|other| other.slot != slot.as_str()) {
        let mut tables = state.tables.iter();
        if let Some(table) = tables.find(|table| table.oids().any(|oid| oid == other.oid)) {
            let is_below = table.oid != Some(other.oid);
            return Err(refused(other, slot, is_below.then_some(&table.wanted.name)));
        }
    }
    Ok(())
}

/// The error for a table that another slot captures. If that table is a partition of ours, `root` is our table.
fn refused(other: &CaptureRecord, slot: &SlotName, root: Option<&QualifiedName>) -> Error {
    let what = captured_through(other, slot);
    let Some(root) = root else {
        return Error::new(Code::TableCaptured, what);
    };
    let part = &other.table;
    Error::new(
        Code::TableCaptured,
        format!("{what}, because it is a partition of {root}"),
    )
    .hint(format!(
        "detach partition {part} from its parent table, and a relay that was running continues by itself; if the \
         relay of slot \"{}\" is gone for good: `postrider recover --adopt`",
        other.slot
    ))
}

/// Refuses a table that our slot has not captured yet, if another slot captures its parent or one of its partitions.
/// Parent and partition share rows, and the relay of the other slot may not have delivered all of them. Our relay
/// would never publish these undelivered rows, because it would capture the table only from now on.
///
/// Also refuses a new table if several earlier tables share rows with it ([`refuse_several`]).
///
/// Not here: a partition that was attached to its parent after two relays had captured the two tables.
/// [`refuse_others`] refuses the relay of the parent. The relay of the partition continues, because it owns the
/// partition's rows and delivers them in order.
///
/// # Errors
/// `table-captured`.
pub(crate) fn refuse_partial_overlap(
    found: &[FoundTable],
    records: &[CaptureRecord],
    slot: &SlotName,
) -> Result<()> {
    let known = known_by_name(found, records);
    refuse_several(found, &known, records, slot)?;
    for (found, known) in found.iter().zip(known) {
        let shape = &found.shape;
        let is_partial = |record: &&CaptureRecord| {
            let is_ours =
                known.is_some_and(|known| known.slot == slot.as_str() && known.oid == shape.oid);
            !is_ours && shape.above.contains(&record.oid)
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

/// Refuses a new table that shares rows with several earlier tables of this slot, for example because they are its
/// partitions. The new table can take over only one of their capture records, and the `since`, `floor` and identity
/// in this record would be wrong for the rows of the other tables.
fn refuse_several(
    found: &[FoundTable],
    known: &[Option<&CaptureRecord>],
    records: &[CaptureRecord],
    slot: &SlotName,
) -> Result<()> {
    let new = found.iter().zip(known).filter(|(_, known)| known.is_none());
    for (found, _) in new {
        let earlier = relatives::of(found, known, records, slot);
        if earlier.len() < 2 {
            continue;
        }
        let names: Vec<String> = earlier
            .iter()
            .map(|record| record.table.to_string())
            .collect();
        let what = format!(
            "table {} shares rows with {}, which slot \"{slot}\" has captured: each of these tables has its own \
             capture record, and the new table can take over only one of them",
            found.table,
            names.join(" and ")
        );
        return Err(Error::new(Code::TableCaptured, what).hint(
            "go back to the earlier settings until every row is published: docs/reference/errors/table-captured.md \
             explains how the new table is captured after that",
        ));
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
