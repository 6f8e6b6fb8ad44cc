//! Takes the rows that the recovery and the auditor have read from the tables. Also answers the
//! questions of the recovery and the auditor, for example whether all these rows are resolved.

use bytes::Bytes;

use super::Pipeline;
use crate::capture::from_table::FromTable;
use crate::error::Result;
use crate::mapping::MapError;

impl Pipeline {
    /// Takes a batch of rows that the recovery or the auditor has read from the tables.
    ///
    /// # Errors
    /// An error that must end the session: a row cannot become a message, and the row is not the cause.
    pub(super) fn on_table_rows(&mut self, batch: Vec<FromTable>) -> Result<()> {
        for row in batch {
            match row {
                // The stream has brought the row because it was moved, so this session handles its event already.
                FromTable::Event(row) if self.moved.is_being_sent(&row.event.origin.event_id) => {}
                FromTable::Unmappable(MapError::Event(error))
                    if self.moved.is_being_sent(&error.known.event_id) => {}
                FromTable::Event(row) => {
                    let origin = &row.event.origin;
                    self.from_table.taken(origin.position, &origin.event_id);
                    self.delivery.take(row.topic, row.ordering_key, row.event);
                }
                FromTable::Unmappable(MapError::Event(error)) if error.fault.is_of_the_row() => {
                    let event_id = &error.known.event_id;
                    self.from_table.taken(error.at.position, event_id);
                    self.delivery.take_unmappable(error, Bytes::new())?;
                }
                FromTable::Unmappable(error) => {
                    self.send_what_came_before();
                    return Err(error.into());
                }
                FromTable::Queued(answer) => {
                    // If the task that asked has ended, nobody needs the answer.
                    let _ = answer.send(());
                }
                FromTable::Settle(answer) => self.from_table.settle(answer),
                FromTable::Unresolved { end, answer } if self.watermark.read_up_to() >= end => {
                    let waiting = self.moved.waiting_ids().collect();
                    self.delivery.begin_census(waiting, answer);
                }
                FromTable::Unresolved { .. } => {}
            }
        }
        Ok(())
    }
}
