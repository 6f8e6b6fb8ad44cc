//! Runs a replication session: connects, starts the stream, and cuts it into chunks of whole CopyData
//! frames.
//!
//! The session runs on its own thread. So nothing in the caller can delay the status messages,
//! which keep the walsender alive and the slot ours. The caller receives [`Chunk`]s through a short
//! bounded channel, and reports its progress through [`Source::confirm`].
//!
//! *Not* here: decoding of pgoutput. This module does not interpret the LSNs of the stream, and
//! confirms only the [`Confirmable`] position that the watermark computes.

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

/// Maximum number of chunks in the channel between the session and the caller. A chunk that is larger than
/// the read buffer waits until the channel is empty. So the channel and the session's read buffer together
/// hold at most about 2 MiB. Only large frames take more memory, and at most two of them are held at once.
const CHUNKS: usize = 4;

/// How long writing one status message may take, and how long the closing handshake may take.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(3);

/// Maximum time to read the rest of the stream after our walsender has lost the slot. The server may have written the
/// reason there, as its last message.
const FINAL_WRITE_LIMIT: Duration = Duration::from_secs(1);

/// Whole CopyData frames, as the walsender sent them.
pub type Chunk = Bytes;

/// What to stream, and from which server.
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
    /// The slot's `confirmed_flush_lsn`. The session never reports an older position.
    pub confirmed: Confirmable,
}

/// An open replication session.
#[derive(Debug)]
pub struct Source {
    chunks: mpsc::Receiver<Chunk>,
    /// Receives the reason when the session ends. This channel is separate from `chunks`, so that
    /// the caller learns about the end even while it receives no chunks.
    ended: oneshot::Receiver<ReplicationError>,
    control: Arc<Control>,
    walsender: i32,
    target: Target,
    close: Option<oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

/// The state that the caller shares with the session's thread.
struct Control {
    /// The position to report as flushed.
    confirmed: AtomicU64,
    /// Wakes the session when `confirmed` has advanced.
    has_moved: Notify,
    /// Whether the caller is catching up with old commits. If so, the session may read in bulk, because a
    /// small delay does not matter then.
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
    /// Connects, starts replication, and returns once the server streams.
    ///
    /// Calls `on_status` once when the server streams, and then after every status message. Those
    /// later calls happen on the session's thread.
    ///
    /// # Errors
    /// Connection errors; `CommandRefused` with 55006 if another session has the slot.
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

    /// Returns the channel for the end of the session and the channel for chunks. They are
    /// separate, so that the caller learns about the end even while it receives no chunks.
    #[inline]
    pub fn split(
        &mut self,
    ) -> (
        &mut oneshot::Receiver<ReplicationError>,
        &mut mpsc::Receiver<Chunk>,
    ) {
        (&mut self.ended, &mut self.chunks)
    }

    /// Waits up to `limit` for the end of the session, and returns why it ended. `None` if the session has
    /// not ended within `limit`. Meanwhile drops all chunks, because the session cannot read the server's
    /// last message while the channel is full. Nothing is lost: PostgreSQL sends the same data again to the
    /// next session.
    pub async fn end_within(&mut self, limit: Duration) -> Option<ReplicationError> {
        let Self { ended, chunks, .. } = self;
        let waiting = async {
            let emptying = async { while chunks.recv().await.is_some() {} };
            tokio::join!(ended, emptying).0
        };
        let ended = tokio::time::timeout(limit, waiting).await;
        ended.ok().and_then(|word| word.ok())
    }

    /// Whether sending to Pub/Sub has to stop, because another session has the slot or may soon
    /// have it.
    #[inline]
    pub fn lease_is_over(&self) -> bool {
        self.control.lease.is_over()
    }

    /// Returns why sending to Pub/Sub had to stop.
    pub async fn why_lease_is_over(&mut self) -> ReplicationError {
        if self.control.lease.has_expired() {
            return lease_lost();
        }
        // PostgreSQL has freed the slot, and may have sent the reason at the end of the stream. The session's
        // thread now reads the stream to its end, for at most FINAL_WRITE_LIMIT. Wait twice as long, because
        // the thread may begin a little later.
        let last_word = self.end_within(FINAL_WRITE_LIMIT * 2).await;
        last_word.unwrap_or_else(slot_given_up)
    }

    /// Returns the shared handle to the session's lease, and the pid of our walsender.
    pub fn lease_proof(&self) -> (LeaseProof, i32) {
        (self.control.lease.clone(), self.walsender)
    }

    /// Reports `position` as flushed in the next status message, unless an equal or later position was
    /// confirmed before. The session sends this message at once, or as soon as the minimum time since the
    /// previous message has passed.
    #[inline]
    pub fn confirm(&self, position: Confirmable) {
        let position = position.lsn().as_u64();
        if self.control.confirmed.fetch_max(position, Ordering::AcqRel) < position {
            self.control.has_moved.notify_one();
        }
    }

    /// Tells the session whether the caller is catching up with old commits. If it is, the session may read
    /// in bulk, which costs less CPU time but delays each row a little.
    #[inline]
    pub fn set_behind(&self, is_behind: bool) {
        self.control.is_behind.store(is_behind, Ordering::Relaxed);
    }

    /// Reports the last position and shuts the session down gracefully. Waits for at most 6 s.
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

/// Quotes an SQL identifier.
fn quoted(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// The error of a session whose lease has expired, so another session may soon get the slot.
fn lease_lost() -> ReplicationError {
    ReplicationError::new(
        ErrorKind::LeaseLost,
        "for three quarters of wal_sender_timeout, there was no proof that PostgreSQL receives our messages",
    )
}

/// The error of a session whose walsender has lost the slot, although the connection looks healthy.
fn slot_given_up() -> ReplicationError {
    let what = "PostgreSQL has released the slot: our walsender no longer holds it";
    ReplicationError::new(ErrorKind::LeaseLost, what)
}
