//! Finds the capture record of a table in the stream. The WAL may contain rows of tables that were dropped, renamed
//! or replaced since, and another captured table may have their name now. So the OID decides first: rows keep the
//! identity and the bounds of the record that has or had this OID. Otherwise two different rows could get one event
//! id, and the relay would take one of them for a repetition of the other.
//!
//! The settings of a table belong to its name, so `intake` finds them by name.

use decoder::Oid;
use outbox_event::TableIdentity;

use super::captured::Captured;
use crate::error::Result;
use crate::postgres::Sql;
use crate::store::capture_record::{self, CaptureRecord};

/// The capture records that a session knows: first those of the configured tables, in the order of the settings,
/// then all other records. The stream may contain rows of the other records too. For example, the table `b` was
/// dropped, and then the table `a` was renamed to `b`. The renamed table keeps its own record, so no configured table
/// has the record of the dropped table. But the WAL may still contain rows of the dropped table.
#[derive(Debug, Clone, Default)]
pub(crate) struct SessionRecords(Vec<CaptureRecord>);

impl SessionRecords {
    /// Reads the records. `captured` are the configured tables, each with the record that the session has claimed.
    ///
    /// # Errors
    /// Database errors.
    pub(crate) async fn read(sql: &Sql, captured: &[Captured]) -> Result<Self> {
        Ok(Self::new(captured, capture_record::read(&**sql).await?))
    }

    fn new(captured: &[Captured], all: Vec<CaptureRecord>) -> Self {
        let mut records: Vec<CaptureRecord> =
            captured.iter().map(|one| one.record.clone()).collect();
        let is_other = |record: &CaptureRecord| {
            let mut captured = captured.iter();
            captured.all(|one| one.record.identity != record.identity)
        };
        records.extend(all.into_iter().filter(is_other));
        Self(records)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &CaptureRecord> {
        self.0.iter()
    }

    /// Returns the record of the table with this OID, and its index. If no record has or had the OID, returns the
    /// record of the configured table at the index `named`, which has the table's name. `None` only if there are no
    /// records, as in a benchmark.
    pub(super) fn of(&self, oid: Oid, named: usize) -> Option<(usize, &CaptureRecord)> {
        let had = |record: &CaptureRecord| record.had(oid.0);
        let position = |is_it: &dyn Fn(&CaptureRecord) -> bool| self.0.iter().position(is_it);
        let number = position(&|record| record.oid == oid.0)
            .or_else(|| {
                self.0
                    .get(named)
                    .filter(|record| had(record))
                    .map(|_| named)
            })
            .or_else(|| position(&had))
            .unwrap_or(named);
        Some((number, self.0.get(number)?))
    }
}

/// Returns the identity with which the event ids of a table are computed. `oid` is the OID of the table. `record` is
/// the capture record that has this OID now, or had it earlier.
pub(super) fn identity_of(record: &CaptureRecord, oid: Oid) -> TableIdentity {
    let is_partition = || record.former_partitions("").contains(&oid.0);
    // The rows of a partition have the suffix of the captured table.
    let suffixed = if !record.id_suffixes.knows(oid.0) && is_partition() {
        record.oid
    } else {
        oid.0
    };
    TableIdentity::new(&record.identity)
        .with_added_xids(&record.added_xids)
        .with_suffix(&record.id_suffixes.of(suffixed))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capture::claim::tests::record;
    use crate::store::capture_record::IdSuffixes;

    /// The tables a.x and a.y were rotated: a.x has the name a.y now. The earlier a.y (3) left its record behind.
    fn rotated() -> SessionRecords {
        let x = CaptureRecord {
            detached: vec![5],
            id_suffixes: IdSuffixes::first(2).with_copy(1, 2),
            ..record("a.x", "a.y", 2)
        };
        let y = CaptureRecord {
            id_suffixes: IdSuffixes::first(4).with_new(3, 4),
            ..record("a.y", "a.y", 3)
        };
        let new = CaptureRecord {
            id_suffixes: IdSuffixes::first(9),
            ..record("a.x#2", "a.x", 9)
        };
        SessionRecords(vec![new, x, y])
    }

    #[test]
    fn the_oid_decides_which_record_a_table_has_and_otherwise_its_name() {
        let records = rotated();
        let of = |oid, named| {
            let (number, record) = records.of(Oid(oid), named).unwrap();
            (number, &*record.identity)
        };
        assert_eq!(of(9, 0), (0, "a.x#2"));
        assert_eq!(of(2, 1), (1, "a.x"));
        for oid in [3, 4] {
            assert_eq!(
                of(oid, 1),
                (2, "a.y"),
                "an earlier table of the dropped one"
            );
        }
        for oid in [1, 5] {
            assert_eq!(
                of(oid, 0),
                (1, "a.x"),
                "a replaced table, a former partition"
            );
        }
        assert_eq!(of(77, 0), (0, "a.x#2"), "unknown");
        assert!(SessionRecords::default().of(Oid(3), 0).is_none());
    }

    #[test]
    fn the_rows_of_each_table_keep_the_suffix_of_their_event_ids() {
        let records = rotated();
        let suffixed = |oid, suffix: &str| {
            let (_, record) = records.of(Oid(oid), 1).unwrap();
            let expected = TableIdentity::new(&record.identity).with_suffix(suffix);
            assert_eq!(identity_of(record, Oid(oid)), expected, "{oid}");
        };
        suffixed(2, "");
        suffixed(3, "@3");
        suffixed(4, "");
        suffixed(5, "");
        suffixed(77, "@77");
    }
}
