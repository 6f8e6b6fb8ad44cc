//! An open HTTP/2 connection to Pub/Sub, and the gRPC calls over it.
//!
//! A task reads and writes the connection. If requests are unanswered and the server sends nothing, the task
//! pings the server, so that a dead connection is noticed. When a connection breaks, its requests in flight
//! have an unknown outcome.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::{Buf, Bytes};
use h2::client::{self, SendRequest};
use h2::{Ping, PingPong, SendStream};
use tokio::io::{AsyncRead, AsyncWrite};
use tonic::Status;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::codegen::http::{
    HeaderMap, HeaderValue, Method, Request, StatusCode, Uri, Version, header,
};

use super::body::RequestBody;
use super::{LOG_TARGET, answer};

/// How long the server may send nothing, while requests are unanswered, before we ping it.
const PING_AFTER: Duration = Duration::from_secs(10);
/// How long the answer to a ping may take. After this time, the connection counts as dead.
const PING_TIMEOUT: Duration = Duration::from_secs(5);

/// HTTP/2 flow-control window for answers, in bytes. Answers are much smaller, so flow control never holds
/// them back.
const WINDOW: u32 = 4 << 20;

/// Maximum number of concurrent requests until the server has announced its own limit.
const FIRST_REQUESTS: usize = 100;

/// Maximum size of a body that is sent together with its headers: one HTTP/2 frame of the usual
/// maximum size. A longer body waits until the server's flow control has room for it.
const AT_ONCE: usize = 16 << 10;
/// Maximum number of bytes of a body that wait in `h2`'s send buffer.
const BUFFERED: usize = 1 << 20;

const USER_AGENT: HeaderValue =
    HeaderValue::from_static(concat!("postrider/", env!("CARGO_PKG_VERSION")));

/// A connection to Pub/Sub. It may have been closed, so check [`PublishConnection::is_open`] before
/// use.
#[derive(Debug, Clone)]
pub(super) struct PublishConnection {
    requests: SendRequest<RequestBody>,
    /// The part of the request URL before its path.
    origin: Uri,
    traffic: Arc<Traffic>,
}

/// Counts requests and answers, so that the connection's task knows when to ping.
#[derive(Debug, Default)]
struct Traffic {
    /// Number of requests so far.
    sent: AtomicU64,
    ended: AtomicU64,
    /// Number of parts of answers (headers or data) that have arrived so far.
    heard: AtomicU64,
}

/// Represents a request in flight. Counts the request as ended when it is dropped.
#[derive(Debug)]
struct RequestGuard(Arc<Traffic>);

impl RequestGuard {
    fn new(traffic: Arc<Traffic>) -> Self {
        traffic.sent.fetch_add(1, Ordering::Relaxed);
        Self(traffic)
    }

    fn hears(&self) {
        self.0.heard.fetch_add(1, Ordering::Relaxed);
    }
}

impl Drop for RequestGuard {
    fn drop(&mut self) {
        self.0.ended.fetch_add(1, Ordering::Relaxed);
    }
}

impl PublishConnection {
    /// Starts HTTP/2 on a fresh connection, without waiting for the server's answer.
    pub(super) async fn start(
        io: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
        origin: Uri,
    ) -> Result<Self, h2::Error> {
        Self::start_with(io, origin, PING_AFTER, PING_TIMEOUT).await
    }

    async fn start_with(
        io: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
        origin: Uri,
        ping_after: Duration,
        ping_timeout: Duration,
    ) -> Result<Self, h2::Error> {
        let (requests, mut connection) = client::Builder::new()
            .enable_push(false)
            .initial_window_size(WINDOW)
            .initial_connection_window_size(WINDOW)
            .initial_max_send_streams(FIRST_REQUESTS)
            .max_send_buffer_size(BUFFERED)
            .handshake::<_, RequestBody>(io)
            .await?;
        let traffic = Arc::new(Traffic::default());
        let pings = connection.ping_pong();
        let seen = traffic.clone();
        tokio::spawn(async move {
            // Poll the connection first: after a stall of this process, answers may be waiting to be read, and
            // one of them may answer the ping. If a ping fails, the connection is dropped, so its requests fail.
            tokio::select! {
                biased;
                ended = connection => match ended {
                    Ok(()) => tracing::debug!(target: LOG_TARGET, "a connection to Pub/Sub was closed"),
                    Err(error) => tracing::debug!(target: LOG_TARGET, %error, "a connection to Pub/Sub broke"),
                },
                () = until_silent(&seen, pings, ping_after, ping_timeout) => {
                    tracing::warn!(
                        target: LOG_TARGET,
                        "a connection to Pub/Sub is dead: it did not answer a ping"
                    );
                }
            }
        });
        Ok(Self {
            requests,
            origin,
            traffic,
        })
    }

    /// Makes one call: sends a request, and returns the message in the answer.
    ///
    /// # Errors
    /// The status in the answer, or a status derived from the HTTP code if the answer has none. INTERNAL if
    /// the answer is not exactly one message. UNAVAILABLE if the connection or this request's stream breaks.
    pub(super) async fn unary(
        &self,
        method: &'static str,
        headers: HeaderMap,
        body: RequestBody,
    ) -> Result<Bytes, Status> {
        let head = self.head(method, headers)?;
        let sent = self.requests.clone().send_request(head, false);
        let (mut answer, stream) = sent.map_err(broken)?;
        let waiting = RequestGuard::new(self.traffic.clone());
        let mut sending = Sending { stream, body };
        let answer = poll_fn(|cx| {
            sending.advance(cx);
            Pin::new(&mut answer).poll(cx)
        });
        let (head, mut stream) = answer.await.map_err(broken)?.into_parts();
        waiting.hears();
        match answer::status(head.headers) {
            Some(Err(status)) => return Err(status),
            None if head.status != StatusCode::OK => {
                return Err(answer::without_status(head.status));
            }
            Some(Ok(())) | None => {}
        }
        let mut data = answer::Data::default();
        // The answer can begin before the whole request is sent, so continue to send meanwhile.
        while let Some(part) = poll_fn(|cx| {
            sending.advance(cx);
            stream.poll_data(cx)
        })
        .await
        {
            waiting.hears();
            let part = part.map_err(broken)?;
            let room = stream.flow_control().release_capacity(part.len());
            room.map_err(broken)?;
            data.push(part)?;
        }
        let trailers = poll_fn(|cx| stream.poll_trailers(cx)).await;
        let status = trailers.map_err(broken)?.and_then(answer::status);
        status.unwrap_or_else(|| Err(answer::without_status(head.status)))?;
        data.into_message()
    }

    fn head(&self, method: &'static str, mut headers: HeaderMap) -> Result<Request<()>, Status> {
        let mut url = self.origin.clone().into_parts();
        url.path_and_query = Some(PathAndQuery::from_static(method));
        headers.insert(header::TE, HeaderValue::from_static("trailers"));
        headers.insert(
            header::CONTENT_TYPE,
            HeaderValue::from_static("application/grpc"),
        );
        headers.insert(header::USER_AGENT, USER_AGENT);
        let mut head = Request::new(());
        *head.method_mut() = Method::POST;
        *head.uri_mut() = Uri::from_parts(url).map_err(|e| Status::internal(e.to_string()))?;
        *head.version_mut() = Version::HTTP_2;
        *head.headers_mut() = headers;
        Ok(head)
    }

    /// Whether the connection accepts new requests. It no longer does so once the server has announced that
    /// it is going to close the connection.
    pub(super) async fn is_open(&mut self) -> bool {
        poll_fn(|cx| self.requests.poll_ready(cx)).await.is_ok()
    }
}

/// Builds the error for a request that got no answer. The outcome of such a request is unknown.
fn broken(error: h2::Error) -> Status {
    let mut status = Status::unavailable("the request got no answer");
    status.set_source(Arc::new(error));
    status
}

/// Returns when the connection is dead: although requests wait for an answer, nothing arrives for the time `after`, and
/// the server does not answer a ping within `timeout` either.
async fn until_silent(
    traffic: &Traffic,
    pings: Option<PingPong>,
    after: Duration,
    timeout: Duration,
) {
    let Some(mut pings) = pings else {
        return std::future::pending().await;
    };
    let (mut sent, mut heard, mut since) = (0, 0, Instant::now());
    loop {
        tokio::time::sleep(after / 4).await;
        let ended = traffic.ended.load(Ordering::Relaxed);
        let sent_now = traffic.sent.load(Ordering::Relaxed);
        let heard_now = traffic.heard.load(Ordering::Relaxed);
        // Ping only if a request is unanswered or was sent after `since`. Servers treat other pings as abuse.
        // Requests sent after `since` count even if their callers have given up. Otherwise callers that give up
        // early would hide a dead connection.
        let asks = sent_now != sent || sent_now != ended;
        if asks && heard_now == heard {
            if since.elapsed() < after {
                continue;
            }
            if !is_answered(&mut pings, timeout).await {
                return;
            }
        }
        (sent, heard, since) = (sent_now, heard_now, Instant::now());
    }
}

/// Whether the server answers a ping in time. Waits for half of the timeout, and then for the other half, in case
/// this process stalls. After a stall, a timer can fire before the connection has read an answer that arrived during
/// the stall. The connection reads such an answer during the second wait.
async fn is_answered(pings: &mut PingPong, timeout: Duration) -> bool {
    let mut answer = pin!(pings.ping(Ping::opaque()));
    for _ in 0..2 {
        let answer = tokio::time::timeout(timeout / 2, &mut answer).await;
        if answer.is_ok() {
            return true;
        }
    }
    false
}

/// A request body while it is being sent. Contains the bytes for which the server's flow control has
/// no room yet. If the caller abandons the request, these bytes are dropped.
#[derive(Debug)]
struct Sending {
    stream: SendStream<RequestBody>,
    body: RequestBody,
}

impl Sending {
    /// Sends as much as the server has room for. Wakes `cx` when there is more room.
    fn advance(&mut self, cx: &mut Context<'_>) {
        while self.body.has_remaining() {
            let mut room = self.body.remaining();
            if room > AT_ONCE {
                self.stream.reserve_capacity(room);
                room = room.min(self.stream.capacity());
            }
            let part = self.body.split_to(room);
            if part.has_remaining()
                && self
                    .stream
                    .send_data(part, !self.body.has_remaining())
                    .is_err()
            {
                self.body = RequestBody::default();
            }
            if !self.body.has_remaining() {
                return;
            }
            match self.stream.poll_capacity(cx) {
                Poll::Ready(Some(Ok(_))) => {}
                // The server does not read the rest of this request. Its answer will say why.
                Poll::Ready(Some(Err(_)) | None) => self.body = RequestBody::default(),
                Poll::Pending => return,
            }
        }
    }
}

#[cfg(test)]
mod tests;
