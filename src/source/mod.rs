//! The replication session: from START_REPLICATION to chunks of whole CopyData frames.
//!
//! It runs on a thread of its own, so that nothing the rest of the relay does can delay the
//! status messages that keep the walsender alive and the slot ours. The rest receives [`Chunk`]s
//! through a short bounded channel and says through [`Source::confirm`] how far it got.
//!
//! What is *not* here: pgoutput is not decoded, and no LSN of the stream is ever interpreted; the
//! one LSN that is reported is the [`Confirmable`] that the watermark made.

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

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use decoder::Lsn;
use slot_manager::SlotName;
use tokio::sync::{Notify, mpsc, oneshot};

use crate::error::{Code, Error, Result};
use crate::metrics::LastStatus;
use crate::postgres::Target;
use crate::watermark::Confirmable;

pub(crate) use create::{CreateSlot, create_slot};
pub(crate) use framing::frames;
pub(crate) use probe::probe;
pub(crate) use proof::LeaseProof;

/// Chunks between the session and the relay; with the read buffer of the session this bounds the
/// bytes that wait here to about 2 MiB, or two messages if these are larger: such a one goes in alone.
const CHUNKS: usize = 4;

/// How long a session may take to end in good order.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(3);

/// How long the last word of a session is looked for whose slot shows that it is over.
const LAST_WORD_LIMIT: Duration = Duration::from_secs(1);

/// Whole CopyData frames, as the walsender sent them.
pub(crate) type Chunk = Bytes;

/// What the session asks the server for.
#[derive(Debug, Clone)]
pub(crate) struct Options {
    pub(crate) target: Target,
    pub(crate) slot: SlotName,
    pub(crate) publication: String,
    pub(crate) application_name: String,
    /// `wal_sender_timeout` of this session; also the length of our lease on the slot.
    pub(crate) wal_sender_timeout: Duration,
    /// The slot's `confirmed_flush_lsn`: nothing older is ever reported.
    pub(crate) confirmed: Confirmable,
}

/// An open replication session.
#[derive(Debug)]
pub(crate) struct Source {
    chunks: mpsc::Receiver<Chunk>,
    /// The session's last word; apart from the chunks, so that it is heard also while none are
    /// taken.
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
    /// It is further on than it was.
    has_moved: Notify,
    /// What comes was committed long ago: it may be read in bulk.
    is_behind: AtomicBool,
    last_status: LastStatus,
    lease: LeaseProof,
}

impl Control {
    fn confirmed(&self) -> Lsn {
        Lsn::new(self.confirmed.load(Ordering::Acquire))
    }
}

impl Source {
    /// Connects, starts the replication and returns once the server streams.
    ///
    /// `last_status` is told of each status message.
    ///
    /// # Errors
    /// Those of the connection; `slot-held` when another session has the slot.
    pub(crate) async fn open(options: Options, last_status: LastStatus) -> Result<Self> {
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
                source.control.last_status.sent();
                Ok(source)
            }
            Ok(Err(error)) => Err(error),
            Err(_) => Err(Error::new(Code::Internal, "the replication thread ended")),
        }
    }

    /// Where it streams from.
    pub(crate) fn target(&self) -> &Target {
        &self.target
    }

    /// The session's last word, and its chunks: apart, so that the end is heard also while no
    /// chunk is taken.
    pub(crate) fn split(&mut self) -> (&mut oneshot::Receiver<Error>, &mut mpsc::Receiver<Chunk>) {
        (&mut self.ended, &mut self.chunks)
    }

    /// The session's last word, if it comes within `limit`.
    pub(crate) async fn end_within(&mut self, limit: Duration) -> Option<Error> {
        let ended = tokio::time::timeout(limit, &mut self.ended).await;
        ended.ok().and_then(|word| word.ok())
    }

    /// Whether sending has to stop: the slot may be another's soon, or is already.
    pub(crate) fn lease_is_over(&self) -> bool {
        self.control.lease.is_over()
    }

    /// Why sending had to stop.
    pub(crate) async fn why_lease_is_over(&mut self) -> Error {
        if self.control.lease.has_expired() {
            return lease_lost();
        }
        // The session's thread looks for it, and may have to wake up first.
        let last_word = self.end_within(LAST_WORD_LIMIT * 2).await;
        last_word.unwrap_or_else(slot_given_up)
    }

    /// Where a look at PostgreSQL says what it has heard from us; and the pid of our walsender.
    pub(crate) fn lease_proof(&self) -> (LeaseProof, i32) {
        (self.control.lease.clone(), self.walsender)
    }

    /// Reports `position` as flushed with the next status message: at once, but for a small distance
    /// from the last one.
    pub(crate) fn confirm(&self, position: Confirmable) {
        let position = position.lsn().as_u64();
        if self.control.confirmed.fetch_max(position, Ordering::AcqRel) < position {
            self.control.has_moved.notify_one();
        }
    }

    /// Whether what comes was committed long ago, so that it may be read in bulk.
    pub(crate) fn set_behind(&self, is_behind: bool) {
        self.control.is_behind.store(is_behind, Ordering::Relaxed);
    }

    /// Reports the last position and ends the session in good order, or gives up after 3 s.
    pub(crate) async fn close(mut self) {
        self.chunks.close();
        if let Some(close) = self.close.take() {
            // An error means that the session has ended by itself.
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

/// The error of a session whose slot may be another's soon.
fn lease_lost() -> Error {
    Error::new(
        Code::LeaseLost,
        "nothing has proven for three quarters of wal_sender_timeout that PostgreSQL hears us",
    )
}

/// The error of a session that PostgreSQL has ended, though the connection does not show it.
fn slot_given_up() -> Error {
    let what = "PostgreSQL has given the slot up: our walsender has it no more";
    Error::new(Code::LeaseLost, what)
}
