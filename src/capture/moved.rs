//! Handles moved rows: rows that the stream delivers as inserts although another transaction wrote them
//! first. Rows move when somebody updates a partition key, pg_partman moves rows, a table is copied and
//! swapped, or a dump is restored.
//!
//! A moved row is a new event only if the relay has never handled the row, so the relay looks up the row's
//! event id. A relay that was down may receive a moved row while the event of the original insert is still in
//! flight. In that case the look-up would find no outcome yet, so the row waits until the event has one.
//!
//! Many moved rows may wait for a long time, for example if somebody moves a large partition while the topic of
//! its events fails. All waiting rows count against the memory budget. Once the messages of waiting rows use
//! their share of the budget ([`KEPT_SHARE`]), the relay drops the messages of further waiting rows, because
//! nearly all of these rows turn out to be handled already. If one of them is new after all, the relay reads its
//! message from the table.

use std::collections::{BTreeMap, HashSet};
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

/// Maximum number of moved events in flight whose ids are remembered. They take about 5 MB.
const MAX_SENT: usize = 100_000;
/// The messages of waiting rows may use the budget `in_flight_mib` divided by this number.
const KEPT_SHARE: usize = 16;
/// Estimated number of bytes for a waiting row, in addition to its message, key and event id.
const WAITING_ROW: usize = 200;
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(5);
/// Minimum time between two log lines about skipped rows.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Marks an insert as a moved row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MovedMark {
    /// Index of the table's capture record in `SessionRecords`.
    pub(crate) record: usize,
    /// The row's `inserted_xid`: the transaction that inserted the row originally.
    pub(crate) inserted_xid: u64,
}

/// A moved row: the stream delivers it as an insert, but an earlier transaction originally inserted it.
#[derive(Debug)]
pub(crate) struct MovedRow {
    pub(crate) moved: MovedMark,
    pub(crate) row: MappedRow,
}

/// The row's event to deliver, or the error with which the event is quarantined. To save memory, the relay
/// may drop the message of the event or the payload of an unmappable row.
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

    /// The commit LSN of the transaction that moved the row, not of the transaction that first inserted it.
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

/// Looks up the moved rows of one session, and keeps the moved rows that have to wait for their look-up.
pub(crate) struct MovedRows {
    target: Target,
    bounds: Arc<[Bounds]>,
    records: RecordKeeping,
    /// The SQL session for look-ups. The first look-up opens it.
    sql: Option<Sql>,
    /// Moved rows that wait for their original insert, by the transaction of that insert.
    waiting: BTreeMap<CommitLsn, Vec<MovedRow>>,
    /// The memory that the rows in `waiting` use, in bytes.
    waiting_bytes: usize,
    /// The size of the messages in `waiting`, in bytes.
    message_bytes: usize,
    /// Limit on `message_bytes`. The relay drops the message of a waiting row that would exceed this limit.
    kept_bytes: usize,
    /// Moved rows that wait for the end of a recovery. There are few of them, because the pipeline stops
    /// reading the stream when one has to wait.
    for_recovery: Vec<MovedRow>,
    /// The events of moved rows that this session is sending, by the transaction of the move. An entry stays
    /// until its transaction and all earlier ones in the map are resolved. At most [`MAX_SENT`] events.
    sent: BTreeMap<CommitLsn, Vec<[u8; 16]>>,
    sent_ids: HashSet<[u8; 16]>,
    metrics: Metrics,
    /// Number of rows that the relay has skipped because of the bounds of their table, since the last log
    /// line about such rows.
    skipped: u64,
    logged: Option<Instant>,
}

impl MovedRows {
    /// Starts without rows. `budget` is the memory in bytes that all events may use.
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
            sent: BTreeMap::new(),
            sent_ids: HashSet::new(),
            metrics,
            skipped: 0,
            logged: None,
        }
    }

    /// Keeps a row until its original insert, in the transaction `first`, is resolved. Drops the row's
    /// message if the messages of all waiting rows would exceed their share of the budget.
    pub(crate) fn wait_for(&mut self, first: CommitLsn, mut row: MovedRow) {
        if self.message_bytes + row.row.message_bytes() > self.kept_bytes {
            row.row = row.row.without_message();
        }
        self.message_bytes += row.row.message_bytes();
        self.waiting_bytes += row.row.weight();
        self.waiting.entry(first).or_default().push(row);
    }

    /// Bytes of memory used by the rows that wait for their original insert.
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

    /// Notes that the relay is sending the event of a moved row. `commit` is the transaction that moved it.
    pub(crate) fn sends(&mut self, commit: CommitLsn, event_id: &EventId) {
        // Events beyond this limit are not remembered. If the row of such an event is moved again before the
        // event has an outcome, the relay publishes the event again.
        if self.sent_ids.len() < MAX_SENT {
            self.sent.entry(commit).or_default().push(event_id.uuid);
            self.sent_ids.insert(event_id.uuid);
        }
    }

    /// The ids of the moved rows that wait.
    pub(crate) fn waiting_ids(&self) -> impl Iterator<Item = [u8; 16]> {
        let rows = self.waiting.values().flatten().chain(&self.for_recovery);
        rows.map(|row| row.row.event_id().uuid)
    }

    /// Whether this session is already sending the event with this id, because it has received an earlier move of the
    /// same row.
    pub(crate) fn is_being_sent(&self, event_id: &EventId) -> bool {
        self.sent_ids.contains(&event_id.uuid)
    }

    /// Forgets the events of resolved transactions, up to the first unresolved transaction. The session is no longer
    /// sending these events, because every event of a resolved transaction has an outcome.
    pub(crate) fn forget_sent(&mut self, is_resolved: impl Fn(CommitLsn) -> bool) {
        while let Some(oldest) = self.sent.first_entry()
            && is_resolved(*oldest.key())
        {
            for id in oldest.remove() {
                self.sent_ids.remove(&id);
            }
        }
    }

    pub(crate) fn any_waits_for_recovery(&self) -> bool {
        !self.for_recovery.is_empty()
    }

    pub(crate) fn any_waits(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Returns whether the event of a moved row has an outcome. Runs no statement if the bounds of the table
    /// show that the row was handled before.
    ///
    /// # Errors
    /// Connection and database errors.
    pub(crate) async fn look_up(&mut self, moved: MovedMark, event_id: &EventId) -> Result<Lookup> {
        // Most moved rows below the floor were published. But a moved row may also come from a table that was not
        // captured before, and may never have been published. If the records are complete, a look-up distinguishes the
        // two cases. If published events may lack a record, a look-up proves nothing, so the relay skips the row.
        let is_handled = self.bounds.get(moved.record).is_some_and(|bounds| {
            bounds.is_from_before(moved.inserted_xid)
                || bounds.may_lack_a_record(moved.inserted_xid)
                || self.records.may_lack_records() && bounds.is_resolved(moved.inserted_xid)
        });
        if is_handled {
            self.metrics.events_skipped.inc();
            self.log_skipped(moved, event_id);
            return Ok(Lookup::Done);
        }
        self.look_up_by_id(event_id).await
    }

    /// Counts a skipped row, and logs the number of such rows at most once per [`LOG_INTERVAL`]. Skipped rows
    /// get no dispatch row, so only this log line names an event that was skipped.
    fn log_skipped(&mut self, moved: MovedMark, event_id: &EventId) {
        self.skipped += 1;
        let is_due = |logged: Instant| logged.elapsed() >= LOG_INTERVAL;
        if self.logged.is_none_or(is_due) {
            tracing::info!(
                rows = self.skipped, first_event = %event_id.shown(), inserted_xid = moved.inserted_xid,
                "skipped rows that an older transaction wrote first, for example because they were moved \
                 between partitions: their inserted_xid shows that they were handled before"
            );
            self.logged = Some(Instant::now());
            self.skipped = 0;
        }
    }

    /// Looks up an event by its id alone, because its record may have any position.
    ///
    /// # Errors
    /// Connection and database errors.
    pub(crate) async fn look_up_by_id(&mut self, event_id: &EventId) -> Result<Lookup> {
        let sql = match &self.sql {
            Some(sql) => sql,
            None => {
                let connecting = connect(&self.target, "postrider", STATEMENT_TIMEOUT);
                self.sql.insert(connecting.await?)
            }
        };
        let found = look_up_by_id(sql, &event_id.uuid, self.records).await?;
        if found == Lookup::Done {
            self.metrics.events_skipped.inc();
        }
        Ok(found)
    }
}

/// Parses an `xid8`. The intake calls this function once per row, so it avoids the UTF-8 check and
/// `parse`, which take three times as many instructions.
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
    fn an_xid_is_parsed_like_a_u64() {
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
