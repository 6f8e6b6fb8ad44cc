//! A captured table, as the other modules see it: its shape in the catalogue, and its capture record.

use outbox_event::TableIdentity;

use super::shape::Shape;
use crate::store::capture_record::{CaptureRecord, RecoveryProgress};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Captured {
    pub(crate) record: CaptureRecord,
    pub(crate) shape: Shape,
}

impl Captured {
    /// The SQL expression for the transaction that inserted the row `e`; see [`Shape::inserted_xid_sql`].
    pub(crate) fn inserted_xid_sql(&self) -> String {
        let CaptureRecord {
            added_xids,
            is_adopted,
            ..
        } = &self.record;
        self.shape.inserted_xid_sql(added_xids, *is_adopted)
    }

    /// The name that identifies the table in the ids of its events.
    pub(crate) fn identity(&self) -> TableIdentity {
        let record = &self.record;
        TableIdentity::new(&record.identity)
            .with_added_xids(&record.added_xids)
            .with_suffix(&record.id_suffixes.of(self.shape.oid))
    }

    /// The progress of an unfinished recovery in the table. `None` if no progress is recorded. Also `None` if the
    /// recorded `seq` has lost its meaning: the table now has another `seq` column, or another sequence fills it.
    pub(crate) fn recovery_progress(&self) -> Option<&RecoveryProgress> {
        let progress = self.record.recovery_progress.as_ref()?;
        let same_numbers = progress.seq.is_none()
            || (&progress.column, &progress.numbering) == (&self.seq_column(), &self.numbering());
        same_numbers.then_some(progress)
    }

    /// Returns the progress to record for a recovery. The recovery has resolved the rows that meet two conditions:
    ///
    /// - The row's transaction is older than `below`.
    /// - The row's `seq` is not above the parameter `seq`. If the parameter is `None`, this condition does not apply.
    ///
    /// `leaves` has the OIDs of the partitions that the table has now. The progress does not include partitions that
    /// were detached since the recovery began, because the recovery might not have read their rows.
    ///
    /// Returns `None` if an earlier recovery has recorded more progress. Also returns `None` if the parameter `seq` is
    /// set, but the table has no indexed `seq` column that a sequence fills.
    pub(crate) fn recovery_progress_at(
        &self,
        below: u64,
        seq: Option<i64>,
        leaves: &[u32],
    ) -> Option<RecoveryProgress> {
        let read = self.shape.leaves().filter(|leaf| leaves.contains(leaf));
        let read: Vec<String> = read.map(|leaf| leaf.to_string()).collect();
        let progress = RecoveryProgress {
            below,
            seq,
            column: self.seq_column(),
            numbering: self.numbering(),
            partitions: read.join(","),
        };
        let is_numbered =
            seq.is_none() || progress.column.is_some() && progress.numbering.is_some();
        let earlier = self.recovery_progress();
        let is_further = earlier.is_none_or(|earlier| progress.is_as_far_as(earlier));
        (is_numbered && is_further).then_some(progress)
    }

    fn seq_column(&self) -> Option<String> {
        self.shape.numbered().map(|seq| seq.column.clone())
    }

    /// The sequence that fills the indexed column `seq`.
    fn numbering(&self) -> Option<String> {
        self.shape.numbered().and_then(|seq| seq.numbering.clone())
    }

    /// Returns the partitions whose own floor is lower than `floor`: the OID and the floor of each.
    ///
    /// A partition has its own floor if, for some time, the relay did not capture it or could not read it. Meanwhile
    /// the floor of the table may have risen. So the rows of such a partition may be unresolved from the partition's
    /// floor on, even if they are below the table's floor.
    pub(crate) fn with_own_floors(&self, floor: u64) -> impl Iterator<Item = (u32, u64)> {
        let CaptureRecord {
            uncaptured, unread, ..
        } = &self.record;
        self.shape.leaves().filter_map(move |oid| {
            let own = uncaptured.get(&oid).into_iter().chain(unread.get(&oid));
            let own = own.copied().min()?;
            (own < floor).then_some((oid, own))
        })
    }

    /// Returns the OIDs of the partitions that hold rows and are not in the capture record yet. A table may
    /// already have rows when it is attached as a partition. Such rows may be unresolved even if their
    /// transactions are below the floor. Returns an empty list if the record does not list the partitions.
    pub(crate) fn new_partitions(&self) -> Vec<&str> {
        let Some(known) = &self.record.partitions else {
            return Vec::new();
        };
        let is_known = |oid: &&str| known.split(',').any(|known| known == *oid);
        let oids = self.shape.partitions.split(',');
        // A partition without rows has nothing to publish.
        let filled: Vec<String> = self.shape.filled.iter().map(u32::to_string).collect();
        let is_filled = |oid: &&str| filled.iter().any(|filled| filled == oid);
        oids.filter(|oid| is_filled(oid) && !is_known(oid))
            .collect()
    }
}
