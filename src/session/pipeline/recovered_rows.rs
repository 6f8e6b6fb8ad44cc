//! What the pipeline does differently during a recovery: it holds back the confirmed position, and skips events of
//! the stream that the relay has already read from a table. The rules are in `recovery`.

use decoder::Lsn;
use replication::Confirmable;

use super::Pipeline;
use crate::capture::earlier::LookedUp;
use crate::error::Result;
use crate::event::{EventId, EventPosition};
use crate::recovery::{RowsFromTables, SeamStep};
use crate::store::dispatch::Lookup;

impl Pipeline {
    pub(super) async fn on_step(&mut self, step: SeamStep) -> Result<()> {
        match step {
            SeamStep::Opened(sent) => self.read_rows = sent,
            SeamStep::Settled => {
                self.held_at = None;
                self.decide_all_that_waited_for_recovery().await?;
            }
            SeamStep::Over => self.seam = None,
        }
        Ok(())
    }

    /// The position that may be confirmed. Usually this is the position up to which everything is resolved. In a
    /// recovery that keeps the slot, it is an earlier position until all rows from the tables have an outcome.
    pub(in crate::session) fn confirmable(&self) -> Confirmable {
        let resolved = self.watermark.confirmable();
        self.held_at.unwrap_or(resolved)
    }

    /// Notes that the pipeline has read the stream up to this position. Forgets the rows from the tables once
    /// the stream can contain no more of them.
    pub(super) fn is_past(&mut self, position: Lsn) {
        if let Some(sent) = &self.read_rows
            && sent.ends_before(position)
        {
            self.read_rows = None;
        }
    }

    /// Whether the event must be skipped, because it is resolved or this session has read it from a table. If so,
    /// counts it in the metric of skipped events. `record` is the index of the capture record of the event's table.
    pub(super) fn was_read_from_a_table(&self, record: usize, event_id: &EventId) -> bool {
        let sent = self.read_rows.as_ref();
        let was_read_from_a_table =
            sent.is_some_and(|sent| sent.has(record, event_id, &self.from_table));
        if was_read_from_a_table {
            self.metrics.events_skipped.inc();
        }
        was_read_from_a_table
    }

    /// Looks up whether the next event of the stream has a record, and which position to use for it.
    pub(super) async fn look_up(
        &mut self,
        at: EventPosition,
        event_id: &EventId,
    ) -> Result<(Lookup, EventPosition)> {
        let LookedUp {
            found,
            position,
            by_id,
        } = self.earlier.look_up(at, event_id).await?;
        let sent = self.read_rows.as_ref();
        let may_be_recorded = sent.is_some_and(RowsFromTables::may_be_recorded);
        if found == Lookup::New && may_be_recorded && !by_id {
            return Ok((self.moved.look_up_by_id(event_id).await?, position));
        }
        Ok((found, position))
    }
}
