//! Carries rows that are read from the tables into the pipeline, because the stream does not bring these
//! rows.
//!
//! Recovery and the auditor send these rows, in batches of bounded size, through a channel that holds
//! one batch. The pipeline takes a batch when the delivery has room. Events from a table do not have the
//! position of a commit (`positions`), so the watermark does not cover them. Instead, this module counts how
//! many events from tables are unresolved.

use replication::CommitLsn;
use tokio::sync::{mpsc, oneshot};
use uuid::Uuid;

use super::positions::is_of_a_table;
use super::table::TableEvent;
use super::unrecorded::Unrecorded;
use crate::error::Error;
use crate::event::EventPosition;
use crate::mapping::MapError;

/// A batch is sent once its messages have this many bytes. A single message may be larger.
const BATCH_BYTES: usize = 256 << 10;
/// A batch is sent once it has this many rows.
const BATCH_ROWS: usize = 1_000;

/// An item of the channel.
#[derive(Debug)]
pub(crate) enum FromTable {
    /// An event to deliver, after all queued events of its key.
    Event(TableEvent),
    /// A row that cannot become a message.
    Unmappable(MapError),
    /// The pipeline answers at once. All events that were sent before this item are then queued for their
    /// keys.
    Queued(oneshot::Sender<()>),
    /// The pipeline answers once all events that were sent before this item are resolved.
    Settle(oneshot::Sender<()>),
}

/// Creates the channel.
pub(crate) fn channel() -> (TableSender, TableRows) {
    let (sender, receiver) = mpsc::channel(1);
    let sender = TableSender::new(sender);
    let rows = TableRows {
        batches: receiver,
        unresolved: 0,
        waiting: Vec::new(),
    };
    (sender, rows)
}

/// The session that should deliver the rows has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SessionEnded;

/// The end of the channel that sends rows.
#[derive(Debug)]
pub(crate) struct TableSender {
    batches: mpsc::Sender<Vec<FromTable>>,
    batch: Vec<FromTable>,
    bytes: usize,
}

impl TableSender {
    fn new(batches: mpsc::Sender<Vec<FromTable>>) -> Self {
        Self {
            batches,
            batch: Vec::new(),
            bytes: 0,
        }
    }

    /// Returns a second sender into the same pipeline. [`settled`](Self::settled) waits for the rows of
    /// both senders.
    pub(crate) fn another(&self) -> Self {
        Self::new(self.batches.clone())
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

    /// Waits until all events that were sent are queued for their keys. Events of the same keys that the
    /// pipeline takes later are published after them.
    pub(crate) async fn queued(&mut self) -> Result<(), SessionEnded> {
        self.ask(FromTable::Queued).await
    }

    /// Waits until all events that were sent are resolved.
    pub(crate) async fn settled(&mut self) -> Result<(), SessionEnded> {
        self.ask(FromTable::Settle).await
    }

    async fn ask(
        &mut self,
        question: fn(oneshot::Sender<()>) -> FromTable,
    ) -> Result<(), SessionEnded> {
        let (answer, answered) = oneshot::channel();
        self.batch.push(question(answer));
        self.flush().await?;
        answered.await.map_err(|_| SessionEnded)
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

/// Sends the rows of `unrecorded` that have an event to send into the pipeline. Calls `each` with the event
/// id of each such row, and leaves the row out if it returns false. The first event gets the position `next`, and each further event the next ordinal. Returns
/// how many rows it has sent. The last rows stay in the sender's batch until the
/// caller waits for [`queued`](TableSender::queued) or [`settled`](TableSender::settled).
pub(crate) async fn hand_over(
    mut unrecorded: Unrecorded<'_>,
    rows: &mut TableSender,
    next: &mut EventPosition,
    mut each: impl FnMut(Uuid) -> bool,
) -> Result<u64, Interrupted> {
    let mut sent = 0;
    while let Some(found) = unrecorded.next().await? {
        let Some(row) = unrecorded.event(&found, *next) else {
            continue;
        };
        if !each(found.id) {
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

/// The end of the channel from which the pipeline takes rows.
#[derive(Debug)]
pub(crate) struct TableRows {
    batches: mpsc::Receiver<Vec<FromTable>>,
    /// How many events from tables are unresolved.
    unresolved: u64,
    waiting: Vec<oneshot::Sender<()>>,
}

impl TableRows {
    /// Returns the next batch, or `None` when all senders are gone. Cancel-safe.
    pub(crate) async fn recv(&mut self) -> Option<Vec<FromTable>> {
        self.batches.recv().await
    }

    /// Counts an event that the delivery has taken over.
    pub(crate) fn taken(&mut self) {
        self.unresolved += 1;
    }

    /// Answers as soon as no event from a table is unresolved. Events that the delivery takes over
    /// later can delay the answer.
    pub(crate) fn settle(&mut self, answer: oneshot::Sender<()>) {
        self.waiting.push(answer);
        self.answer();
    }

    /// Notes that `events` events with the commit LSN `place` are resolved. Returns whether they came
    /// from a table.
    pub(crate) fn resolve(&mut self, place: CommitLsn, events: u64) -> bool {
        if !is_of_a_table(place) {
            return false;
        }
        debug_assert!(self.unresolved >= events, "more outcomes than events");
        self.unresolved = self.unresolved.saturating_sub(events);
        self.answer();
        true
    }

    fn answer(&mut self) {
        if self.unresolved == 0 {
            for waiting in self.waiting.drain(..) {
                // The task that asked may have ended.
                let _ = waiting.send(());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::positions::commit_before;
    use super::*;
    use decoder::Lsn;

    #[tokio::test]
    async fn sent_rows_are_settled_only_once_their_last_outcome_is_recorded() {
        let (mut sender, mut rows) = channel();
        let place = commit_before(Lsn::new(800));
        let settled = tokio::spawn(async move { sender.settled().await });
        for row in rows.recv().await.unwrap() {
            rows.taken();
            rows.taken();
            match row {
                FromTable::Settle(answer) => rows.settle(answer),
                other => unreachable!("was not sent: {other:?}"),
            }
        }
        assert!(rows.resolve(place, 1));
        assert!(!rows.resolve(CommitLsn::new(Lsn::new(800)), 1));
        assert!(!settled.is_finished());
        assert!(rows.resolve(place, 1));
        assert_eq!(settled.await.unwrap(), Ok(()));
    }
}
