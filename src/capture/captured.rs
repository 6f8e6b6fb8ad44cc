//! A captured table, as the other modules see it: its shape in the catalog, and its capture record.

use outbox_event::TableIdentity;

use super::shape::Shape;
use crate::store::capture_record::CaptureRecord;

/// A captured table: its shape, and its capture record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Captured {
    pub(crate) record: CaptureRecord,
    pub(crate) shape: Shape,
}

impl Captured {
    /// The name that identifies the table in the ids of its events.
    pub(crate) fn identity(&self) -> TableIdentity {
        let record = &self.record;
        TableIdentity::new(&record.identity)
            .with_added_xids(&record.added_xids)
            .with_suffix(&record.id_suffixes.of(self.shape.oid))
    }

    /// Returns the OIDs of the partitions that were added since the floor was last raised and that hold
    /// rows. These rows may be unresolved although they belong to transactions below the floor, because a
    /// table may already have rows when it is attached as a partition.
    pub(crate) fn new_partitions(&self) -> Vec<&str> {
        let Some(known) = &self.record.partitions else {
            return Vec::new();
        };
        let is_known = |oid: &&str| known.split(',').any(|known| known == *oid);
        let oids = self.shape.partitions.split(',');
        // A partition without rows does not matter.
        let filled: Vec<String> = self.shape.filled.iter().map(u32::to_string).collect();
        let is_filled = |oid: &&str| filled.iter().any(|filled| filled == oid);
        oids.filter(|oid| is_filled(oid) && !is_known(oid))
            .collect()
    }
}
