//! Writes the SQL condition that selects the rows of a walk over a captured table.
//!
//! The lower bound is a transaction number, usually the floor of the capture record. The upper bound is a
//! snapshot, a transaction number, or none. Rows that are older than capturing never match.
//!
//! Not here: how the rows are walked (`scan`).

use slot_manager::table::WRITTEN_BEFORE_ATTACHED;

use super::captured::Captured;
use super::shape::xids_sql;
use crate::postgres::Snapshot;
use crate::store::relay_row::RecordKeeping;

/// The bounds of a walk.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ScanWindow<'a> {
    pub(crate) captured: &'a Captured,
    /// Rows of transactions before this transaction are left out; 0 for no bound.
    pub(crate) from_xid: u64,
    /// Rows up to this `seq` usually belong to transactions before `from_xid`, so they are skipped.
    pub(crate) from_seq: Option<i64>,
    /// Rows of this transaction and of later transactions are left out.
    pub(crate) below_xid: Option<u64>,
    /// Rows that are not visible in this snapshot are left out.
    pub(crate) shown_by: Option<&'a Snapshot>,
    /// Rows that are not visible in this snapshot belong to another captured table, and are left out.
    pub(crate) not_of_another: Option<&'a Snapshot>,
    /// Whether rows without a `seq` are included.
    pub(crate) with_unnumbered: bool,
    /// If published events may lack a record, rows with a record are included too.
    pub(crate) records: RecordKeeping,
}

impl<'a> ScanWindow<'a> {
    /// All rows that may be unresolved.
    pub(crate) fn unresolved(captured: &'a Captured, records: RecordKeeping) -> Self {
        let Captured { record, shape } = captured;
        Self {
            captured,
            from_xid: record.floor,
            from_seq: None,
            below_xid: None,
            shown_by: None,
            not_of_another: None,
            with_unnumbered: shape.seq.as_ref().is_none_or(|seq| seq.is_nullable),
            records,
        }
    }

    /// The rows from the floor on that have no record.
    pub(crate) fn unrecorded(captured: &'a Captured) -> Self {
        Self::unresolved(captured, RecordKeeping::COMPLETE)
    }

    /// The rows that the frequent audits compare: rows that may be unresolved. If a sequence numbers
    /// the rows, this window skips rows without a `seq` and rows with a `seq` up to `floor_seq`.
    /// Comparisons of the whole table cover these rows.
    pub(crate) fn recent(captured: &'a Captured) -> Self {
        let Captured { record, shape } = captured;
        let numbering = shape.seq.as_ref().and_then(|seq| seq.numbering.as_ref());
        let is_numbered_so = numbering.is_some() && numbering == record.numbering.as_ref();
        Self {
            from_seq: record.floor_seq.filter(|_| is_numbered_so),
            with_unnumbered: record.numbering.is_none(),
            ..Self::unrecorded(captured)
        }
    }

    /// Whether the scan finds rows by their `ctid`, which changes when the table is rewritten.
    pub(crate) fn goes_by_places(&self) -> bool {
        self.with_unnumbered || self.captured.shape.numbered().is_none()
    }

    /// All rows of the table that should have a record. The scan returns the rows that have none.
    pub(crate) fn whole(captured: &'a Captured) -> Self {
        Self {
            from_xid: captured.record.recorded_from,
            ..Self::unrecorded(captured)
        }
    }

    /// The condition that a row of `e` is in a partition that was added since the floor was raised.
    /// `None` if there is no such partition, or if every event must have a record: then the auditor
    /// compares the whole table.
    fn new_partitions(&self) -> Option<String> {
        let new = self.captured.new_partitions();
        let may_lack_records =
            self.records.may_lack_records() || self.captured.record.recorded_from > 0;
        let is_needed = may_lack_records && !new.is_empty();
        is_needed.then(|| format!("e.tableoid = any ('{{{}}}'::oid[])", new.join(",")))
    }

    /// The condition that the stream did not bring a row of `e`. This is so if the row is in a
    /// partition that was added since the floor was raised, and if the row is older than the window or
    /// was written before the partition was attached. `None` in the same cases as
    /// `new_partitions`.
    pub(crate) fn overlooked(&self) -> Option<String> {
        let new = self.new_partitions()?;
        let any = Self {
            from_xid: 0,
            ..*self
        };
        let Captured { record, shape } = self.captured;
        let xid = shape.inserted_xid_sql(&record.added_xids);
        let (from, others) = (self.from_xid, any.condition());
        Some(format!(
            "{new} and ({xid} < '{from}'::xid8 or {WRITTEN_BEFORE_ATTACHED}) and {others}"
        ))
    }

    /// The condition that a row of `e` is in the window.
    pub(crate) fn condition(&self) -> String {
        let Captured { record, shape } = self.captured;
        let xid = shape.inserted_xid_sql(&record.added_xids);
        let is_exact = shape.tells_top_level_transactions(&record.added_xids);
        let visible = |snapshot: &Snapshot| {
            format!("pg_catalog.pg_visible_in_snapshot({xid}, '{snapshot}'::pg_snapshot)")
        };
        let mut conditions = Vec::new();
        // Rows that existed when the column `inserted_xid` was added are all resolved once the floor is
        // above the transaction that added the column.
        let added = &record.added_xids;
        let is_past = added.iter().max().is_some_and(|xid| record.floor > *xid);
        if shape.has_inserted_xid && is_past {
            conditions.push(format!("e.inserted_xid <> all ({})", xids_sql(added)));
        }
        if self.from_xid > 0 {
            let recent = format!("{xid} >= '{}'::xid8", self.from_xid);
            conditions.push(match self.new_partitions() {
                Some(new) => format!("({recent} or {new})"),
                None => recent,
            });
        }
        if let Some(below) = self.below_xid {
            conditions.push(format!("{xid} < '{below}'::xid8"));
        }
        match &record.since {
            Some(since) if is_exact => {
                let own = shape.has_own_xid_sql();
                conditions.push(format!(
                    "case when {own} then not {} else {xid} >= '{}'::xid8 end",
                    visible(since),
                    since.xmin()
                ));
            }
            // `xmin` may name a subtransaction. A snapshot does not list the subtransactions of a running
            // transaction, so rows from the snapshot's xmin on count as new.
            Some(since) => conditions.push(format!("{xid} >= '{}'::xid8", since.xmin())),
            None => {}
        }
        let snapshots = self.shown_by.into_iter().chain(self.not_of_another);
        conditions.extend(snapshots.map(|snapshot| shown_sql(self.captured, snapshot)));
        if conditions.is_empty() {
            "true".to_owned()
        } else {
            conditions.join(" and ")
        }
    }
}

/// The condition that a row of `e` is visible in this snapshot.
pub(super) fn shown_sql(captured: &Captured, snapshot: &Snapshot) -> String {
    let Captured { record, shape } = captured;
    // The writer of a row may have set a transaction id that did not exist yet.
    let xid = shape.xid_before_sql(snapshot.xmax(), &record.added_xids);
    format!("pg_catalog.pg_visible_in_snapshot({xid}, '{snapshot}'::pg_snapshot)")
}

#[cfg(test)]
pub(crate) mod tests {
    use slot_manager::table_shape::SeqColumn;

    use super::super::shape::Shape;
    use super::*;
    use crate::store::capture_record::{CaptureRecord, IdSuffixes};

    pub(crate) fn captured(has_inserted_xid: bool, since: Option<&str>) -> Captured {
        Captured {
            record: CaptureRecord {
                identity: "a.x".into(),
                table: "a.x".parse().unwrap(),
                oid: 1,
                slot: "postrider".into(),
                since: since.map(|since| since.parse().unwrap()),
                floor: 90,
                floor_seq: Some(7),
                numbering: Some("2/2".into()),
                partitions: None,
                has_inserted_xid,
                added_xids: Vec::new(),
                recorded_from: 0,
                publication: None,
                since_lsn: None,
                id_suffixes: IdSuffixes::first(1),
                detached: Vec::new(),
                unread: std::collections::BTreeMap::new(),
            },
            shape: Shape {
                oid: 1,
                has_inserted_xid,
                unfit_inserted_xid: None,
                has_column_seq: true,
                missing_xids: Vec::new(),
                partitions: String::new(),
                filled: Vec::new(),
                below: Vec::new(),
                above: Vec::new(),
                files: String::new(),
                blocks: 10,
                seq: Some(SeqColumn {
                    column: "seq".into(),
                    is_steady: true,
                    is_indexed: true,
                    is_nullable: false,
                    numbering: Some("2/2".into()),
                }),
                version: None,
            },
        }
    }

    #[test]
    fn rows_older_than_capturing_are_excluded_by_the_snapshot() {
        let captured = captured(true, Some("100:110:103"));
        let condition = ScanWindow::unrecorded(&captured).condition();
        let xid = captured.shape.inserted_xid_sql(&[]);
        let own = captured.shape.has_own_xid_sql();
        assert_eq!(
            condition,
            format!(
                "{xid} >= '90'::xid8 and case when {own} then not \
                 pg_catalog.pg_visible_in_snapshot({xid}, '100:110:103'::pg_snapshot) \
                 else {xid} >= '100'::xid8 end"
            )
        );
    }

    #[test]
    fn without_inserted_xid_every_row_from_the_snapshots_xmin_on_counts_as_new() {
        let captured = captured(false, Some("100:110:103"));
        let condition = ScanWindow::whole(&captured).condition();
        assert!(condition.contains("e.xmin"), "{condition}");
        assert!(condition.ends_with(">= '100'::xid8"), "{condition}");
        assert!(!condition.contains("pg_visible_in_snapshot"));
    }

    #[test]
    fn rows_of_another_captured_table_are_left_out_in_addition_to_other_bounds() {
        let captured = captured(true, None);
        let [own, other] = ["200:210:", "100:110:"].map(|text| text.parse().unwrap());
        let window = ScanWindow {
            shown_by: Some(&own),
            not_of_another: Some(&other),
            ..ScanWindow::whole(&captured)
        };
        let condition = window.condition();
        assert!(condition.contains("'200:210:'::pg_snapshot"), "{condition}");
        assert!(condition.contains("'100:110:'::pg_snapshot"), "{condition}");
    }

    #[test]
    fn a_relay_that_captures_every_row_reads_the_whole_table_without_a_condition() {
        assert_eq!(ScanWindow::whole(&captured(true, None)).condition(), "true");
    }

    #[test]
    fn rows_that_may_have_been_published_without_a_record_are_never_compared() {
        let mut captured = captured(true, None);
        captured.record.recorded_from = 70;
        let condition = ScanWindow::whole(&captured).condition();
        assert!(condition.ends_with(">= '70'::xid8"), "{condition}");
    }

    #[test]
    fn the_seq_hint_is_used_only_while_the_same_sequence_numbers_the_rows() {
        let mut captured = captured(true, None);
        assert_eq!(ScanWindow::recent(&captured).from_seq, Some(7));
        assert_eq!(ScanWindow::unrecorded(&captured).from_seq, None);
        assert_eq!(ScanWindow::whole(&captured).from_seq, None);
        captured.record.numbering = Some("2/1".into());
        assert_eq!(ScanWindow::recent(&captured).from_seq, None);
    }
}
