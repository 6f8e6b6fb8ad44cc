//! Publishes encoded messages to Google Cloud Pub/Sub: the unary `Publish` call, one attempt at a time.
//!
//! Messages arrive encoded and are sent unchanged, so a retry encodes nothing. The caller decides
//! when to send which request, and when to retry it. To keep the order of an ordering key, it is
//! enough that the caller publishes the next messages of the key only after it knows the outcome of
//! the previous ones.
//!
//! - A [`Publisher`] makes attempts, over a few HTTP/2 connections to an [`Endpoint`].
//! - A [`Failure`] has a [`Class`], which says how to react. One table derives it from gRPC code
//!   and error details.
//! - [`Backoff`] computes the pause before the next attempt.
//! - [`TopicAdmin`] creates topics, and checks whether a topic exists and whether we may publish to
//!   it.
//!
//! ```
//! use std::time::{Duration, Instant};
//!
//! use bytes::Bytes;
//! use googleapis_tonic_google_pubsub_v1::google::pubsub::v1::PubsubMessage;
//! use prost::Message;
//! use publisher::{Backoff, Endpoint, Publisher, TopicAdmin};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # use pubsub_emulator::{Action, Code, Emulator, Fault};
//! # let emulator = Emulator::builder().listen("127.0.0.1:0".parse()?).start().await?;
//! # emulator.faults().inject(Fault::new(Action::StoreThenFail(Code::Unavailable)).times(1));
//! # let host = emulator.addr().to_string();
//! // `host` is the `host:port` of an emulator.
//! let publisher = Publisher::new(&Endpoint::Emulator(host), 1, Duration::from_secs(5))?;
//! let topic = "projects/demo/topics/orders";
//! TopicAdmin::new(&publisher).create(topic).await?;
//!
//! let message = PubsubMessage {
//!     data: "{}".into(),
//!     ordering_key: "order-7".into(),
//!     ..PubsubMessage::default()
//! };
//! let messages = [Bytes::from(message.encode_to_vec())];
//! let mut backoff = Backoff::new(7);
//! let mut failed_attempts = 0;
//! let ids = loop {
//!     match publisher.publish(topic, messages.iter(), Instant::now()).await {
//!         Ok(ids) => break ids,
//!         Err(failure) => {
//!             println!("retrying: {failure}");
//!             failed_attempts += 1;
//!             tokio::time::sleep(backoff.pause(failure.class, failed_attempts)).await;
//!         }
//!     }
//! };
//! println!("stored as message {}", ids.get(0).unwrap_or_default());
//! # assert_eq!((ids.len(), failed_attempts), (1, 1));
//! # assert_eq!(emulator.journal().counts().attempts, 2);
//! # emulator.shutdown().await;
//! # Ok(())
//! # }
//! ```
//!
//! We do not use Google's own publisher, because it keeps a task for each key that it has ever
//! seen, queues without a bound, and retries without telling the caller
//! (`docs/adr/0002-own-publish-call.md`).
//!
//! **Invariants.** A token is never sent unencrypted. This crate neither retries nor orders, and
//! none of its decisions depends on the text of an error.
//!
//! **Not here:** queues, lanes and flow control, the encoding of messages, and PostgreSQL.

#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a test fails by panicking"))]

mod answer;
mod backoff;
mod body;
mod channel;
mod connection;
mod credentials;
mod details;
mod endpoint;
mod failure;
mod gathering;
mod message_ids;
mod setup_error;
mod topics;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use prost::Message;
use tonic::codegen::http::{HeaderMap, HeaderValue};

/// A gRPC code.
pub use tonic::Code as GrpcCode;

pub use backoff::Backoff;
pub use credentials::CredentialsSource;
pub use endpoint::Endpoint;
pub use failure::{Class, FailedStep, Failure, RefusalReason};
pub use message_ids::MessageIds;
pub use setup_error::{CREDENTIALS_VARIABLE, SetupError, UnshownPath};
pub use topics::TopicAdmin;

use body::RequestBody;
use channel::Channel;
use credentials::Credentials;

/// The target (in the sense of `tracing`) of all log lines of this crate. It begins with the name
/// of the program, so that `RUST_LOG=postrider=debug` includes this crate.
const LOG_TARGET: &str = "postrider::publisher";

const METHOD: &str = "/google.pubsub.v1.Publisher/Publish";

/// The connections to Pub/Sub. Each is opened on first use, and opened again after it broke.
#[derive(Debug, Clone)]
pub struct Publisher {
    channels: Arc<[Channel]>,
    next: Arc<AtomicUsize>,
    credentials: Credentials,
    timeout: Duration,
}

impl Publisher {
    /// Prepares this many connections (at least one), without opening any. `timeout` limits each
    /// attempt to publish.
    ///
    /// # Errors
    /// The endpoint's URL cannot be used, or there are no credentials for it.
    pub fn new(
        endpoint: &Endpoint,
        connections: usize,
        timeout: Duration,
    ) -> Result<Self, SetupError> {
        let channels = (0..connections.max(1))
            .map(|_| endpoint::channel(endpoint, timeout))
            .collect::<Result<Vec<_>, _>>()?;
        Ok(Self {
            channels: channels.into(),
            next: Arc::new(AtomicUsize::new(0)),
            credentials: Credentials::for_endpoint(endpoint)?,
            timeout,
        })
    }

    /// Makes one attempt to publish encoded `PubsubMessage`s that share one ordering key. `topic`
    /// is a full name such as `projects/P/topics/T`. Returns the ids in the order of the messages.
    ///
    /// The deadline is `asked_at` plus the timeout. After the deadline, this method passes no request
    /// to the connection, because the process may have stalled since `asked_at` and may have lost its right
    /// to send.
    ///
    /// # Errors
    /// A [`Failure`] with its class. With [`Class::UnknownOutcome`] and [`Class::Throttled`], Pub/Sub might
    /// have stored the messages, unless [`Failure::may_have_arrived`] is false.
    pub async fn publish<'a>(
        &self,
        topic: &str,
        messages: impl ExactSizeIterator<Item = &'a Bytes> + Clone,
        asked_at: Instant,
    ) -> Result<MessageIds, Failure> {
        let sent = messages.len();
        let deadline = tokio::time::Instant::from_std(asked_at) + self.timeout;
        let ids = self.attempt(topic, messages, deadline).await?;
        if ids.len() != sent {
            return Err(Failure::unknown(format!(
                "Pub/Sub answered with {} message ids for {sent} messages",
                ids.len()
            )));
        }
        Ok(ids)
    }

    async fn attempt<'a>(
        &self,
        topic: &str,
        messages: impl Iterator<Item = &'a Bytes> + Clone,
        deadline: tokio::time::Instant,
    ) -> Result<MessageIds, Failure> {
        let mut headers = self.credentials.headers_by(deadline, self.timeout).await?;
        route(topic, &mut headers);
        let channel = self.next.fetch_add(1, Ordering::Relaxed) % self.channels.len();
        let connecting = self.channels[channel].connection();
        let connection = tokio::time::timeout_at(deadline, connecting).await;
        let connection = connection
            .map_err(|_| Failure::not_connected(format!("not connected in {:?}", self.timeout)))?
            .map_err(|status| Failure::connect(&status))?;
        // Also check the clock, because the runtime's timers lag behind after the process has stalled.
        if tokio::time::Instant::now() >= deadline {
            let what = format!("not sent in {:?}", self.timeout);
            return Err(Failure::not_connected(what));
        }
        // Build the body only now, because it contains copies of messages. While no connection can be
        // opened, the copies would take memory for nothing.
        let body = RequestBody::publish(topic, messages);
        let answer = tokio::select! {
            biased;
            () = tokio::time::sleep_until(deadline) => {
                return Err(Failure::unknown(format!("no answer in {:?}", self.timeout)));
            }
            answer = connection.unary(METHOD, headers, body) => answer,
        };
        let answer = answer.map_err(|status| Failure::from_status(&status))?;
        MessageIds::decode(answer)
            .map_err(|e| Failure::unknown(format!("cannot decode the answer: {e}")))
    }
}

/// Characters that must be escaped in the value of a routing header: all except letters, digits and
/// `-._~`. A project name may contain a colon, a topic name a plus or a percent sign.
const RESERVED: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'.')
    .remove(b'_')
    .remove(b'~');

/// Adds the header that tells Google's front end to which topic the request belongs.
///
/// Source: Google's AIP-4222, "Routing headers".
fn route(topic: &str, headers: &mut HeaderMap) {
    let value = format!("topic={}", utf8_percent_encode(topic, RESERVED));
    if let Ok(value) = HeaderValue::try_from(value) {
        headers.insert("x-goog-request-params", value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_routing_header_escapes_characters_that_urls_reserve() {
        let mut headers = HeaderMap::new();
        route("projects/example.com:p/topics/a+b%c~d_e-1", &mut headers);
        assert_eq!(
            headers["x-goog-request-params"],
            "topic=projects%2Fexample.com%3Ap%2Ftopics%2Fa%2Bb%25c~d_e-1"
        );
    }
}
