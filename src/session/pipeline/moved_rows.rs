//! Decides whether a moved row waits, is delivered, or is skipped because its event has an outcome already. A moved
//! row is a row that the stream delivers as an insert although an earlier transaction first inserted the row, for
//! example into another partition (see `capture::moved`).

use replication::CommitLsn;

use super::Pipeline;
use crate::capture::moved::{MappedRow, MovedRow};
use crate::capture::unrecorded::stays_published;
use crate::error::Result;
use crate::event::{Group, Standing};
use crate::recovery::Seam;
use crate::store::dispatch::Lookup;

/// Returns whether the event that was looked up needs a dispatch row. A repeated event needs none.
pub(super) fn standing(found: Lookup) -> Standing {
    match found {
        Lookup::Repeated => Standing::NeedsNoRow,
        Lookup::New | Lookup::Done => Standing::New,
    }
}

impl Pipeline {
    /// Handles a moved row, after [`Pipeline::look_up`] has found no record of its event. That look-up usually searches
    /// by position, so the event may have a record at another position: that of the row's original insert.
    ///
    /// During a recovery, this session may be publishing the same event from its table. If the event has no outcome
    /// yet, the moved row waits until all rows from the tables have their outcome.
    pub(super) async fn on_moved(&mut self, row: MovedRow) -> Result<()> {
        let is_settled = self.seam.as_ref().is_none_or(Seam::is_settled);
        if !is_settled {
            let found = self.moved.look_up(row.moved, row.row.event_id()).await?;
            if found != Lookup::Done {
                self.watermark.add_event();
                self.moved.wait_for_recovery(row);
            }
            return Ok(());
        }
        self.watermark.add_event();
        self.decide_moved(row).await
    }

    /// Delivers or skips a moved row. If the transaction that first inserted the row is unresolved, the
    /// row waits until that transaction is resolved.
    async fn decide_moved(&mut self, row: MovedRow) -> Result<()> {
        match self.watermark.unresolved_of(row.moved.inserted_xid as u32) {
            Some(first) => {
                self.moved.wait_for(first, row);
                self.delivery.weigh_waiting(self.moved.waiting_bytes());
                Ok(())
            }
            None => self.take_moved(row).await,
        }
    }

    /// Delivers or skips the rows that have waited for the end of the recovery.
    pub(super) async fn decide_all_that_waited_for_recovery(&mut self) -> Result<()> {
        for row in self.moved.have_waited_for_recovery() {
            self.decide_moved(row).await?;
        }
        Ok(())
    }

    /// Delivers or skips the rows that have waited for this transaction.
    pub(super) async fn take_all_that_waited_for(&mut self, first: CommitLsn) -> Result<()> {
        for row in self.moved.have_waited_for(first) {
            self.take_moved(row).await?;
        }
        self.delivery.weigh_waiting(self.moved.waiting_bytes());
        Ok(())
    }

    /// Delivers a moved row. Skips the row, and counts it as resolved, in these cases:
    ///
    /// - The event has an outcome already.
    /// - This session is already sending the event because of an earlier move of the row. The event may still fail. But
    ///   the relay confirms positions in order, and confirms the earlier move only after the event has an outcome. So
    ///   it cannot confirm this later move too early.
    /// - The auditor has read the row from the table, and the event has no outcome yet. The floor of the table rises
    ///   only after the event has an outcome. If the session ends earlier, a later audit finds the row again.
    async fn take_moved(&mut self, MovedRow { moved, row }: MovedRow) -> Result<()> {
        let commit = row.commit();
        let watermark = &self.watermark;
        self.moved
            .forget_sent(|commit| !watermark.is_unresolved(commit));
        let event_id = row.event_id();
        if self.moved.is_being_sent(event_id) || self.from_table.is_unresolved(event_id) {
            self.watermark.resolve(commit, 1);
            return Ok(());
        }
        let found = self.moved.look_up(moved, row.event_id()).await?;
        if found != Lookup::Done {
            self.moved.sends(commit, row.event_id());
        }
        match (found, row) {
            (Lookup::Done, _) => self.watermark.resolve(commit, 1),
            (Lookup::Repeated, MappedRow::Unmappable { error, .. }) => {
                stays_published(&error.known.event_id, &error);
                self.watermark.resolve(commit, 1);
            }
            (Lookup::New, MappedRow::Unmappable { error, payload }) => {
                self.delivery.take_unmappable(error, payload)?;
            }
            (
                found,
                MappedRow::WithoutMessage {
                    topic,
                    ordering_key,
                    mut origin,
                },
            ) => {
                origin.standing = standing(found);
                let group = Group {
                    topic,
                    ordering_key,
                };
                self.delivery.take_without_message(group, origin);
            }
            (
                found,
                MappedRow::Event {
                    topic,
                    ordering_key,
                    mut event,
                },
            ) => {
                event.origin.standing = standing(found);
                self.delivery.take(topic, ordering_key, event);
            }
        }
        Ok(())
    }
}
