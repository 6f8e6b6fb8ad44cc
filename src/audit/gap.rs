//! Decides which tables the auditor compares as a whole after a gap, and when the gap is closed. A gap is a set of
//! committed rows that the stream has left out.
//!
//! The auditor recognises a possible gap by a trace in the catalogue, such as a changed publication. A transaction that
//! was open when the change was made may commit rows of the gap later. The `seq` of these rows may be low, because the
//! transaction drew the number early or chose its own. Later audits start at a higher `seq`, so they would miss these
//! rows.
//!
//! So the auditor notes the next transaction id when it finds the trace. It compares whole tables at once, and again
//! when all older transactions have ended. Only after that does it raise the floors and record the trace as covered. If
//! the session ends earlier, the next session finds the same trace and starts over.

use super::{AuditState, AuditWait};
use crate::capture::claim::Captured;
use crate::error::Result;
use crate::postgres::{Sql, own_transaction_id};
use crate::store::relay_row::RecordKeeping;
use crate::store::relay_row::audits::AuditHistory;

/// A gap that has left a trace in the catalogue.
#[derive(Debug)]
pub(super) struct PossibleGap {
    /// The changed values in the catalogue: the fingerprint of the publication, and the partitions of each table
    /// that has new ones. If a later audit finds other values, the trace is new.
    trace: String,
    /// Whether each table may have rows of the gap, by the index of the table in the settings.
    tables: Vec<bool>,
    /// The next transaction id when the trace was found. Transactions from this id on have no rows of the gap.
    horizon: u64,
    /// The `xmin` of the latest comparison since the trace was found. This comparison covered the transactions below
    /// this id. `None` before the first comparison.
    pub(super) compared_to: Option<u64>,
}

impl PossibleGap {
    /// Whether the auditor must compare whole tables now. It compares them twice for each gap: when it has found the
    /// trace of the gap, and when all transactions that could have rows of the gap have ended.
    fn is_due(&self, waiting: AuditWait) -> bool {
        self.compared_to.is_none_or(|xmin| {
            let is_complete = xmin >= self.horizon;
            !is_complete && waiting.xmin >= self.horizon
        })
    }
}

impl AuditState {
    /// Lets the views show that rows may be missing, if the publication or a captured table has changed since the last
    /// audit, and the auditor has not compared the tables since.
    ///
    /// Does nothing if the relay's row has no fingerprint of an earlier audit:
    ///
    /// - The fingerprint is NULL if the session compares all rows only as a precaution, for example because the slot
    ///   was ahead of the recorded position. Nothing then indicates that rows are missing.
    /// - The fingerprint is empty if this session has found the publication wrong. The supervisor then shows the gap.
    pub(super) fn shows_gap(&self, earlier: &AuditHistory, fingerprint: &str) {
        let known = earlier
            .publication
            .as_deref()
            .filter(|known| !known.is_empty());
        let has_changed = known.is_some_and(|known| known != fingerprint);
        let gap = self.gap.as_ref();
        if has_changed && gap.is_none_or(|gap| gap.compared_to.is_none()) {
            self.subject.metrics.gap_is_seen();
        }
    }

    /// Looks for traces of a gap, and notes them in `self.gap`. There are two kinds of traces:
    ///
    /// - The stream may have left out rows of every table, for example because the publication has changed. The caller
    ///   then sets `change` to the fingerprint of the publication.
    /// - A table has a new partition with rows. The stream might not have contained rows that were in the partition
    ///   before it was attached.
    ///
    /// Returns true if the traces are new. The audit must then begin again, because transactions that were open when it
    /// began may have rows of the gap. The audit compares only rows of transactions that had ended when it began.
    ///
    /// # Errors
    /// Database errors.
    pub(super) async fn notes_gap(
        &mut self,
        sql: &Sql,
        change: Option<&str>,
        captured: &[Captured],
        records: RecordKeeping,
        waiting: AuditWait,
    ) -> Result<bool> {
        let has_grown = |Captured { record, shape }: &Captured| {
            let known = record.partitions.as_deref();
            // If published events may lack records, new partitions are no trace: the caller has already checked them
            // (`any_overlooked`). If the stream may have left out a row of them, the caller has ended the session.
            !records.may_lack_records() && known.is_some_and(|known| shape.has_grown_since(known))
        };
        let grown = captured.iter().filter(|captured| has_grown(captured));
        let grown = grown.map(|captured| captured.shape.partitions.as_str());
        let traces: Vec<&str> = change.into_iter().chain(grown).collect();
        if traces.is_empty() {
            self.gap = None;
            return Ok(false);
        }
        let trace = traces.join(" ");
        if self.gap.as_ref().is_some_and(|gap| gap.trace == trace) {
            return Ok(false);
        }
        let horizon = own_transaction_id(&**sql).await? + 1;
        self.gap = Some(PossibleGap {
            trace,
            tables: captured
                .iter()
                .map(|captured| change.is_some() || has_grown(captured))
                .collect(),
            horizon,
            compared_to: None,
        });
        Ok(waiting.xmin < horizon)
    }

    /// Whether open transactions may still commit rows of the gap.
    pub(super) fn may_grow(&self, waiting: AuditWait) -> bool {
        self.gap
            .as_ref()
            .is_some_and(|gap| waiting.xmin < gap.horizon)
    }

    /// Whether this audit compares all rows of a table, not only the recent ones. `table` is the index of the table in
    /// the settings. The auditor compares all rows once when the trace of a gap is new, and once more when the gap can
    /// no longer grow.
    pub(super) fn compares_whole(&self, table: usize, waiting: AuditWait) -> bool {
        self.gap.as_ref().is_some_and(|gap| {
            gap.is_due(waiting) && gap.tables.get(table).copied().unwrap_or(true)
        })
    }

    /// Whether this audit reads the former partitions. Without a gap, every audit reads them.
    ///
    /// For each gap, two audits read the former partitions: the first one, and the last one, after all transactions
    /// that may have rows of the gap have ended. The audits between these two would only read the same rows again,
    /// because the floors do not rise before the last audit.
    pub(super) fn reads_former(&self, waiting: AuditWait) -> bool {
        self.gap.as_ref().is_none_or(|gap| gap.is_due(waiting))
    }
}

#[cfg(test)]
mod tests {
    use decoder::Lsn;

    use super::*;

    #[test]
    fn rows_are_looked_for_when_a_gap_is_new_and_when_it_can_no_longer_grow() {
        let mut gap = PossibleGap {
            trace: "changed".to_owned(),
            tables: vec![true],
            horizon: 100,
            compared_to: None,
        };
        let audit = |xmin| AuditWait {
            xmin,
            end: Lsn::new(8),
        };
        assert!(gap.is_due(audit(90)));
        gap.compared_to = Some(90);
        assert!(!gap.is_due(audit(90)) && !gap.is_due(audit(99)));
        assert!(gap.is_due(audit(100)));
        gap.compared_to = Some(100);
        assert!(!gap.is_due(audit(100)) && !gap.is_due(audit(120)));
    }
}
