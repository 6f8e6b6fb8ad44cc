//! Reads the rows of a captured table that still have to be published although the stream does not
//! contain them. For example, after a slot was lost, the new slot does not stream older rows, so a
//! recovery publishes them from the table.
//!
//! Short statements find the rows (`scan`). The rows of each key are returned in the order of their
//! inserts. Only a portion of the rows is in memory at a time.

use std::collections::VecDeque;
use std::sync::{LazyLock, Mutex, PoisonError};

use super::ScanWindow;
use super::blocked::{Blocked, FirstQuarantined};
use super::candidate::DispatchState;
use super::rows::{ReadRow, Rows};
use super::scan::Scan;
use super::table::{RowValues, TableEvent, TableReader};
use crate::error::Result;
use crate::event::{EventId, EventPosition, Standing};
use crate::mapping::{MapError, TableSettings};
use crate::postgres::Sql;
use crate::throttled_log::ThrottledLog;

/// Reads the rows of a table that may have to be published. The rows of each key are read in the order of
/// their inserts.
pub(crate) struct Unrecorded<'a> {
    sql: &'a Sql,
    reader: TableReader,
    scan: Scan<'a>,
    rows: Rows,
    ready: VecDeque<ReadRow>,
    blocked: Blocked,
}

impl<'a> Unrecorded<'a> {
    /// Prepares to read the rows of `window`. `firsts` has the first quarantined event of each blocked key. Rows
    /// that come before this event may still have to be published.
    ///
    /// # Errors
    /// Database errors; `slot-busy` when the table was altered after its columns were looked
    /// up.
    pub(crate) async fn of(
        sql: &'a Sql,
        reader: TableReader,
        table: &TableSettings,
        window: ScanWindow<'a>,
        firsts: &FirstQuarantined,
    ) -> Result<Self> {
        let blocked = Blocked::of(sql, table, &reader, &window, firsts).await?;
        Ok(Self {
            sql,
            scan: Scan::new(window, &reader, &blocked.first_ids()),
            reader,
            rows: Rows::new(),
            ready: VecDeque::new(),
            blocked,
        })
    }

    /// Returns the next row, or `None` after the last row.
    ///
    /// # Errors
    /// The errors of [`Scan::next`] and [`Rows::portion`].
    pub(crate) async fn next(&mut self) -> Result<Option<ReadRow>> {
        loop {
            if let Some(row) = self.ready.pop_front() {
                return Ok(Some(row));
            }
            if self.rows.is_empty() {
                match self.scan.next(self.sql).await? {
                    Some(found) => self.rows.add(found),
                    None => return Ok(None),
                }
                continue;
            }
            let portion = self.rows.portion(self.sql, &self.reader).await?;
            self.ready.extend(portion);
        }
    }

    /// Makes the row's event, with this position. If the row comes before the first quarantined event of its key, the
    /// event gets a commit LSN just below that of the quarantined event instead.
    ///
    /// Returns `None` if there is nothing to publish:
    ///
    /// - The row's event is set aside, or is the first quarantined event of its key.
    /// - The row's event was published before, and the row can no longer become a message.
    ///
    /// # Errors
    /// The row cannot become a message, and its event was not published before.
    pub(crate) fn event(
        &mut self,
        row: &ReadRow,
        position: EventPosition,
    ) -> Option<Result<TableEvent, MapError>> {
        if self.blocked.passes(row.id.as_bytes()) || row.record == DispatchState::SetAside {
            return None;
        }
        let mut event = self.reader.event(&row.values, position);
        let is_published = row.record == DispatchState::Published;
        match &mut event {
            Ok(found) => {
                let origin = &mut found.event.origin;
                if is_published {
                    origin.standing = Standing::NeedsNoRow;
                }
                let before = self
                    .blocked
                    .commit_of_next(&found.topic, &found.ordering_key);
                origin.position.commit = before.unwrap_or(position.commit);
            }
            Err(MapError::Event(error)) => {
                // Set the id under which the scan found the row, even if the mapper could not read the id.
                // Without a record under this id, every scan would find the row again.
                error.known.event_id.uuid = row.id.into_bytes();
                if is_published {
                    stays_published(&error.known.event_id, error);
                    return None;
                }
                let topic = error.known.topic.as_ref();
                let key = &error.known.ordering_key;
                let before = topic.and_then(|topic| self.blocked.commit_of_next(topic, key));
                error.at.position.commit = before.unwrap_or(position.commit);
            }
            Err(_) => {}
        }
        Some(event)
    }

    /// When the event happened, according to the row's column.
    pub(crate) fn occurred_at<'r>(&self, row: &'r RowValues) -> Option<&'r str> {
        self.reader.occurred_at(row)
    }
}

/// Logs that a published event cannot be published again. The event stays published and does not go to
/// quarantine, because its key must not wait for an event that consumers already have.
pub(crate) fn stays_published(event: &EventId, error: &dyn std::fmt::Display) {
    static LOG: LazyLock<Mutex<ThrottledLog<()>>> = LazyLock::new(Mutex::default);
    let mut log = LOG.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(since_last) = log.due(()) {
        tracing::warn!(
            event = event.shown(),
            since_last,
            "the event was published before, and cannot be published again: {error}"
        );
    }
}
