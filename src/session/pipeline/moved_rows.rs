//! Decides about moved rows: whether a row waits, is delivered, or is skipped because its event has an
//! outcome already. The rules are in `capture::moved`.

use replication::CommitLsn;

use super::Pipeline;
use crate::capture::moved::{MappedRow, MovedRow};
use crate::capture::unrecorded::stays_published;
use crate::error::Result;
use crate::event::{Group, Standing};
use crate::store::dispatch::Lookup;

/// How an event that was looked up has to be recorded.
pub(super) fn standing(found: Lookup) -> Standing {
    match found {
        Lookup::Repeated => Standing::Repeated,
        Lookup::New | Lookup::Done => Standing::New,
    }
}

impl Pipeline {
    /// Handles a moved row that has no record at its new position. During a recovery, the event of the
    /// row's first insert may not have its record yet, so the row waits until the recovery is over.
    pub(super) async fn on_moved(&mut self, row: MovedRow) -> Result<()> {
        self.watermark.add_event();
        if self.seam.is_some() {
            self.moved.wait_for_recovery(row);
            return Ok(());
        }
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

    /// Decides about the rows that have waited for the end of the recovery.
    pub(super) async fn decide_all_that_waited_for_recovery(&mut self) -> Result<()> {
        for row in self.moved.have_waited_for_recovery() {
            self.decide_moved(row).await?;
        }
        Ok(())
    }

    /// Takes the rows that have waited for this transaction.
    pub(super) async fn take_all_that_waited_for(&mut self, first: CommitLsn) -> Result<()> {
        for row in self.moved.have_waited_for(first) {
            self.take_moved(row).await?;
        }
        self.delivery.weigh_waiting(self.moved.waiting_bytes());
        Ok(())
    }

    /// Delivers a moved row, unless its event has an outcome already.
    async fn take_moved(&mut self, MovedRow { moved, row }: MovedRow) -> Result<()> {
        let found = self.moved.look_up(moved, row.event_id()).await?;
        let commit = row.commit();
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
