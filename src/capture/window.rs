//! Writes the SQL condition that selects the rows of a walk over a captured table.
//!
//! The lower bound is a transaction number, usually the floor of the capture record. The upper bound is a
//! snapshot, a transaction number, or none. Rows that were committed before capturing began never match.
//!
//! Not here: how the rows are walked (`scan`).

use slot_manager::quoted_identifier;
use slot_manager::table::WRITTEN_BEFORE_ATTACHED;

use super::captured::Captured;
use super::shape::{BY_XMIN, xids_sql};
use crate::postgres::Snapshot;
use crate::store::relay_row::RecordKeeping;

/// The bounds of a walk. A bound that is `None` leaves no rows out.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ScanWindow<'a> {
    pub(crate) captured: &'a Captured,
    /// Rows of transactions before this transaction are left out, except in new partitions and in partitions
    /// with a lower floor of their own. 0 for no bound.
    pub(crate) from_xid: u64,
    /// Rows with a `seq` up to this one are skipped, because they usually belong to transactions before
    /// `from_xid`. If such a row belongs to a later transaction, only an audit of the whole table finds it.
    pub(crate) from_seq: Option<i64>,
    /// Rows of this transaction and of later transactions are left out.
    pub(crate) below_xid: Option<u64>,
    /// Rows that are not visible in this snapshot are left out.
    pub(crate) shown_by: Option<&'a Snapshot>,
    /// Set if this table was detached from its captured table, and now belongs to another captured table. The value
    /// is the snapshot `since`, with which the capture of that other table began. Rows that are not visible in the
    /// snapshot are left out here, because the relay publishes them through the other table.
    pub(crate) not_of_another: Option<&'a Snapshot>,
    /// Whether rows without a `seq` are included.
    pub(crate) with_unnumbered: bool,
    /// Whether the walk leaves out rows that an unfinished recovery has already resolved. If false, the walk returns
    /// these rows, and marks their events as set aside (`DispatchState`). The caller then learns their ids, but does
    /// not send the events. Rows with an indexed `seq` are always returned and marked.
    pub(crate) without_recovered: bool,
    /// Which events have a record. If published events may lack a record, a missing record proves nothing, so
    /// the walk returns rows with a record too.
    pub(crate) records: RecordKeeping,
}

impl<'a> ScanWindow<'a> {
    /// Selects all rows that may be unresolved.
    pub(crate) fn unresolved(captured: &'a Captured, records: RecordKeeping) -> Self {
        let Captured { record, shape } = captured;
        Self {
            captured,
            from_xid: record.floor,
            from_seq: None,
            below_xid: None,
            shown_by: None,
            not_of_another: None,
            without_recovered: false,
            with_unnumbered: shape.seq.as_ref().is_none_or(|seq| seq.is_nullable),
            records,
        }
    }

    /// Like [`unresolved`](Self::unresolved), for a relay that records every published event. The walk then returns
    /// only rows without a record.
    pub(crate) fn unrecorded(captured: &'a Captured) -> Self {
        Self::unresolved(captured, RecordKeeping::COMPLETE)
    }

    /// Selects the rows that the frequent audits compare: rows that may be unresolved. If a sequence
    /// numbers the rows, this window skips rows without a `seq` and rows with a `seq` up to
    /// `floor_seq`. Comparisons of the whole table cover these rows.
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

    /// Whether the scan finds some rows by their `ctid`. A rewrite of the table changes every `ctid`, so
    /// the caller must then check that the table was not rewritten during the scan.
    pub(crate) fn finds_rows_by_ctid(&self) -> bool {
        self.with_unnumbered || self.captured.shape.numbered().is_none()
    }

    /// Selects all rows of the table that should have a record. The scan returns the rows that have
    /// none.
    pub(crate) fn whole(captured: &'a Captured) -> Self {
        Self {
            from_xid: captured.record.recorded_from,
            ..Self::unrecorded(captured)
        }
    }

    /// The condition that a row of `e` is in a partition that was added since the floor was raised.
    /// `None` if there is no such partition. Also `None` if every event of the table must have a record,
    /// because the auditor then compares the whole table.
    fn new_partitions(&self) -> Option<String> {
        let new = self.captured.new_partitions();
        let may_lack_records =
            self.records.may_lack_records() || self.captured.record.recorded_from > 0;
        let is_needed = may_lack_records && !new.is_empty();
        is_needed.then(|| format!("e.tableoid = any ('{{{}}}'::oid[])", new.join(",")))
    }

    /// The condition that the stream may have missed a row of `e`. The stream lacks rows that were in a partition
    /// before it was attached. `None` if there is no new partition to check (`new_partitions`).
    ///
    /// The condition selects two kinds of rows in new partitions, within the other bounds of the window:
    ///
    /// - Rows of transactions below the floor (`from_xid`). These transactions ended before the floor was raised, and
    ///   the partition was attached later. So the partition was not attached yet when the rows were written.
    /// - Rows that were written before the partition was attached ([`WRITTEN_BEFORE_ATTACHED`]).
    pub(crate) fn overlooked(&self) -> Option<String> {
        let new = self.new_partitions()?;
        let any = Self {
            from_xid: 0,
            ..*self
        };
        let xid = self.captured.inserted_xid_sql();
        let (from, others) = (self.from_xid, any.condition());
        Some(format!(
            "{new} and ({xid} < '{from}'::xid8 or {WRITTEN_BEFORE_ATTACHED}) and {others}"
        ))
    }

    /// The condition that an unfinished recovery has resolved a row of `e`. `None` if there is no such
    /// recovery. Also `None` if every event has a record, because the records then say which rows are
    /// resolved.
    ///
    /// A row that was written again after the recovery had read it, for example because the row was moved, does
    /// not count as resolved: its `xmin` is a later transaction.
    pub(crate) fn recovered(&self) -> Option<String> {
        let progress = self.captured.recovery_progress();
        let progress = progress.filter(|_| self.records.may_lack_records())?;
        let xid = self.captured.inserted_xid_sql();
        let mut conditions = vec![format!(
            "e.tableoid = any ('{{{}}}'::oid[])",
            progress.partitions
        )];
        if let (Some(seq), Some(column)) = (progress.seq, &progress.column) {
            let column = quoted_identifier(column);
            // The recovery reads the rows without a `seq` first, so they are resolved too.
            conditions.push(format!(
                "(e.{column} <= '{seq}'::bigint or e.{column} is null)"
            ));
        }
        for xid in [&*xid, BY_XMIN] {
            conditions.push(format!("{xid} < '{}'::xid8", progress.below));
        }
        Some(conditions.join(" and "))
    }

    /// The condition that a row of `e` is in the window.
    pub(crate) fn condition(&self) -> String {
        let Captured { record, shape } = self.captured;
        let xid = self.captured.inserted_xid_sql();
        let is_exact = shape.tells_top_level_transactions(&record.added_xids);
        let visible = |snapshot: &Snapshot| {
            format!("pg_catalog.pg_visible_in_snapshot({xid}, '{snapshot}'::pg_snapshot)")
        };
        let mut conditions = Vec::new();
        // A row that is older than the column `inserted_xid` has the transaction that added the column as its
        // `inserted_xid`. Once the floor of the table is above this transaction, these old rows are resolved, so leave
        // them out. But a partition may have a floor of its own. If that floor is not above the transaction, the old
        // rows of the partition may be unresolved, so keep them.
        let added = &record.added_xids;
        let last_added = added.iter().max().filter(|xid| record.floor > **xid);
        if let Some(last_added) = last_added.filter(|_| shape.has_inserted_xid) {
            let is_later = format!("e.inserted_xid <> all ({})", xids_sql(added));
            let behind = self.captured.with_own_floors(last_added + 1);
            let behind: Vec<String> = behind.map(|(oid, _)| oid.to_string()).collect();
            conditions.push(if behind.is_empty() {
                is_later
            } else {
                let behind = behind.join(",");
                format!("({is_later} or e.tableoid = any ('{{{behind}}}'::oid[]))")
            });
        }
        if self.from_xid > 0 {
            let recent = format!("{xid} >= '{}'::xid8", self.from_xid);
            let others = own_floors_sql(self.captured, self.from_xid);
            let others = self.new_partitions().into_iter().chain(others);
            conditions.push(match others.collect::<Vec<_>>().join(" or ") {
                none if none.is_empty() => recent,
                others => format!("({recent} or {others})"),
            });
        }
        if let Some(below) = self.below_xid {
            conditions.push(format!("{xid} < '{below}'::xid8"));
        }
        match &record.since {
            Some(since) if is_exact => {
                let own = shape.has_own_xid_sql(record.is_adopted);
                conditions.push(format!(
                    "case when {own} then not {} else {xid} >= '{}'::xid8 end",
                    visible(since),
                    since.xmin()
                ));
            }
            // The `xmin` of a row may be a subtransaction, and a snapshot does not list the subtransactions of
            // the transactions that were running. So only transaction ids below the snapshot's own `xmin`
            // are certainly visible in it, and all other rows count as new.
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

/// Some partitions have their own floor, lower than `floor` ([`Captured::with_own_floors`]). Returns the condition that
/// a row of `e` is in such a partition, and that its transaction is not below the partition's own floor. `None` if
/// there is no such partition.
fn own_floors_sql(captured: &Captured, floor: u64) -> Option<String> {
    let xid = captured.inserted_xid_sql();
    let own = captured
        .with_own_floors(floor)
        .map(|(oid, own)| format!("(e.tableoid = '{oid}'::oid and {xid} >= '{own}'::xid8)"));
    let own: Vec<String> = own.collect();
    (!own.is_empty()).then(|| own.join(" or "))
}

/// The condition that a row of `e` is visible in this snapshot.
pub(super) fn shown_sql(captured: &Captured, snapshot: &Snapshot) -> String {
    let shown =
        |xid: &str| format!("pg_catalog.pg_visible_in_snapshot({xid}, '{snapshot}'::pg_snapshot)");
    let by_id = shown(&captured.inserted_xid_sql());
    // In a table with an adopted record, `inserted_xid` may be the id of a transaction on another server. So a
    // row also counts as visible if its `xmin` is visible in the snapshot.
    if captured.record.is_adopted && captured.shape.has_inserted_xid {
        return format!("({by_id} or {})", shown(BY_XMIN));
    }
    by_id
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
                recovery_progress: None,
                uncaptured: std::collections::BTreeMap::new(),
                settled: std::collections::BTreeMap::new(),
                is_adopted: false,
            },
            shape: Shape {
                oid: 1,
                has_inserted_xid,
                unfit_inserted_xid: None,
                is_subscribed: false,
                has_column_seq: true,
                missing_xids: Vec::new(),
                partitions: String::new(),
                filled: Vec::new(),
                below: Vec::new(),
                above: Vec::new(),
                files: String::new(),
                attached: String::new(),
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
        let xid = captured.inserted_xid_sql();
        let own = captured.shape.has_own_xid_sql(false);
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
