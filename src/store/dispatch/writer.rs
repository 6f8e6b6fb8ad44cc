//! The dispatch writer: records outcomes on its own connection, with one transaction per batch.
//!
//! While one batch is being written, outcomes gather for the next, so batches grow with the load. Publishing never
//! waits for a row to be written. There is a minimum time between two small batches (`batch`), because each commit
//! makes the server flush its WAL, and commits of the services wait for that flush. The first batch after an idle
//! time is written at once. A large batch is never delayed.
//!
//! After a temporary error, the writer writes the batch again over a new connection. The first attempt may have
//! been committed although its answer was lost, so the writer leaves rows that already exist as they are.
//!
//! A relay that has lost the slot must not record anything. The next relay on the slot has already read the
//! table, and publishes every event that had no row at that time. Rows that we added later would make some of
//! these events look done, although the next relay is publishing them again. So each transaction first checks
//! who serves the slot (`successor`), and the next relay waits for transactions that began before it had the
//! slot (`predecessor`).
//!
//! A released event already has a row, so its new outcome is an update (`released`). Conditions in the update
//! make sure that a repeated batch does not undo a command that an operator ran in between.

mod batch;
mod transaction;

use std::time::Duration;

use slot_manager::SlotName;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout_at};

use super::outcome::Record;
use super::predecessor::writer_name;
use super::slot_reader::SlotReader;
use crate::condition::Condition;
use crate::error::{Code, Disposition, Error, Result};
use crate::postgres::{LOOK_INTERVAL, WatchedSession};
use batch::{Batch, MAX_ROWS, Pacing};
use transaction::{Connected, WriterContext, write, write_condition};

pub(crate) use batch::{ResolvedEvents, Written};

const RETRY_PAUSE: Duration = Duration::from_millis(500);

/// A report of the writer to the session.
#[derive(Debug)]
pub(crate) enum WriterEvent {
    /// These outcomes are durable.
    Recorded(Written),
    /// The writer retries after a failure, or has been waiting for PostgreSQL for a long time. The error says
    /// why.
    Retrying(Error),
    /// The writer has stopped: the error is permanent, the server is stopping, or another session has the
    /// slot.
    Failed(Error),
}

/// A handle to the task that writes. The task ends when the handle is dropped.
#[derive(Debug)]
pub(crate) struct DispatchWriter {
    /// Unbounded, because its contents count against the budget of bytes in flight.
    queue: Option<mpsc::UnboundedSender<Record>>,
    task: JoinHandle<()>,
}

impl DispatchWriter {
    /// Starts the task, which reports through `events`. While the task has a connection, it also writes the
    /// conditions from `unwritten` to the relay's row.
    pub(crate) fn start(
        slot: &SlotName,
        reader: SlotReader,
        events: mpsc::UnboundedSender<WriterEvent>,
        unwritten: watch::Receiver<Option<Condition>>,
    ) -> Self {
        let (queue, incoming) = mpsc::unbounded_channel();
        let context = WriterContext {
            name: writer_name(slot),
            slot: slot.clone(),
            reader,
            connection: WatchedSession::default(),
        };
        let task = tokio::spawn(async move {
            if let Err(error) = run(&context, incoming, &events, unwritten).await {
                // If the session has ended, nobody receives this report.
                let _ = events.send(WriterEvent::Failed(error));
            }
        });
        Self {
            queue: Some(queue),
            task,
        }
    }

    /// Queues outcomes to be written.
    pub(crate) fn record(&self, record: Record) {
        // Sending fails only if the task has ended with an error, which it has already reported.
        if let Some(queue) = &self.queue {
            let _ = queue.send(record);
        }
    }

    /// Writes all queued outcomes, or gives up after `limit`.
    pub(crate) async fn finish(mut self, limit: Duration) {
        self.queue = None;
        if tokio::time::timeout(limit, &mut self.task).await.is_err() {
            tracing::warn!("could not record all outcomes in time: events may be published twice");
        }
    }
}

impl Drop for DispatchWriter {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn run(
    context: &WriterContext,
    mut incoming: mpsc::UnboundedReceiver<Record>,
    events: &mpsc::UnboundedSender<WriterEvent>,
    mut unwritten: watch::Receiver<Option<Condition>>,
) -> Result<()> {
    let mut sql: Option<Connected> = None;
    let mut batch = Batch::default();
    let mut gathered = Vec::new();
    let mut pacing = Pacing::new(Instant::now());
    loop {
        let room = MAX_ROWS.saturating_sub(batch.recorded.events).max(1);
        let waiting = batch.recorded.events;
        let gathering = async {
            let gathering = incoming.recv_many(&mut gathered, room);
            match waiting {
                0 => gathering.await == 0,
                // `recv_many` returns 0 when the queue is closed. A timeout counts as 0 too, because in both
                // cases the batch must be written now.
                _ => timeout_at(pacing.earliest, gathering).await.unwrap_or(0) == 0,
            }
        };
        let is_over = tokio::select! {
            biased;
            is_over = gathering => is_over,
            Ok(()) = unwritten.changed() => {
                let condition = unwritten.borrow_and_update().clone();
                write_condition(context, &mut sql, condition.as_ref()).await;
                continue;
            }
        };
        if is_over && batch.recorded.events == 0 {
            return Ok(());
        }
        for record in gathered.drain(..) {
            batch.add(record);
            if batch.is_full() {
                write_until_done(context, &mut sql, &mut batch, events).await?;
            }
        }
        let waiting = batch.recorded.events;
        if is_over || pacing.is_due(waiting, Instant::now()) {
            write_until_done(context, &mut sql, &mut batch, events).await?;
            pacing.written(waiting, Instant::now());
        }
    }
}

/// Writes the batch and empties it. Retries temporary errors until one attempt succeeds.
async fn write_until_done(
    context: &WriterContext,
    sql: &mut Option<Connected>,
    batch: &mut Batch,
    events: &mpsc::UnboundedSender<WriterEvent>,
) -> Result<()> {
    loop {
        match watched(context, write(context, sql, batch), events).await {
            Ok(()) => {
                let done = std::mem::take(batch);
                // If the session has ended, nobody receives this report.
                let _ = events.send(WriterEvent::Recorded(done.recorded));
                return Ok(());
            }
            // The server is stopping, or another session has the slot: end this session.
            Err(error) if matches!(error.code(), Code::PostgresStopping | Code::LeaseLost) => {
                return Err(error);
            }
            Err(error) if error.code().disposition() == Disposition::Retry => {
                *sql = None;
                // If the session has ended, nobody receives this report.
                let _ = events.send(WriterEvent::Retrying(error));
                tokio::time::sleep(RETRY_PAUSE).await;
            }
            Err(error) => return Err(error),
        }
    }
}

/// Waits until the batch is written. If this takes long, reports what the writer's connection is waiting for.
async fn watched<T>(
    context: &WriterContext,
    writing: impl Future<Output = T>,
    events: &mpsc::UnboundedSender<WriterEvent>,
) -> T {
    let mut writing = std::pin::pin!(writing);
    let mut looking = None;
    loop {
        tokio::select! {
            biased;
            written = &mut writing => return written,
            () = tokio::time::sleep(LOOK_INTERVAL) => {}
        }
        if let Ok(Some(wait)) = context.connection.long_wait(&mut looking).await {
            // If the session has ended, nobody receives this.
            let _ = events.send(WriterEvent::Retrying(wait.error));
        }
    }
}

#[cfg(test)]
mod tests;
