//! Limits how long an SQL session waits for the server.
//!
//! A proxy can keep our connection open, and answer keepalives, after the server behind it is gone. Without a limit,
//! the session would then wait forever. So this stream fails if an answer is outstanding or a write is blocked, and no
//! byte is sent or received within a time limit. The limit is longer than `statement_timeout`, so a server that
//! can be reached reports its own timeout first.

use std::future::{Ready, ready};
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use replication::connection::Wire;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep};
use tokio_postgres::tls::{ChannelBinding, TlsConnect, TlsStream};

/// Grace period after `statement_timeout`. The time limit for an answer is the sum of the two.
const GRACE: Duration = Duration::from_secs(5);

/// The time limit for an answer, and how long the server has been silent. The session and its stream share this
/// value.
#[derive(Debug, Clone, Default)]
pub(super) struct AnswerLimit(Arc<Answers>);

#[derive(Debug, Default)]
struct Answers {
    /// The limit in milliseconds; 0 means no limit.
    limit: AtomicU64,
    /// When the session began to wait for the server. While an answer is outstanding, this is the time of the last byte
    /// that was sent or received. Otherwise it is the time at which a write was blocked. `None` if the session does not
    /// wait.
    silent_since: Mutex<Option<Instant>>,
}

impl AnswerLimit {
    /// Sets the limit for a session with this `statement_timeout`. Zero means no limit, as it does on the
    /// server.
    pub(super) fn set(&self, statement_timeout: Duration) {
        let limit = match statement_timeout {
            Duration::ZERO => Duration::ZERO,
            timeout => timeout + GRACE,
        };
        let millis = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
        self.0.limit.store(millis, Ordering::Relaxed);
    }

    fn get(&self) -> Option<Duration> {
        let millis = self.0.limit.load(Ordering::Relaxed);
        (millis > 0).then(|| Duration::from_millis(millis))
    }

    /// When the session began to wait for the server. Each byte that is sent or received starts the wait again. `None`
    /// if the session does not wait.
    pub(super) fn silent_since(&self) -> Option<Instant> {
        *self.silence()
    }

    fn silence(&self) -> MutexGuard<'_, Option<Instant>> {
        self.0
            .silent_since
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// The stream of an SQL session.
pub(super) struct Limited<S> {
    stream: S,
    limit: AnswerLimit,
    requests: Frames,
    answers: Frames,
    /// Number of requests without a complete answer. It can be more than one, because the client may send
    /// a request before it has read the answer to the previous request.
    outstanding: u32,
    timer: Pin<Box<Sleep>>,
}

impl<S> Limited<S> {
    pub(super) fn new(stream: S, limit: AnswerLimit) -> Self {
        Self {
            stream,
            limit,
            requests: Frames::of_client(),
            answers: Frames::of_server(),
            outstanding: 0,
            timer: Box::pin(sleep(Duration::ZERO)),
        }
    }

    fn sent(&mut self, bytes: &[u8]) {
        let outstanding = &mut self.outstanding;
        self.requests.read(bytes, |kind| match kind {
            // The server answers each startup message, Query and Sync with a ReadyForQuery.
            STARTUP | b'Q' | b'S' => *outstanding += 1,
            _ => {}
        });
        self.moved();
    }

    fn received(&mut self, bytes: &[u8]) {
        let outstanding = &mut self.outstanding;
        self.answers.read(bytes, |kind| {
            // `Z` is ReadyForQuery, which completes an answer. `G` is CopyInResponse: the client must now send
            // the data of a COPY. The client sends one Sync before the data, and another one after the data. The
            // server sends ReadyForQuery only for the second Sync, so `G` counts as the answer to the first.
            if matches!(kind, b'Z' | b'G') {
                *outstanding = outstanding.saturating_sub(1);
            }
        });
        self.moved();
    }

    fn moved(&mut self) {
        *self.limit.silence() = (self.outstanding > 0).then(Instant::now);
    }

    /// Fails if the limit has passed. Otherwise schedules a wakeup for the time at which the limit passes.
    fn poll_limit(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        loop {
            let (Some(since), Some(limit)) = (self.limit.silent_since(), self.limit.get()) else {
                return Poll::Pending;
            };
            let deadline = since + limit;
            if Instant::now() >= deadline {
                let what = format!("PostgreSQL has not answered in {limit:?}");
                return Poll::Ready(io::Error::new(io::ErrorKind::TimedOut, what));
            }
            self.timer.as_mut().reset(deadline);
            ready!(self.timer.as_mut().poll(cx));
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Limited<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        match Pin::new(&mut self.stream).poll_read(cx, buffer) {
            Poll::Pending => self.poll_limit(cx).map(Err),
            read => {
                self.received(&buffer.filled()[before..]);
                read
            }
        }
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Limited<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, bytes);
        match &written {
            Poll::Ready(Ok(length)) => self.sent(&bytes[..*length]),
            Poll::Ready(Err(_)) => return written,
            Poll::Pending => {
                self.limit.silence().get_or_insert_with(Instant::now);
            }
        }
        // One timer is enough, because one task (the session's driver) polls both for reading and for writing. When
        // the timer ends, this task polls for reading first, and reading fails because the limit has passed.
        match self.poll_limit(cx) {
            Poll::Ready(error) => Poll::Ready(Err(error)),
            Poll::Pending => written,
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

impl TlsStream for Limited<Wire> {
    fn channel_binding(&self) -> ChannelBinding {
        match self.stream.end_point() {
            Some(hash) => ChannelBinding::tls_server_end_point(hash.to_owned()),
            None => ChannelBinding::none(),
        }
    }
}

/// The TLS connector that tokio-postgres asks for. The stream is already open, with or without TLS, so this connector
/// returns the stream unchanged and makes no handshake.
pub(super) struct AlreadyOpen;

impl TlsConnect<Limited<Wire>> for AlreadyOpen {
    type Stream = Limited<Wire>;
    type Error = io::Error;
    type Future = Ready<io::Result<Limited<Wire>>>;

    fn connect(self, stream: Limited<Wire>) -> Self::Future {
        ready(Ok(stream))
    }
}

/// Used as the type of the startup message, which has no type byte.
const STARTUP: u8 = 0;

/// Splits the bytes of one direction into messages. A message begins with its type (one byte) and its
/// length (four bytes, which include the length itself). Source: PostgreSQL manual, "Message Formats".
struct Frames {
    has_type: bool,
    head: [u8; 5],
    head_len: usize,
    /// Bytes of the current message that are still to come.
    left: usize,
}

impl Frames {
    /// Expects that the first message has no type byte, because it is the client's startup message.
    fn of_client() -> Self {
        Self {
            has_type: false,
            ..Self::of_server()
        }
    }

    fn of_server() -> Self {
        Self {
            has_type: true,
            head: [STARTUP; 5],
            head_len: 0,
            left: 0,
        }
    }

    /// Calls `each` with the type of every message that begins in `bytes`.
    fn read(&mut self, mut bytes: &[u8], mut each: impl FnMut(u8)) {
        while !bytes.is_empty() {
            let body = self.left.min(bytes.len());
            bytes = &bytes[body..];
            self.left -= body;
            let Some((&byte, rest)) = bytes.split_first() else {
                return;
            };
            bytes = rest;
            let start = usize::from(!self.has_type);
            self.head[start + self.head_len] = byte;
            self.head_len += 1;
            if start + self.head_len == self.head.len() {
                let [kind, length @ ..] = self.head;
                each(kind);
                self.left = (u32::from_be_bytes(length) as usize).saturating_sub(4);
                (self.has_type, self.head_len) = (true, 0);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};

    use super::*;

    const LIMIT: Duration = Duration::from_millis(200);
    const STARTUP_MESSAGE: &[u8] = b"\0\0\0\x08\0\x03\0\0";
    const QUERY: &[u8] = b"Q\0\0\0\x06;\0";
    const SYNC: &[u8] = b"S\0\0\0\x04";
    const ROW: &[u8] = b"D\0\0\0\x08\0\0ZZ";
    const READY: &[u8] = b"Z\0\0\0\x05I";

    /// Opens a session that is logged in and idle.
    async fn session() -> (Limited<DuplexStream>, DuplexStream) {
        let (client, mut server) = duplex(64);
        let mut session = Limited::new(client, AnswerLimit::default());
        session.write_all(STARTUP_MESSAGE).await.unwrap();
        server.write_all(READY).await.unwrap();
        read(&mut session).await.unwrap();
        session
            .limit
            .0
            .limit
            .store(LIMIT.as_millis() as u64, Ordering::Relaxed);
        (session, server)
    }

    async fn read(session: &mut Limited<DuplexStream>) -> io::Result<usize> {
        session.read(&mut [0; 64]).await
    }

    async fn answer(session: &mut Limited<DuplexStream>, server: &mut DuplexStream, bytes: &[u8]) {
        server.write_all(bytes).await.unwrap();
        assert_eq!(read(session).await.unwrap(), bytes.len());
    }

    /// Waits until the session fails, and returns how long that took.
    async fn silent_for(session: &mut Limited<DuplexStream>) -> Duration {
        let began = Instant::now();
        let error = read(session).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        began.elapsed()
    }

    async fn is_patient(session: &mut Limited<DuplexStream>) -> bool {
        let reading = tokio::time::timeout(LIMIT * 3, read(session));
        reading.await.is_err()
    }

    #[tokio::test]
    async fn a_server_that_owes_an_answer_times_out_after_the_limit() {
        let (mut session, _server) = session().await;
        assert!(is_patient(&mut session).await, "idle");
        session.write_all(QUERY).await.unwrap();
        assert!(silent_for(&mut session).await > LIMIT / 2);
    }

    #[tokio::test]
    async fn a_request_that_is_sent_while_the_session_reads_counts_too() {
        let (session, _server) = session().await;
        let (mut reading, mut writing) = tokio::io::split(session);
        let mut buffer = [0; 64];
        let (read, written) = tokio::join!(reading.read(&mut buffer), writing.write(QUERY));
        assert_eq!(read.unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert_eq!(written.unwrap(), QUERY.len());
    }

    #[tokio::test]
    async fn each_part_of_an_answer_extends_the_limit() {
        let (mut session, mut server) = session().await;
        session.write_all(QUERY).await.unwrap();
        tokio::time::sleep(LIMIT).await;
        answer(&mut session, &mut server, ROW).await;
        assert!(silent_for(&mut session).await > LIMIT / 2);
    }

    /// The client closes a statement and sends the next one without waiting for an answer.
    #[tokio::test]
    async fn every_request_that_was_sent_ahead_is_waited_for() {
        let (mut session, mut server) = session().await;
        session.write_all(SYNC).await.unwrap();
        session.write_all(QUERY).await.unwrap();
        answer(&mut session, &mut server, READY).await;
        silent_for(&mut session).await;
    }

    #[tokio::test]
    async fn an_idle_session_may_be_silent_for_any_time() {
        let (mut session, mut server) = session().await;
        session.write_all(QUERY).await.unwrap();
        // ReadyForQuery arrives in two parts. After it comes a message that answers no request: a changed
        // parameter.
        let (first, second) = READY.split_at(3);
        for part in [ROW, first, second, b"S\0\0\0\x06a\0"] {
            answer(&mut session, &mut server, part).await;
        }
        assert!(is_patient(&mut session).await);
    }

    /// The client sends a Sync before the data and another one after it. The server answers only once.
    #[tokio::test]
    async fn a_session_is_idle_after_a_copy() {
        let (mut session, mut server) = session().await;
        session.write_all(SYNC).await.unwrap();
        answer(&mut session, &mut server, b"G\0\0\0\x07\0\0\0").await;
        session.write_all(b"d\0\0\0\x05xc\0\0\0\x04").await.unwrap();
        session.write_all(SYNC).await.unwrap();
        answer(&mut session, &mut server, READY).await;
        assert!(is_patient(&mut session).await);
    }

    #[tokio::test]
    async fn a_server_that_accepts_no_bytes_times_out_too() {
        let (mut session, _server) = session().await;
        let query = [b"Q\0\0\0\x54", &[b' '; 80][..]].concat();
        let error = session.write_all(&query).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }

    #[tokio::test]
    async fn without_a_statement_timeout_there_is_no_limit() {
        let (mut session, mut server) = session().await;
        session.limit.set(Duration::ZERO);
        session.write_all(QUERY).await.unwrap();
        assert!(is_patient(&mut session).await);
        answer(&mut session, &mut server, READY).await;
    }

    #[test]
    fn the_limit_is_longer_than_the_servers_own() {
        let timeout = Duration::from_secs(10);
        let limit = AnswerLimit::default();
        limit.set(timeout);
        assert_eq!(limit.get(), Some(timeout + GRACE));
    }
}
