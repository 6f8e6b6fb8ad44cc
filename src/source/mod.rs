//! The replication session: from START_REPLICATION to chunks of whole CopyData frames.
//!
//! The session runs on its own thread, so that nothing in the rest of the relay can delay the
//! status messages that keep the walsender alive and the slot ours. The relay receives [`Chunk`]s
//! through a short bounded channel, and reports its progress through [`Source::confirm`].
//!
//! *Not* here: this module does not decode pgoutput and interprets no LSN of the stream. The only
//! LSN that it reports is the [`Confirmable`] made by the watermark.

mod buffers;
mod create;
mod feedback;
mod framing;
mod handshake;
mod lease;
mod pace;
mod probe;
mod proof;
mod scram;
mod session;
#[cfg(test)]
mod tests;
mod walsender_error;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use decoder::Lsn;
use slot_manager::SlotName;
use tokio::sync::{Notify, mpsc, oneshot};

use crate::error::{Code, Error, Result};
use crate::metrics::LastTime;
use crate::postgres::Target;
use crate::watermark::Confirmable;

pub(crate) use create::{CreateSlot, create_slot};
pub(crate) use framing::frames;
pub(crate) use probe::probe;
pub(crate) use proof::LeaseProof;

/// Chunks in the channel between the session and the relay. Together with the session's read buffer
/// this bounds the waiting bytes to about 2 MiB, or to two messages if those are larger: a message
/// larger than the buffer takes the whole channel.
const CHUNKS: usize = 4;

/// How long a graceful shutdown of the session may take.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(3);

/// How long to look for the server's reason after our walsender has lost the slot.
const LAST_WORD_LIMIT: Duration = Duration::from_secs(1);

/// Whole CopyData frames, as the walsender sent them.
pub(crate) type Chunk = Bytes;

/// What the session asks of the server.
#[derive(Debug, Clone)]
pub(crate) struct StreamOptions {
    pub(crate) target: Target,
    pub(crate) slot: SlotName,
    pub(crate) publication: String,
    pub(crate) application_name: String,
    /// `wal_sender_timeout` of this session, which also sets the length of our lease on the slot.
    pub(crate) wal_sender_timeout: Duration,
    /// The slot's `confirmed_flush_lsn`. No older position is ever reported.
    pub(crate) confirmed: Confirmable,
}

/// An open replication session.
#[derive(Debug)]
pub(crate) struct Source {
    chunks: mpsc::Receiver<Chunk>,
    /// Why the session ended. A channel of its own, so that the relay sees the end even while it
    /// takes no chunks.
    ended: oneshot::Receiver<Error>,
    control: Arc<Control>,
    walsender: i32,
    target: Target,
    close: Option<oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

/// What the relay and the session's thread share.
#[derive(Debug)]
struct Control {
    /// The position to report as flushed.
    confirmed: AtomicU64,
    /// Signals that `confirmed` has advanced.
    has_moved: Notify,
    /// The relay is catching up with old commits, so the session may read in bulk.
    is_behind: AtomicBool,
    last_status: LastTime,
    lease: LeaseProof,
}

impl Control {
    fn confirmed(&self) -> Lsn {
        Lsn::new(self.confirmed.load(Ordering::Acquire))
    }
}

impl Source {
    /// Connects, starts replication and returns once the server streams.
    ///
    /// Every status message is noted in `last_status`.
    ///
    /// # Errors
    /// Those of the connection; `slot-held` when another session has the slot.
    pub(crate) async fn open(options: StreamOptions, last_status: LastTime) -> Result<Self> {
        let (chunk_sender, chunks) = mpsc::channel(CHUNKS);
        let (started, wait_started) = oneshot::channel();
        let (close, closed) = oneshot::channel();
        let (end, ended) = oneshot::channel();
        let start = options.confirmed.lsn().as_u64();
        let target = options.target.clone();
        let control = Arc::new(Control {
            confirmed: AtomicU64::new(start),
            has_moved: Notify::new(),
            is_behind: AtomicBool::new(false),
            last_status,
            lease: LeaseProof::new(),
        });
        let shared = control.clone();
        let thread = std::thread::Builder::new()
            .name("source".into())
            .spawn(move || {
                let ends = session::Ends {
                    chunks: chunk_sender,
                    started,
                    end,
                    close: closed,
                };
                session::run(options, shared, ends);
            })
            .map_err(|e| Error::new(Code::Internal, "cannot start a thread").caused_by(e))?;
        let mut source = Self {
            chunks,
            ended,
            control,
            walsender: 0,
            target,
            close: Some(close),
            thread: Some(thread),
        };
        match wait_started.await {
            Ok(Ok(walsender)) => {
                source.walsender = walsender;
                source.control.last_status.now();
                Ok(source)
            }
            Ok(Err(error)) => Err(error),
            Err(_) => Err(Error::new(Code::Internal, "the replication thread ended")),
        }
    }

    /// The server that this session streams from.
    pub(crate) fn target(&self) -> &Target {
        &self.target
    }

    /// The channel for the end of the session, and the channel of chunks. They are separate, so
    /// that the relay sees the end even while it takes no chunks.
    pub(crate) fn split(&mut self) -> (&mut oneshot::Receiver<Error>, &mut mpsc::Receiver<Chunk>) {
        (&mut self.ended, &mut self.chunks)
    }

    /// Why the session ended, if it ends within `limit`.
    pub(crate) async fn end_within(&mut self, limit: Duration) -> Option<Error> {
        let ended = tokio::time::timeout(limit, &mut self.ended).await;
        ended.ok().and_then(|word| word.ok())
    }

    /// Whether sending has to stop, because another session has the slot or may soon get it.
    pub(crate) fn lease_is_over(&self) -> bool {
        self.control.lease.is_over()
    }

    /// Why sending had to stop.
    pub(crate) async fn why_lease_is_over(&mut self) -> Error {
        if self.control.lease.has_expired() {
            return lease_lost();
        }
        // The session's thread is still looking for the reason, and may have to wake up first.
        let last_word = self.end_within(LAST_WORD_LIMIT * 2).await;
        last_word.unwrap_or_else(slot_given_up)
    }

    /// The shared handle to the session's lease, and the pid of our walsender.
    pub(crate) fn lease_proof(&self) -> (LeaseProof, i32) {
        (self.control.lease.clone(), self.walsender)
    }

    /// Reports `position` as flushed in the next status message. That message is sent at once, or
    /// as soon as the minimum interval since the last one has passed.
    pub(crate) fn confirm(&self, position: Confirmable) {
        let position = position.lsn().as_u64();
        if self.control.confirmed.fetch_max(position, Ordering::AcqRel) < position {
            self.control.has_moved.notify_one();
        }
    }

    /// Tells the session whether the stream is behind, so that it may read in bulk.
    pub(crate) fn set_behind(&self, is_behind: bool) {
        self.control.is_behind.store(is_behind, Ordering::Relaxed);
    }

    /// Reports the last position and shuts the session down gracefully. Gives up after 3 s.
    pub(crate) async fn close(mut self) {
        self.chunks.close();
        if let Some(close) = self.close.take() {
            // An error means that the session has already ended.
            let _ = close.send(());
        }
        if let Some(thread) = self.thread.take() {
            let joined = tokio::task::spawn_blocking(move || thread.join());
            if tokio::time::timeout(CLOSE_TIMEOUT * 2, joined)
                .await
                .is_err()
            {
                tracing::warn!("the replication session did not end in time");
            }
        }
    }
}

/// The error of a session that may soon lose its slot to another session.
fn lease_lost() -> Error {
    Error::new(
        Code::LeaseLost,
        "no proof for three quarters of wal_sender_timeout that PostgreSQL hears us",
    )
}

/// The error of a session whose walsender has lost the slot while the connection looks healthy.
fn slot_given_up() -> Error {
    let what = "PostgreSQL has released the slot: our walsender no longer holds it";
    Error::new(Code::LeaseLost, what)
}
