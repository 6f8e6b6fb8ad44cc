//! Records outcomes: one transaction per batch, on a connection of its own.
//!
//! While one batch is being written the next one gathers, so batches grow with the load. Small ones
//! keep a distance from each other (`batch`): each commit makes the server flush its log, and the
//! services' own commits wait for that. The first after a while is not delayed, nor is what a large
//! one has left over unless a small one went just before, and no publish ever waits for a row. A
//! batch that fails is written again, after a new connection if need be. It may have been committed
//! all the same: rows that are there already are left as they are.
//!
//! A relay that has lost the slot records nothing any more: its successor has looked here already,
//! and sends again what had no record. Half of that must not be taken from it later. So each
//! transaction begins by asking who serves the slot by now (`successor`), and the successor waits
//! until those that began before it came are over (`predecessor`).
//!
//! An event that was released from quarantine has a row already: its new outcome is an update. So
//! a batch that is written a second time cannot undo what an operator has asked for in between.

mod batch;
mod transaction;

use std::time::Duration;

use slot_manager::SlotName;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout_at};

use super::outcome::Record;
use super::predecessor::writer_name;
use crate::error::{Code, Disposition, Error, Result};
use crate::postgres::Target;
use batch::{Batch, MAX_ROWS, Pacing};
use transaction::{Connected, Place, write};

pub(crate) use batch::Written;
pub(crate) use transaction::Reader;

const RETRY_PAUSE: Duration = Duration::from_millis(500);

/// What the writer tells the relay.
#[derive(Debug)]
pub(crate) enum WriterEvent {
    /// These are durable.
    Recorded(Written),
    /// Writing cannot succeed until a person has changed something.
    Failed(Error),
}

/// The writer's task.
#[derive(Debug)]
pub(crate) struct Writer {
    /// Unbounded, as what it holds is within the budget of bytes in flight.
    queue: Option<mpsc::UnboundedSender<Record>>,
    task: JoinHandle<()>,
}

impl Writer {
    /// Starts the task; what it has to say comes through `events`.
    pub(crate) fn start(
        target: Target,
        slot: &SlotName,
        reader: Reader,
        events: mpsc::UnboundedSender<WriterEvent>,
    ) -> Self {
        let (queue, incoming) = mpsc::unbounded_channel();
        let place = Place {
            target,
            name: writer_name(slot),
            slot: slot.to_string(),
            reader,
        };
        let task = tokio::spawn(async move {
            if let Err(error) = run(&place, incoming, &events).await {
                // Nobody listens any more when the session has ended.
                let _ = events.send(WriterEvent::Failed(error));
            }
        });
        Self {
            queue: Some(queue),
            task,
        }
    }

    /// Hands outcomes over.
    pub(crate) fn record(&self, record: Record) {
        // The task ends early only with an error, which it has reported by itself.
        if let Some(queue) = &self.queue {
            let _ = queue.send(record);
        }
    }

    /// Writes what was handed over, or gives up after `limit`.
    pub(crate) async fn finish(mut self, limit: Duration) {
        self.queue = None;
        if tokio::time::timeout(limit, &mut self.task).await.is_err() {
            tracing::warn!("the dispatch table could not be written in time: events may repeat");
        }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn run(
    place: &Place,
    mut incoming: mpsc::UnboundedReceiver<Record>,
    events: &mpsc::UnboundedSender<WriterEvent>,
) -> Result<()> {
    let mut sql: Option<Connected> = None;
    let mut batch = Batch::default();
    let mut gathered = Vec::new();
    let mut pacing = Pacing::new(Instant::now());
    loop {
        let room = MAX_ROWS.saturating_sub(batch.recorded.events).max(1);
        let gathering = incoming.recv_many(&mut gathered, room);
        let is_over = match batch.recorded.events {
            0 => gathering.await == 0,
            // Nothing more until the batch is due also means that it is complete.
            _ => timeout_at(pacing.earliest, gathering).await.unwrap_or(0) == 0,
        };
        if is_over && batch.recorded.events == 0 {
            return Ok(());
        }
        for record in gathered.drain(..) {
            batch.add(record);
            if batch.is_full() {
                write_until_done(place, &mut sql, &mut batch, events).await?;
            }
        }
        let waiting = batch.recorded.events;
        if is_over || pacing.is_due(waiting, Instant::now()) {
            write_until_done(place, &mut sql, &mut batch, events).await?;
            pacing.written(waiting, Instant::now());
        }
    }
}

/// Writes the batch and empties it; tries again without end on what may pass.
async fn write_until_done(
    place: &Place,
    sql: &mut Option<Connected>,
    batch: &mut Batch,
    events: &mpsc::UnboundedSender<WriterEvent>,
) -> Result<()> {
    loop {
        match write(place, sql, batch).await {
            Ok(()) => {
                let done = std::mem::take(batch);
                // Nobody listens any more when the session has ended.
                let _ = events.send(WriterEvent::Recorded(done.recorded));
                return Ok(());
            }
            // The session ends: the server will not come back before, or the slot is another's.
            Err(error) if matches!(error.code(), Code::PostgresStopping | Code::LeaseLost) => {
                return Err(error);
            }
            Err(error) if error.code().disposition() == Disposition::Retry => {
                tracing::warn!(code = %error.code(), "cannot write outbox.dispatch, again: {error}");
                *sql = None;
                tokio::time::sleep(RETRY_PAUSE).await;
            }
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests;
