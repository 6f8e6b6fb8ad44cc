//! Ends an audit that has compared the tables: raises the floors once every event up to the noted position has its
//! outcome.
//!
//! This may take long, for example while a topic is missing. Meanwhile the auditor neither raises a floor nor forgets
//! a gap. After [`INTERVAL`], or later if the comparison was slow, it begins another audit, which finds later gaps.

use std::time::{Duration, Instant};

use super::former::FormerPartitions;
use super::{AT_ONCE, AuditState, AuditWait, INTERVAL, SOON};
use crate::capture::claim::Captured;
use crate::error::Result;
use crate::postgres::Sql;
use crate::store::relay_row::audits::AuditHistory;

/// The result of a comparison, and the state of the tables at that time.
pub(super) struct ComparedTables {
    pub(super) captured: Vec<Captured>,
    pub(super) former: FormerPartitions,
    pub(super) earlier: AuditHistory,
    /// Fingerprint of the publication.
    pub(super) publication: String,
    /// Whether there is something to record.
    pub(super) writes: bool,
    pub(super) at: Instant,
}

impl ComparedTables {
    /// Whether the publication and the tables still are as they were during the comparison.
    pub(super) fn is_of(&self, publication: &str) -> bool {
        self.publication == publication
    }
}

/// Whether the audit should raise the floor to the transaction id `xmin` even if nothing else has changed. It should if
/// the column `inserted_xid` was added to the table, and the floor is not yet above the transaction that added it.
///
/// In rows that are older than the column, `inserted_xid` does not name the transaction that inserted the row. For
/// these rows, the relay uses PostgreSQL's system column `xmin` instead. But an update of such a row changes its
/// `xmin`, so the row looks new. This no longer matters once the floor is above the transaction that added the column,
/// because all rows that are older than the column then count as resolved.
fn has_new_column(captured: &Captured, xmin: u64) -> bool {
    let floor = captured.record.floor;
    let mut added = captured.record.added_xids.iter();
    xmin > floor && added.any(|xid| *xid >= floor)
}

impl AuditState {
    /// Raises the floors if the slot has confirmed the position of this audit (`reached`) and every row that the
    /// auditor has sent has its outcome. Returns the time until the next step.
    pub(super) async fn conclude(
        &mut self,
        sql: &Sql,
        waiting: AuditWait,
        compared: ComparedTables,
        reached: Option<bool>,
    ) -> Result<Duration> {
        if self.may_grow(waiting) {
            self.waiting = None;
            return Ok(SOON);
        }
        if !(reached == Some(true) && self.is_settled()) {
            // The next comparison walks the same rows again, so it must not come too soon after a long one.
            if compared.at.elapsed() < INTERVAL.max(10 * self.took) {
                self.compared = Some(compared);
            } else {
                self.waiting = None;
            }
            return Ok(AT_ONCE);
        }
        let ComparedTables {
            captured,
            former,
            earlier,
            publication,
            writes,
            ..
        } = compared;
        let writes = writes
            || former.any_change()
            || self.goal.is_some() && waiting.xmin > self.floor
            || captured.iter().any(|one| has_new_column(one, waiting.xmin));
        // Write only if something has changed, so that an idle relay writes nothing.
        if writes {
            self.resolved(sql, &captured, &former, waiting, &publication, &earlier)
                .await?;
            self.floor = waiting.xmin;
            self.goal = self.goal.filter(|goal| waiting.xmin < *goal);
        }
        self.waiting = None;
        (self.gap, self.everything, self.has_trace) = (None, false, false);
        Ok(if earlier.records.may_lack_records() || former.any_waits {
            SOON
        } else {
            INTERVAL
        })
    }

    /// Whether every row that the auditor has sent has its outcome.
    fn is_settled(&mut self) -> bool {
        if let Some(settling) = &mut self.settling
            && settling.try_recv().is_err()
        {
            return false;
        }
        self.settling = None;
        true
    }
}
