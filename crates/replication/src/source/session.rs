//! The main loop of the replication session. It reads only while the channel to the caller has room
//! for more chunks, but it always sends status messages.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant, SystemTime};

use bytes::{Buf, BytesMut};
use decoder::PgTimestamp;
use decoder::frame::StandbyStatus;
use postgres_protocol::message::backend::Message;
use postgres_protocol::message::frontend;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::{mpsc, oneshot};
use tokio::time::sleep_until;

use super::buffers::{Buffers, READ_BUFFER};
use super::feedback::{DueAction, Feedback, POLL_INTERVAL, ReadState};
use super::framing::{AfterFrames, scan};
use super::handshake::{self, ReplicationConnection};
use super::pace::Pace;
use super::walsender_error::{log_notice, lost, stream_error};
use super::{CHUNKS, CLOSE_TIMEOUT, Chunk, Control, FINAL_WRITE_LIMIT, StreamOptions};
use crate::connection;
use crate::error::{ErrorKind, ReplicationError, Result};

/// How long connecting, logging in and starting the replication may take together.
const START_TIMEOUT: Duration = Duration::from_secs(20);

/// Connects the session's thread to its caller. Each field is one end of a channel; the caller has the other end.
pub(super) struct SessionChannels {
    pub(super) chunks: mpsc::Sender<Chunk>,
    /// Sends the pid of the walsender, or the reason why the session did not start.
    pub(super) started: oneshot::Sender<Result<i32>>,
    /// Sends the reason why the session ended.
    pub(super) end: oneshot::Sender<ReplicationError>,
    pub(super) close: oneshot::Receiver<()>,
}

/// Main function of the thread: runs one session on its own runtime, and sends the reason why it
/// ended.
pub(super) fn run(options: StreamOptions, control: Arc<Control>, channels: SessionChannels) {
    let SessionChannels {
        chunks,
        started,
        end,
        close,
    } = channels;
    let runtime = match tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
    {
        Ok(runtime) => runtime,
        Err(e) => {
            let error =
                ReplicationError::new(ErrorKind::Internal, "cannot start a runtime").caused_by(e);
            // Ignore the result, because sending fails only if the caller has stopped waiting. The other
            // `send` calls below ignore their results for the same reason.
            let _ = started.send(Err(error));
            return;
        }
    };
    runtime.block_on(async move {
        let connection = match connect(&options).await {
            Ok(connection) => connection,
            Err(error) => {
                let _ = started.send(Err(error));
                return;
            }
        };
        let now = Instant::now();
        let feedback = Feedback::new(options.wal_sender_timeout, control.confirmed(), now);
        control.lease.set_end(feedback.lease_ends_at());
        if started
            .send(Ok(connection.cancel_key.map_or(0, |(process, _)| process)))
            .is_err()
        {
            return;
        }
        let mut session = ReplicationSession {
            connection,
            feedback,
            control,
            buffers: Buffers::default(),
            pace: Pace::new(now),
            waiting: None,
        };
        if let Err(error) = session.stream(&chunks, close).await {
            let _ = end.send(error);
        }
    });
}

async fn connect(options: &StreamOptions) -> Result<ReplicationConnection> {
    let connecting = async {
        let liveness = handshake::liveness(options.wal_sender_timeout / 2);
        let wire = connection::open(&options.target, liveness).await?;
        handshake::start(wire, options).await
    };
    tokio::time::timeout(START_TIMEOUT, connecting)
        .await
        .unwrap_or_else(|_| {
            Err(ReplicationError::new(
                ErrorKind::Unreachable,
                "the replication session did not start",
            )
            .caused_by(format!("no answer in {START_TIMEOUT:?}")))
        })
}

/// Number of permits of the channel that must be free before a chunk of this size is sent. For a chunk that
/// is larger than the read buffer, the channel must be empty, so that few large chunks are in memory at once.
fn permits(chunk: usize) -> usize {
    if chunk > READ_BUFFER { CHUNKS } else { 1 }
}

/// Waits until the channel has room for a chunk of this size. Returns `None` if the caller has
/// closed the channel.
pub(super) async fn room(
    chunks: &mpsc::Sender<Chunk>,
    chunk: usize,
) -> Option<mpsc::Permit<'_, Chunk>> {
    chunks.reserve_many(permits(chunk)).await.ok()?.next()
}

struct ReplicationSession {
    connection: ReplicationConnection,
    feedback: Feedback,
    control: Arc<Control>,
    buffers: Buffers,
    pace: Pace,
    /// A chunk that did not fit into the channel to the caller.
    waiting: Option<Chunk>,
}

impl ReplicationSession {
    /// Streams until an error ends the session, or until the caller closes it.
    async fn stream(
        &mut self,
        chunks: &mpsc::Sender<Chunk>,
        mut close: oneshot::Receiver<()>,
    ) -> Result<()> {
        let mut tick = tokio::time::interval(POLL_INTERVAL);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut rests = false;
        loop {
            self.report().await?;
            let held_back = self.waiting.as_ref().map(Chunk::len);
            let mut linger = None;
            let (now, confirmed) = (Instant::now(), self.control.confirmed());
            let status_due = self.feedback.status_due(now, confirmed);
            tokio::select! {
                biased;
                _ = &mut close => return self.close().await,
                () = self.control.has_moved.notified(), if status_due.is_none() => {}
                () = sleep_until(status_due.unwrap_or(now).into()), if status_due.is_some() => {}
                _ = tick.tick() => {
                    let rest = self.feedback.rests_for(Instant::now(), self.reading());
                    rests = rest.is_some();
                    if let Some(rest) = rest {
                        tick.reset_after(rest);
                    }
                }
                permit = room(chunks, held_back.unwrap_or_default()), if held_back.is_some() => {
                    let Some(permit) = permit else { return self.close().await };
                    permit.send(self.waiting.take().expect("invariant: a chunk waits"));
                }
                read = self.connection.stream.read_buf(&mut self.connection.buffer),
                    if held_back.is_none() =>
                {
                    match read {
                        Ok(0) => return Err(lost("the server closed the connection")),
                        Ok(bytes) => {
                            if std::mem::take(&mut rests) {
                                tick.reset_after(POLL_INTERVAL);
                            }
                            let buffer = &self.connection.buffer;
                            let is_full = buffer.len() == buffer.capacity();
                            let is_behind = self.control.is_behind.load(Ordering::Relaxed);
                            linger = self.pace.read(bytes, is_full, is_behind, Instant::now());
                        }
                        Err(e) => return Err(lost("reading failed").caused_by(e)),
                    }
                }
            }
            self.cut(chunks)?;
            if let Some(linger) = linger {
                // Blocking is safe here, because the thread runs nothing but this session. Tokio's
                // timers are too coarse for 200 µs.
                std::thread::sleep(linger);
            }
        }
    }

    /// Cuts the buffered bytes into chunks and passes them on, as long as the channel has room.
    fn cut(&mut self, chunks: &mpsc::Sender<Chunk>) -> Result<()> {
        while self.waiting.is_none() {
            let scan = scan(&self.connection.buffer)?;
            if scan.reply_requested {
                self.feedback.reply_requested();
            }
            if scan.copy_data > 0 {
                self.feedback.heard(scan.evidence, Instant::now());
                let chunk = self.connection.buffer.split_to(scan.copy_data).freeze();
                let room = chunks.try_reserve_many(permits(chunk.len())).ok();
                match room.and_then(|mut permits| permits.next()) {
                    Some(permit) => permit.send(chunk),
                    // The channel is full, or the caller has closed it. The loop in `stream` waits for room, and ends
                    // the session if the channel is closed.
                    None => self.waiting = Some(chunk),
                }
            }
            match scan.then {
                AfterFrames::More(needed) => {
                    let buffer = &mut self.connection.buffer;
                    self.buffers.make_room(buffer, needed);
                    return Ok(());
                }
                AfterFrames::Other(..) => self.other()?,
            }
        }
        Ok(())
    }

    /// Handles a frame that is not CopyData: logs a notice, and returns an error if the stream has
    /// ended.
    fn other(&mut self) -> Result<()> {
        let unreadable = |e| {
            ReplicationError::new(ErrorKind::Protocol, "cannot parse PostgreSQL's answer")
                .caused_by(e)
        };
        match Message::parse(&mut self.connection.buffer).map_err(unreadable)? {
            Some(Message::NoticeResponse(body)) => {
                log_notice(body.fields());
                Ok(())
            }
            Some(Message::ParameterStatus(_)) | None => Ok(()),
            Some(Message::ErrorResponse(body)) => Err(stream_error(body.fields())),
            Some(_) => Err(lost("the server ended the stream")),
        }
    }

    /// Finds out why PostgreSQL released the slot. PostgreSQL sends the reason at the end of the stream, except
    /// if it heard nothing from us for too long or cannot write to us. This session drops the data before the
    /// reason, because PostgreSQL sends that data again to the next session.
    async fn last_word(&mut self) -> ReplicationError {
        let reading = async {
            loop {
                let buffer = &mut self.connection.buffer;
                let scan = scan(buffer)?;
                buffer.advance(scan.copy_data);
                match scan.then {
                    AfterFrames::Other(..) => self.other()?,
                    AfterFrames::More(needed) => {
                        self.buffers.make_room(buffer, needed);
                        if let Ok(0) | Err(_) = self.connection.stream.read_buf(buffer).await {
                            return Ok(());
                        }
                    }
                }
            }
        };
        match tokio::time::timeout(FINAL_WRITE_LIMIT, reading).await {
            Ok(Err(word)) => word,
            Ok(Ok(())) | Err(_) => super::slot_given_up(),
        }
    }

    fn reading(&self) -> ReadState {
        match self.waiting {
            Some(_) => ReadState::HeldBack,
            None => ReadState::Open,
        }
    }

    async fn report(&mut self) -> Result<()> {
        let reading = self.reading();
        let lease = &self.control.lease;
        // Never extend an expired lease. This machine may have been suspended, and another session may have
        // got the slot in the meantime.
        if lease.has_expired() {
            return Err(super::lease_lost());
        }
        if lease.is_given_up() {
            return Err(self.last_word().await);
        }
        if let Some(sent_at) = lease.proven() {
            self.feedback.proven(sent_at);
        }
        if let Some(at) = lease.last_seen() {
            self.feedback.has_slot(at, reading);
        }
        lease.set_end(self.feedback.lease_ends_at());
        match self
            .feedback
            .due(Instant::now(), self.control.confirmed(), reading)
        {
            DueAction::Nothing => Ok(()),
            DueAction::Status { ask } => self.send_status(ask).await,
            DueAction::LeaseLost => Err(super::lease_lost()),
        }
    }

    async fn send_status(&mut self, ask: bool) -> Result<()> {
        let confirmed = self.control.confirmed();
        let status = StandbyStatus {
            written: confirmed,
            flushed: confirmed,
            applied: confirmed,
            sent_at: PgTimestamp::from(SystemTime::now()),
            reply_requested: ask,
        };
        let mut body = BytesMut::with_capacity(64);
        status.encode(&mut body);
        let mut message = BytesMut::with_capacity(64);
        let framed = frontend::CopyData::new(body.freeze()).map_err(|e| {
            ReplicationError::new(ErrorKind::Internal, "cannot frame a status message").caused_by(e)
        })?;
        framed.write(&mut message);
        let write = async {
            self.connection.stream.write_all(&message).await?;
            self.connection.stream.flush().await
        };
        // A peer that does not accept the write in time is dead.
        match tokio::time::timeout(CLOSE_TIMEOUT, write).await {
            Ok(Ok(())) => {}
            Ok(Err(e)) => return Err(lost("writing failed").caused_by(e)),
            Err(_) => return Err(lost("the server does not accept status messages")),
        }
        self.feedback.sent(Instant::now(), confirmed);
        (self.control.on_status)();
        Ok(())
    }

    /// Reports the last position, ends the copy, and waits until the server has processed both
    /// messages.
    async fn close(&mut self) -> Result<()> {
        self.send_status(false).await?;
        let mut message = BytesMut::new();
        frontend::copy_done(&mut message);
        let closing = async {
            self.connection.stream.write_all(&message).await?;
            self.connection.stream.flush().await?;
            // Skip the remaining data up to ReadyForQuery. The server sends ReadyForQuery after it
            // has processed both messages.
            loop {
                let seen = self
                    .connection
                    .buffer
                    .len()
                    .saturating_sub(READY_FOR_QUERY.len());
                self.connection.buffer.advance(seen);
                if self
                    .connection
                    .stream
                    .read_buf(&mut self.connection.buffer)
                    .await?
                    == 0
                    || self.connection.buffer.ends_with(&READY_FOR_QUERY)
                {
                    break;
                }
            }
            message.clear();
            frontend::terminate(&mut message);
            self.connection.stream.write_all(&message).await?;
            self.connection.stream.shutdown().await
        };
        match tokio::time::timeout(CLOSE_TIMEOUT, closing).await {
            Ok(Ok(())) | Err(_) => Ok(()),
            Ok(Err(e)) => Err(lost("closing failed").caused_by(e)),
        }
    }
}

/// ReadyForQuery with state "idle": the copy has ended and the session is ready for another
/// command.
const READY_FOR_QUERY: [u8; 6] = [b'Z', 0, 0, 0, 5, b'I'];
