//! The rows of a captured table that have no known outcome: what the stream alone would leave out
//! when the slot is lost, and what a recovery would send.
//!
//! One statement for each table, whose rows are read as they are needed: neither the server's
//! answer nor anything else is held in memory whole, however many rows there are. (A cursor would
//! fetch by number of rows, and a row may have 9 MB.)

use std::pin::Pin;

use futures_util::TryStreamExt;
use tokio_postgres::{SimpleQueryMessage, SimpleQueryRow, SimpleQueryStream};

use super::blocked::{Blocked, Firsts};
use crate::dispatch::Resolved;
use crate::error::Result;
use crate::lanes::Standing;
use crate::map::{MapError, TableSettings};
use crate::postgres::Sql;
use crate::relay::delivery::stays_published;
use crate::relay::from_table::FIRST_PLACE;
use crate::table::{TableEvent, TableReader, altered_since};
use crate::watermark::CommitLsn;

/// Rows without a known outcome, each key in its order.
pub(crate) struct Unrecorded {
    reader: TableReader,
    rows: Pin<Box<SimpleQueryStream>>,
    /// Whether there are some among them that were delivered, or have a record all the same.
    repeats: bool,
    blocked: Blocked,
}

impl Unrecorded {
    /// Starts the statement. `firsts` is empty where each event has a record. Within a transaction
    /// of one snapshot the records are as old as the rows.
    ///
    /// # Errors
    /// Those of a statement; `slot-busy` when the table has been altered since its columns were looked up.
    pub(crate) async fn of(
        sql: &Sql,
        reader: TableReader,
        table: &TableSettings,
        resolved: &Resolved,
        firsts: &Firsts,
    ) -> Result<Self> {
        let blocked = Blocked::of(sql, table, &reader, resolved, firsts).await?;
        let (id, order) = (reader.event_id_sql(), reader.order_sql());
        let lacks_outcome = resolved.lacks_outcome(id);
        let statement = match resolved.repeats() {
            true => format!(
                "{} where {lacks_outcome} or {} and {id} = any ({}) order by {order}",
                reader.select_more_sql(&format!(
                    "exists (select from outbox.dispatch d where d.event_id = {id})"
                )),
                resolved.is_recent(),
                blocked.firsts_sql(),
            ),
            false => format!(
                "{} where {lacks_outcome} order by {order}",
                reader.select_sql()
            ),
        };
        let rows = sql.simple_query_raw(&statement).await;
        let rows = Box::pin(rows.map_err(altered_since)?);
        Ok(Self {
            reader,
            rows,
            repeats: resolved.repeats(),
            blocked,
        })
    }

    /// The next row; `None` after the last. Dropping the future loses nothing.
    ///
    /// # Errors
    /// Those of the connection.
    pub(crate) async fn next(&mut self) -> Result<Option<SimpleQueryRow>> {
        while let Some(message) = self.rows.try_next().await.map_err(altered_since)? {
            if let SimpleQueryMessage::Row(row) = message {
                return Ok(Some(row));
            }
        }
        Ok(None)
    }

    /// The row as the event at this place, or at this ordinal of [`FIRST_PLACE`] when it stands
    /// before what blocks its key; `None` when there is nothing to send.
    ///
    /// # Errors
    /// It cannot become a message.
    pub(crate) fn event(
        &mut self,
        row: &SimpleQueryRow,
        commit: CommitLsn,
        ordinal: u32,
    ) -> Option<Result<TableEvent, MapError>> {
        let event = self.reader.event(row, commit, ordinal);
        if !self.repeats {
            return Some(event);
        }
        let event_id = match &event {
            Ok(found) => found.event.origin.event_id.clone(),
            Err(MapError::Event(error)) => error.known.event_id.clone(),
            Err(_) => return Some(event),
        };
        if self.blocked.passes(&event_id.uuid) {
            return None;
        }
        let is_published = self.reader.more(row) == Some("t");
        match event {
            Ok(mut found) => {
                let origin = &mut found.event.origin;
                if is_published {
                    origin.standing = Standing::Repeated;
                }
                if self.blocked.is_before(&found.topic, &found.ordering_key) {
                    origin.commit = FIRST_PLACE;
                }
                Some(Ok(found))
            }
            Err(error) if is_published => {
                stays_published(&event_id, &error);
                None
            }
            Err(error) => Some(Err(error)),
        }
    }

    /// When the row's event happened, as its column says.
    pub(crate) fn occurred_at<'r>(&self, row: &'r SimpleQueryRow) -> Option<&'r str> {
        self.reader.occurred_at(row)
    }
}
