//! Creates the capture record of a table that has none.
//!
//! Usually the capture of the table begins now, and rows that the table already contains are never published.
//!
//! There is one exception. Suppose both names `a` and `b` are configured. Somebody renames the captured table `a` to
//! `b`, and creates a new table `a`. The renamed table keeps its record. Rows may have been inserted into the new table
//! `a` before the relay noticed it, and they must be published. So the record of the new table copies the bounds of the
//! renamed table's record, such as the floor and the snapshot with which the capture began.

use std::collections::BTreeMap;

use slot_manager::{QualifiedName, SlotName};

use super::{FoundTable, latest};
use crate::postgres::Snapshot;
use crate::settings::Start;
use crate::store::capture_record::{CaptureRecord, IdSuffixes};

pub(super) fn new_record(
    found: &FoundTable,
    records: &[CaptureRecord],
    slot: &SlotName,
    start: Start,
    now: &Snapshot,
) -> CaptureRecord {
    let of_slot = records.iter().filter(|known| known.slot == slot.as_str());
    let earlier = latest(of_slot, &found.table);
    let since = match earlier {
        Some(earlier) => earlier.since.clone(),
        None => (start == Start::New).then(|| now.clone()),
    };
    let begins_at = since.as_ref().map_or(0, Snapshot::xmin);
    CaptureRecord {
        identity: identity(&found.table, records),
        table: found.table.clone(),
        oid: found.shape.oid,
        slot: slot.as_str().to_owned(),
        floor: earlier.map_or(begins_at, |earlier| earlier.floor),
        floor_seq: None,
        numbering: None,
        since,
        partitions: Some(found.shape.partitions.clone()),
        has_inserted_xid: found.shape.has_inserted_xid,
        added_xids: Vec::new(),
        recorded_from: earlier.map_or(0, |earlier| earlier.recorded_from),
        publication: None,
        since_lsn: None,
        id_suffixes: IdSuffixes::first(found.shape.oid),
        detached: Vec::new(),
        unread: BTreeMap::new(),
        recovery_progress: None,
        uncaptured: BTreeMap::new(),
        settled: BTreeMap::new(),
        is_adopted: false,
    }
}

/// Returns an identity for a new table. Event ids are computed from the identity, so it differs from the
/// identity of every other table.
pub(super) fn identity(table: &QualifiedName, records: &[CaptureRecord]) -> String {
    let name = identity_of_first(table);
    let is_free = |identity: &String| records.iter().all(|known| known.identity != *identity);
    let numbered = (2u32..).map(|n| format!("{name}#{n}"));
    std::iter::once(name.clone())
        .chain(numbered)
        .find(is_free)
        .expect("invariant: there are fewer records than numbers")
}

/// Returns the identity of the first table that is captured under this name. In the text from which an event id is
/// computed, `:` or `@` follows the identity, so the identity itself contains neither character. Otherwise the row
/// `b:7` of a table `a` and the row `7` of a table `a:b` would get the same event id.
pub(crate) fn identity_of_first(table: &QualifiedName) -> String {
    let name = format!("{}.{}", table.schema, table.name);
    name.replace(':', "%3A").replace('@', "%40")
}
