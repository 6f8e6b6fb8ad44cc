//! The replication session: from START_REPLICATION to chunks of whole CopyData frames.
//!
//! The session runs on its own thread, so that nothing in the caller can delay the
//! status messages that keep the walsender alive and the slot ours. The caller receives [`Chunk`]s
//! through a short bounded channel, and reports its progress through [`Source::confirm`].
//!
//! *Not* here: decoding of pgoutput. This module interprets no LSN of the stream, and reports only
//! the [`Confirmable`] LSN that the watermark computes.

mod buffers;
mod create;
mod feedback;
mod framing;
mod handshake;
mod lease;
mod login;
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
use tokio::sync::{Notify, mpsc, oneshot};

use crate::LOG_TARGET;
use crate::connection::Target;
use crate::error::{ErrorKind, ReplicationError, Result};
use crate::watermark::Confirmable;

pub use create::{CreateSlot, CreatedSlot, create_slot};
pub use framing::frames;
pub use probe::probe;
pub use proof::LeaseProof;

/// Chunks in the channel between the session and the caller. Together with the session's read buffer
/// this bounds the waiting bytes to about 2 MiB, or to two messages if those are larger: a message
/// larger than the buffer takes the whole channel.
const CHUNKS: usize = 4;

/// Limit for writing one status message, and for the closing handshake.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(3);

/// After our walsender has lost the slot: how long to search the rest of the stream for the server's
/// error message.
const LAST_WORD_LIMIT: Duration = Duration::from_secs(1);

/// Whole CopyData frames, as the walsender sent them.
pub type Chunk = Bytes;

/// What the session asks of the server.
#[derive(Debug, Clone)]
pub struct StreamOptions {
    /// The server, and how to log in.
    pub target: Target,
    /// The slot.
    pub slot: String,
    /// The publication whose rows the server sends.
    pub publication: String,
    /// The name of the session in `pg_stat_replication`.
    pub application_name: String,
    /// `wal_sender_timeout` of this session, which also sets the length of our lease on the slot.
    pub wal_sender_timeout: Duration,
    /// The slot's `confirmed_flush_lsn`. No older position is ever reported.
    pub confirmed: Confirmable,
}

/// An open replication session.
#[derive(Debug)]
pub struct Source {
    chunks: mpsc::Receiver<Chunk>,
    /// Receives the reason when the session ends. This channel is separate from `chunks`, so that
    /// the caller sees the end even while it takes no chunks.
    ended: oneshot::Receiver<ReplicationError>,
    control: Arc<Control>,
    walsender: i32,
    target: Target,
    close: Option<oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

/// The state that the caller and the session's thread share.
struct Control {
    /// The position to report as flushed.
    confirmed: AtomicU64,
    /// Signals that `confirmed` has advanced.
    has_moved: Notify,
    /// Whether the caller is catching up with old commits. If so, the session may read in bulk.
    is_behind: AtomicBool,
    on_status: Box<dyn Fn() + Send + Sync>,
    lease: LeaseProof,
}

impl std::fmt::Debug for Control {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Control").finish_non_exhaustive()
    }
}

impl Control {
    fn confirmed(&self) -> Lsn {
        Lsn::new(self.confirmed.load(Ordering::Acquire))
    }
}

impl Source {
    /// Connects, starts replication and returns once the server streams.
    ///
    /// `on_status` is called once when the server streams, and then, on the session's thread, after
    /// every status message.
    ///
    /// # Errors
    /// Errors of the connection; `CommandRefused` with 55006 when another session has the slot.
    pub async fn open(
        options: StreamOptions,
        on_status: impl Fn() + Send + Sync + 'static,
    ) -> Result<Self> {
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
            on_status: Box::new(on_status),
            lease: LeaseProof::new(),
        });
        let shared = control.clone();
        let thread = std::thread::Builder::new()
            .name("source".into())
            .spawn(move || {
                let channels = session::SessionChannels {
                    chunks: chunk_sender,
                    started,
                    end,
                    close: closed,
                };
                session::run(options, shared, channels);
            })
            .map_err(|e| {
                ReplicationError::new(ErrorKind::Internal, "cannot start a thread").caused_by(e)
            })?;
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
                (source.control.on_status)();
                Ok(source)
            }
            Ok(Err(error)) => Err(error),
            Err(_) => Err(ReplicationError::new(
                ErrorKind::Internal,
                "the replication thread ended",
            )),
        }
    }

    /// The server that this session streams from.
    pub fn target(&self) -> &Target {
        &self.target
    }

    /// The channel for the end of the session, and the channel of chunks. The channels are separate,
    /// so that the caller sees the end even while it takes no chunks.
    #[inline]
    pub fn split(
        &mut self,
    ) -> (
        &mut oneshot::Receiver<ReplicationError>,
        &mut mpsc::Receiver<Chunk>,
    ) {
        (&mut self.ended, &mut self.chunks)
    }

    /// Waits up to `limit` for the end of the session, and returns why it ended. `None` if the
    /// session has not ended within `limit`.
    pub async fn end_within(&mut self, limit: Duration) -> Option<ReplicationError> {
        let ended = tokio::time::timeout(limit, &mut self.ended).await;
        ended.ok().and_then(|word| word.ok())
    }

    /// Whether sending has to stop, because another session has the slot or may soon get it.
    #[inline]
    pub fn lease_is_over(&self) -> bool {
        self.control.lease.is_over()
    }

    /// Returns why sending had to stop.
    pub async fn why_lease_is_over(&mut self) -> ReplicationError {
        if self.control.lease.has_expired() {
            return lease_lost();
        }
        // The session's thread searches the stream for the reason, and may have to wake up first.
        let last_word = self.end_within(LAST_WORD_LIMIT * 2).await;
        last_word.unwrap_or_else(slot_given_up)
    }

    /// The shared handle to the session's lease, and the pid of our walsender.
    pub fn lease_proof(&self) -> (LeaseProof, i32) {
        (self.control.lease.clone(), self.walsender)
    }

    /// Reports `position` as flushed in the next status message. The session sends that message at
    /// once, or as soon as the minimum interval since the previous message has passed.
    #[inline]
    pub fn confirm(&self, position: Confirmable) {
        let position = position.lsn().as_u64();
        if self.control.confirmed.fetch_max(position, Ordering::AcqRel) < position {
            self.control.has_moved.notify_one();
        }
    }

    /// Tells the session whether the stream is behind. If it is, the session may read in bulk.
    #[inline]
    pub fn set_behind(&self, is_behind: bool) {
        self.control.is_behind.store(is_behind, Ordering::Relaxed);
    }

    /// Reports the last position and shuts the session down gracefully. Stops waiting after 6 s.
    pub async fn close(mut self) {
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
                tracing::warn!(target: LOG_TARGET, "the replication session did not end in time");
            }
        }
    }
}

/// An identifier in SQL.
fn quoted(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// The error of a session that may soon lose its slot to another session.
fn lease_lost() -> ReplicationError {
    ReplicationError::new(
        ErrorKind::LeaseLost,
        "no proof for three quarters of wal_sender_timeout that PostgreSQL hears us",
    )
}

/// The error of a session whose walsender has lost the slot while the connection looks healthy.
fn slot_given_up() -> ReplicationError {
    let what = "PostgreSQL has released the slot: our walsender no longer holds it";
    ReplicationError::new(ErrorKind::LeaseLost, what)
}
