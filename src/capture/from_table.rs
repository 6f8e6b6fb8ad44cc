//! The channel from the recovery and the auditor to the pipeline. It carries rows that the recovery and the
//! auditor have read from the captured tables.
//!
//! The channel holds one batch of limited size. The pipeline takes the next batch when the delivery has room,
//! so the channel applies backpressure. The watermark does not cover events from a table, because they do not
//! have the position of a commit (`positions`). Instead, this module remembers which of them are unresolved.

mod receiving;

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use decoder::Lsn;
use tokio::sync::{mpsc, oneshot};
use uuid::Uuid;

pub(crate) use self::receiving::TableRows;
use super::table::TableEvent;
use super::unrecorded::Unrecorded;
use crate::error::Error;
use crate::event::EventPosition;
use crate::mapping::MapError;

/// A batch is sent once its messages have this total size, so that the channel uses little memory. The last
/// message may make the batch larger than this.
const BATCH_BYTES: usize = 256 << 10;
/// Maximum number of rows in a batch.
const BATCH_ROWS: usize = 1_000;

/// An item of the channel.
#[derive(Debug)]
pub(crate) enum FromTable {
    /// An event to deliver, after all queued events of its key.
    Event(TableEvent),
    /// A row that cannot become a message.
    Unmappable(MapError),
    /// The pipeline answers as soon as it takes this item. By then, all events that were sent before this
    /// item are queued for their keys.
    Queued(oneshot::Sender<()>),
    /// The pipeline answers when all events from tables are resolved, including all events that were sent
    /// before this item.
    Settle(oneshot::Sender<()>),
    /// The pipeline answers with the ids of all unresolved events in memory, once it knows them. If it has not read the
    /// stream up to the position `end` yet, it drops `answer` instead.
    Unresolved {
        end: Lsn,
        answer: oneshot::Sender<UnresolvedIds>,
    },
}

/// The ids of unresolved events.
pub(crate) type UnresolvedIds = HashSet<[u8; 16], foldhash::fast::RandomState>;

pub(crate) fn channel() -> (TableSender, TableRows) {
    let (sender, receiver) = mpsc::channel(1);
    let resolved_below = Arc::new(AtomicU32::new(0));
    let rows = TableRows::new(receiver, resolved_below.clone());
    (TableSender::new(sender, resolved_below), rows)
}

/// Whether more rows follow soon. This is the case if the last item is a row, because a task that has sent
/// all its rows then sends an item that asks for an answer ([`FromTable::Queued`] or [`FromTable::Settle`]).
pub(crate) fn has_more(batch: &[FromTable]) -> bool {
    let last = batch.last();
    matches!(last, Some(FromTable::Event(_) | FromTable::Unmappable(_)))
}

/// The session that should deliver the rows has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SessionEnded;

/// The sending end of the channel.
#[derive(Debug)]
pub(crate) struct TableSender {
    batches: mpsc::Sender<Vec<FromTable>>,
    batch: Vec<FromTable>,
    bytes: usize,
    resolved_below: Arc<AtomicU32>,
}

impl TableSender {
    fn new(batches: mpsc::Sender<Vec<FromTable>>, resolved_below: Arc<AtomicU32>) -> Self {
        Self {
            batches,
            batch: Vec::new(),
            bytes: 0,
            resolved_below,
        }
    }

    /// Returns a second sender into the same pipeline. [`settled`](Self::settled) waits for the rows of
    /// both senders.
    pub(crate) fn another(&self) -> Self {
        Self::new(self.batches.clone(), self.resolved_below.clone())
    }

    /// Returns the ordinal below which all events from tables are resolved. Returns 0 if no event is resolved
    /// yet.
    pub(crate) fn resolved_below(&self) -> u32 {
        self.resolved_below.load(Ordering::Acquire)
    }

    /// Adds a row to the batch, and sends the batch if it is full.
    pub(crate) async fn send(&mut self, row: FromTable) -> Result<(), SessionEnded> {
        if let FromTable::Event(row) = &row {
            self.bytes += row.event.message.len();
        }
        self.batch.push(row);
        if self.bytes >= BATCH_BYTES || self.batch.len() >= BATCH_ROWS {
            return self.flush().await;
        }
        Ok(())
    }

    /// Waits until all events that were sent are queued for their keys. If the pipeline later takes more events
    /// of these keys, it publishes them after the queued events.
    pub(crate) async fn queued(&mut self) -> Result<(), SessionEnded> {
        self.ask(FromTable::Queued).await
    }

    /// Waits until all events that were sent are resolved.
    pub(crate) async fn settled(&mut self) -> Result<(), SessionEnded> {
        self.ask(FromTable::Settle).await
    }

    /// Sends the batch. The returned receiver gets a message when all events that were sent are resolved.
    pub(crate) async fn settling(&mut self) -> Result<oneshot::Receiver<()>, SessionEnded> {
        self.put(FromTable::Settle).await
    }

    /// Returns the ids of all unresolved events that the pipeline has read from the stream or taken from a table. Some
    /// of these events may have been resolved meanwhile. Returns `None` if the pipeline has not read the stream up to
    /// the position `end` yet, or if the session has ended.
    pub(crate) async fn unresolved(
        &mut self,
        end: Lsn,
    ) -> Result<Option<UnresolvedIds>, SessionEnded> {
        let answered = self.put(|answer| FromTable::Unresolved { end, answer });
        Ok(answered.await?.await.ok())
    }

    async fn ask(
        &mut self,
        question: fn(oneshot::Sender<()>) -> FromTable,
    ) -> Result<(), SessionEnded> {
        let answered = self.put(question);
        answered.await?.await.map_err(|_| SessionEnded)
    }

    /// Sends the batch and a question after it. Returns the receiver of the answer.
    async fn put<A>(
        &mut self,
        question: impl FnOnce(oneshot::Sender<A>) -> FromTable,
    ) -> Result<oneshot::Receiver<A>, SessionEnded> {
        let (answer, answered) = oneshot::channel();
        self.batch.push(question(answer));
        self.flush().await?;
        Ok(answered)
    }

    /// Sends the batch, full or not.
    pub(crate) async fn flush(&mut self) -> Result<(), SessionEnded> {
        if self.batch.is_empty() {
            return Ok(());
        }
        self.bytes = 0;
        let batch = std::mem::take(&mut self.batch);
        self.batches.send(batch).await.map_err(|_| SessionEnded)
    }
}

/// Why reading a table ended early.
#[derive(Debug)]
pub(crate) enum Interrupted {
    Failed(Error),
    SessionEnded,
}

impl<E: Into<Error>> From<E> for Interrupted {
    fn from(error: E) -> Self {
        Self::Failed(error.into())
    }
}

/// A row that was read from a table, by its event id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ScannedRow {
    /// There is an event to send.
    Unresolved(Uuid),
    /// The event has an outcome, and is not sent again.
    Resolved(Uuid),
}

impl ScannedRow {
    pub(crate) fn id(self) -> Uuid {
        match self {
            Self::Unresolved(id) | Self::Resolved(id) => id,
        }
    }
}

/// Reads all rows of `unrecorded`, and sends the unresolved rows into the pipeline. Returns the number of sent rows.
///
/// Each sent row becomes one event. The first event gets the position `next`, and each further event the next ordinal.
/// The last rows stay in the sender's batch until the caller calls, for example,
/// [`queued`](TableSender::queued) or [`settled`](TableSender::settled).
///
/// For each row, resolved or not, this function calls two closures of the caller:
///
/// 1. `reads(ordinal, seq)`, if the row has a `seq`. The row's event gets this ordinal if the row is sent.
/// 2. `takes(row)`. If this closure returns false, the row is not sent.
pub(crate) async fn hand_over(
    mut unrecorded: Unrecorded<'_>,
    rows: &mut TableSender,
    next: &mut EventPosition,
    mut takes: impl FnMut(ScannedRow) -> bool,
    mut reads: impl FnMut(u32, i64),
) -> Result<u64, Interrupted> {
    let mut sent = 0;
    while let Some(found) = unrecorded.next().await? {
        if let Some(seq) = found.seq {
            reads(next.ordinal, seq);
        }
        let Some(row) = unrecorded.event(&found, *next) else {
            takes(ScannedRow::Resolved(found.id));
            continue;
        };
        if !takes(ScannedRow::Unresolved(found.id)) {
            continue;
        }
        next.ordinal += 1;
        sent += 1;
        let row = match row {
            Ok(event) => FromTable::Event(event),
            Err(error) => FromTable::Unmappable(error),
        };
        if rows.send(row).await == Err(SessionEnded) {
            return Err(Interrupted::SessionEnded);
        }
    }
    Ok(sent)
}
