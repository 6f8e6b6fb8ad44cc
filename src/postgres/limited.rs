//! Limits how long an SQL session waits for the server.
//!
//! A proxy may keep a connection open whose server is gone, and answer its keepalives. Then no error
//! would ever arrive. So the stream itself fails if the server owes an answer and nothing moves in
//! either direction for too long. The server's own `statement_timeout` is shorter, so its error comes
//! first while the connection works.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep};
use tokio_postgres::tls::{ChannelBinding, TlsStream};

/// How much longer than the server's limit for a statement.
const GRACE: Duration = Duration::from_secs(5);

/// The end of every answer: ReadyForQuery, with the state of the transaction in the sixth byte
/// (source: manual, "Message Formats").
const READY: [u8; 5] = [b'Z', 0, 0, 0, 5];

/// How long a session waits for the server. Shared by the session and its stream.
#[derive(Debug, Clone, Default)]
pub(super) struct AnswerLimit(Arc<AtomicU64>);

impl AnswerLimit {
    /// For a session with this `statement_timeout`. Zero means no limit, as on the server.
    pub(super) fn for_statements(timeout: Duration) -> Self {
        let limit = Self::default();
        limit.set(timeout);
        limit
    }

    pub(super) fn set(&self, statement_timeout: Duration) {
        let limit = match statement_timeout {
            Duration::ZERO => Duration::ZERO,
            timeout => timeout + GRACE,
        };
        let millis = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
        self.0.store(millis, Ordering::Relaxed);
    }

    fn get(&self) -> Option<Duration> {
        let millis = self.0.load(Ordering::Relaxed);
        (millis > 0).then(|| Duration::from_millis(millis))
    }
}

/// The stream of an SQL session.
pub(super) struct Limited<S> {
    stream: S,
    limit: AnswerLimit,
    /// Since when nothing has moved while the server owes an answer.
    silent_since: Option<Instant>,
    timer: Pin<Box<Sleep>>,
    /// The last bytes of the server, to recognise [`READY`].
    last: [u8; 6],
}

impl<S> Limited<S> {
    pub(super) fn new(stream: S, limit: AnswerLimit) -> Self {
        Self {
            stream,
            limit,
            silent_since: None,
            timer: Box::pin(sleep(Duration::ZERO)),
            last: [0; 6],
        }
    }

    fn sent(&mut self) {
        self.silent_since = Some(Instant::now());
    }

    fn received(&mut self, bytes: &[u8]) {
        let new = &bytes[bytes.len().saturating_sub(self.last.len())..];
        self.last.rotate_left(new.len());
        let start = self.last.len() - new.len();
        self.last[start..].copy_from_slice(new);
        let is_over = self.last.starts_with(&READY);
        // Only an answer: the server may also report changed parameters by itself.
        self.silent_since = self
            .silent_since
            .filter(|_| !is_over)
            .map(|_| Instant::now());
    }

    /// Fails when the limit is over; otherwise arranges to be woken then.
    fn poll_limit(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        loop {
            let (Some(since), Some(limit)) = (self.silent_since, self.limit.get()) else {
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
        if written.is_ready() || self.silent_since.is_none() {
            self.sent();
            // The driver of the session reads before it writes, and is woken by the timer to read.
            let _ = self.poll_limit(cx);
        }
        written
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

impl<S: TlsStream + Unpin> TlsStream for Limited<S> {
    fn channel_binding(&self) -> ChannelBinding {
        self.stream.channel_binding()
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};

    use super::*;

    const LIMIT: Duration = Duration::from_millis(200);
    const READY_IDLE: &[u8] = b"Z\0\0\0\x05I";

    fn session() -> (Limited<DuplexStream>, DuplexStream) {
        let (client, server) = duplex(64);
        let limit = AnswerLimit::default();
        limit.0.store(LIMIT.as_millis() as u64, Ordering::Relaxed);
        (Limited::new(client, limit), server)
    }

    async fn read(session: &mut Limited<DuplexStream>) -> io::Result<usize> {
        session.read(&mut [0; 64]).await
    }

    /// How long until the session gives up.
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
    async fn a_server_that_owes_an_answer_may_be_silent_for_the_limit() {
        let (mut session, _server) = session();
        session.write_all(b"query").await.unwrap();
        assert!(silent_for(&mut session).await > LIMIT / 2);
    }

    #[tokio::test]
    async fn a_request_that_is_sent_while_the_session_reads_counts_too() {
        let (session, _server) = session();
        let (mut reading, mut writing) = tokio::io::split(session);
        let mut buffer = [0; 64];
        let (read, written) = tokio::join!(reading.read(&mut buffer), writing.write(b"query"));
        assert_eq!(read.unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert_eq!(written.unwrap(), 5);
    }

    #[tokio::test]
    async fn each_part_of_an_answer_extends_the_limit() {
        let (mut session, mut server) = session();
        session.write_all(b"query").await.unwrap();
        tokio::time::sleep(LIMIT).await;
        server.write_all(b"a row").await.unwrap();
        assert_eq!(read(&mut session).await.unwrap(), 5);
        assert!(silent_for(&mut session).await > LIMIT / 2);
    }

    #[tokio::test]
    async fn an_idle_session_may_be_silent_for_any_time() {
        let (mut session, mut server) = session();
        session.write_all(b"query").await.unwrap();
        // The end of the answer arrives in two parts, and later a changed parameter.
        for part in [&b"a row, Z\0\0"[..], b"\0\x05I", b"a parameter"] {
            server.write_all(part).await.unwrap();
            assert_eq!(read(&mut session).await.unwrap(), part.len());
        }
        assert!(is_patient(&mut session).await);
        // The next request counts again.
        session.write_all(b"query").await.unwrap();
        silent_for(&mut session).await;
    }

    #[tokio::test]
    async fn a_server_that_takes_no_bytes_is_silent_too() {
        let (mut session, _server) = session();
        let writing = tokio::time::timeout(LIMIT, session.write_all(&[0; 65]));
        assert!(writing.await.is_err());
        silent_for(&mut session).await;
    }

    #[tokio::test]
    async fn without_a_statement_timeout_there_is_no_limit() {
        let (mut session, mut server) = session();
        session.limit.set(Duration::ZERO);
        session.write_all(b"query").await.unwrap();
        assert!(is_patient(&mut session).await);
        server.write_all(READY_IDLE).await.unwrap();
        assert_eq!(read(&mut session).await.unwrap(), READY_IDLE.len());
    }

    #[test]
    fn the_limit_is_longer_than_the_servers_own() {
        let timeout = Duration::from_secs(10);
        let limit = AnswerLimit::for_statements(timeout);
        assert_eq!(limit.get(), Some(timeout + GRACE));
    }
}
