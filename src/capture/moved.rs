//! Handles moved rows: rows that the stream brings as inserts although another transaction wrote them
//! first. Rows move when somebody updates a partition key, pg_partman moves rows, a table is copied and
//! swapped, or a dump is restored.
//!
//! A moved row is a new event only if the relay has never handled the row, so the relay looks up the
//! row's event id. Ordinary rows need no lookup. A relay that was down may get the moved row shortly
//! after the row's original insert. Then the lookup waits until the event of the original insert has
//! its outcome.
//!
//! Many rows may wait for long: for example, somebody moves a large partition while one event of it waits
//! for its topic. Nearly all of them turn out to be handled before, so the relay drops the messages of
//! waiting rows once they use [`KEPT_SHARE`] of the memory budget, and keeps only the identities. If such a
//! row is new after all, its message is read from the table. All waiting rows count against the budget.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use replication::CommitLsn;

use super::Bounds;
use crate::error::Result;
use crate::event::{Event, EventId, EventRef, OrderingKey};
use crate::mapping::EventError;
use crate::metrics::Metrics;
use crate::postgres::{Sql, Target, connect};
use crate::store::dispatch::{Lookup, look_up_by_id};
use crate::store::relay_row::RecordKeeping;

/// Waiting rows keep their messages while these use at most this part of the budget `in_flight_mib`.
const KEPT_SHARE: usize = 16;
/// Memory of a waiting row in addition to its message and texts.
const WAITING_ROW: usize = 200;
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(5);
/// Minimum time between two log lines about skipped rows.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Marks an insert as a moved row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MovedMark {
    /// Index of the captured table in the settings.
    pub(crate) table: usize,
    /// The transaction that wrote the row first.
    pub(crate) inserted_xid: u64,
}

/// A row of the stream that another transaction wrote first.
#[derive(Debug)]
pub(crate) struct MovedRow {
    pub(crate) moved: MovedMark,
    pub(crate) row: MappedRow,
}

/// The row's event to deliver, or the error with which the event is set aside. To save memory, the event
/// may be without its message, and the error without the row's payload.
#[derive(Debug)]
pub(crate) enum MappedRow {
    Event {
        topic: Arc<str>,
        ordering_key: OrderingKey,
        event: Event,
    },
    WithoutMessage {
        topic: Arc<str>,
        ordering_key: OrderingKey,
        origin: EventRef,
    },
    Unmappable {
        error: Box<EventError>,
        payload: Bytes,
    },
}

impl MappedRow {
    pub(crate) fn event_id(&self) -> &EventId {
        match self {
            Self::Event { event, .. } => &event.origin.event_id,
            Self::WithoutMessage { origin, .. } => &origin.event_id,
            Self::Unmappable { error, .. } => &error.known.event_id,
        }
    }

    /// The transaction in the stream that brought the row.
    pub(crate) fn commit(&self) -> CommitLsn {
        match self {
            Self::Event { event, .. } => event.origin.position.commit,
            Self::WithoutMessage { origin, .. } => origin.position.commit,
            Self::Unmappable { error, .. } => error.at.position.commit,
        }
    }

    /// The size of the message or payload.
    fn message_bytes(&self) -> usize {
        match self {
            Self::Event { event, .. } => event.message.len(),
            Self::WithoutMessage { .. } => 0,
            Self::Unmappable { payload, .. } => payload.len(),
        }
    }

    fn weight(&self) -> usize {
        let key = match self {
            Self::Event { ordering_key, .. } | Self::WithoutMessage { ordering_key, .. } => {
                ordering_key
            }
            Self::Unmappable { error, .. } => &error.known.ordering_key,
        };
        let texts = key.as_str().len() + self.event_id().text_bytes();
        WAITING_ROW + texts + self.message_bytes()
    }

    fn without_message(self) -> Self {
        match self {
            Self::Event {
                topic,
                ordering_key,
                event,
            } => Self::WithoutMessage {
                topic,
                ordering_key,
                origin: event.origin,
            },
            Self::Unmappable { error, .. } => Self::Unmappable {
                error,
                payload: Bytes::new(),
            },
            Self::WithoutMessage { .. } => self,
        }
    }
}

/// Looks up the moved rows of one session, and keeps the moved rows that have to wait for their lookup.
pub(crate) struct MovedRows {
    target: Target,
    bounds: Arc<[Bounds]>,
    records: RecordKeeping,
    /// The SQL session for lookups. The first lookup opens it.
    sql: Option<Sql>,
    /// Moved rows that wait for their original insert, by the transaction of that insert.
    waiting: BTreeMap<CommitLsn, Vec<MovedRow>>,
    /// The memory of these rows.
    waiting_bytes: usize,
    /// The messages of these rows, and their upper bound.
    message_bytes: usize,
    kept_bytes: usize,
    /// Moved rows that wait for the end of a recovery. The pipeline does not read the stream while there
    /// are any.
    for_recovery: Vec<MovedRow>,
    metrics: Metrics,
    /// Rows that were skipped because of their table's bounds, since the last log line about them.
    skipped: u64,
    logged: Option<Instant>,
}

impl MovedRows {
    /// `budget` is the memory in bytes that all events may use.
    pub(crate) fn new(
        target: Target,
        bounds: Arc<[Bounds]>,
        records: RecordKeeping,
        budget: usize,
        metrics: Metrics,
    ) -> Self {
        Self {
            target,
            bounds,
            records,
            sql: None,
            waiting: BTreeMap::new(),
            waiting_bytes: 0,
            message_bytes: 0,
            kept_bytes: budget / KEPT_SHARE,
            for_recovery: Vec::new(),
            metrics,
            skipped: 0,
            logged: None,
        }
    }

    /// Keeps a row until the transaction that wrote it first is resolved.
    pub(crate) fn wait_for(&mut self, first: CommitLsn, mut row: MovedRow) {
        if self.message_bytes + row.row.message_bytes() > self.kept_bytes {
            row.row = row.row.without_message();
        }
        self.message_bytes += row.row.message_bytes();
        self.waiting_bytes += row.row.weight();
        self.waiting.entry(first).or_default().push(row);
    }

    /// The memory of all rows that wait for their original insert.
    pub(crate) fn waiting_bytes(&self) -> usize {
        self.waiting_bytes
    }

    /// Takes the rows that have waited for this transaction.
    pub(crate) fn have_waited_for(&mut self, first: CommitLsn) -> Vec<MovedRow> {
        let rows = self.waiting.remove(&first).unwrap_or_default();
        for MovedRow { row, .. } in &rows {
            self.message_bytes -= row.message_bytes();
            self.waiting_bytes -= row.weight();
        }
        rows
    }

    /// Keeps a row until the recovery is over, because the recovery may have read the same row from its
    /// table.
    pub(crate) fn wait_for_recovery(&mut self, row: MovedRow) {
        self.for_recovery.push(row);
    }

    /// Takes the rows that have waited for the recovery.
    pub(crate) fn have_waited_for_recovery(&mut self) -> Vec<MovedRow> {
        std::mem::take(&mut self.for_recovery)
    }

    pub(crate) fn any_waits_for_recovery(&self) -> bool {
        !self.for_recovery.is_empty()
    }

    pub(crate) fn any_waits(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Looks up a moved row.
    ///
    /// # Errors
    /// Connection and database errors.
    pub(crate) async fn look_up(&mut self, moved: MovedMark, event_id: &EventId) -> Result<Lookup> {
        // If all events have a record, look up even a row below the floor. The row may come from a table
        // that was not captured until now, and then the row was never published.
        let is_handled = self.bounds.get(moved.table).is_some_and(|bounds| {
            bounds.is_from_before(moved.inserted_xid)
                || bounds.may_lack_a_record(moved.inserted_xid)
                || self.records.may_lack_records() && bounds.is_resolved(moved.inserted_xid)
        });
        if is_handled {
            self.metrics.events_skipped.inc();
            self.log_skipped(moved, event_id);
            return Ok(Lookup::Done);
        }
        let found = self.ask(event_id).await?;
        if found == Lookup::Done {
            self.metrics.events_skipped.inc();
        }
        Ok(found)
    }

    /// Logs skipped rows. Skipped rows get no dispatch row, so the log line is the only trace of them.
    fn log_skipped(&mut self, moved: MovedMark, event_id: &EventId) {
        self.skipped += 1;
        let is_due = |logged: Instant| logged.elapsed() >= LOG_INTERVAL;
        if self.logged.is_none_or(is_due) {
            tracing::info!(
                rows = self.skipped, first_event = %event_id.shown(), inserted_xid = moved.inserted_xid,
                "skipped inserts of rows that an older transaction had written first, as happens when \
                 rows are moved between partitions: by their inserted_xid they were handled before"
            );
            self.logged = Some(Instant::now());
            self.skipped = 0;
        }
    }

    async fn ask(&mut self, event_id: &EventId) -> Result<Lookup> {
        let sql = match &self.sql {
            Some(sql) => sql,
            None => {
                let connecting = connect(&self.target, "postrider", STATEMENT_TIMEOUT);
                self.sql.insert(connecting.await?)
            }
        };
        look_up_by_id(sql, &event_id.uuid, self.records).await
    }
}

/// Reads an `xid8`. This function is called once per row. It takes a third of the instructions of a UTF-8
/// check and `parse`.
#[inline]
pub(super) fn xid8(text: &[u8]) -> Option<u64> {
    text.iter().try_fold(0_u64, |xid, byte| {
        let digit = byte.wrapping_sub(b'0');
        let shifted = xid.checked_mul(10).filter(|_| digit < 10)?;
        shifted.checked_add(digit.into())
    })
}

#[cfg(test)]
mod tests {
    use super::xid8;

    #[test]
    fn an_xid_is_read_like_any_number() {
        for text in [
            "0",
            "742",
            "18446744073709551615",
            "18446744073709551616",
            "1x",
            "x",
            "1 ",
        ] {
            assert_eq!(xid8(text.as_bytes()), text.parse().ok(), "{text}");
        }
    }
}
