//! Publishing: the unary `Publish` call, one attempt at a time.
//!
//! Messages arrive encoded and are sent as they are, so a retry encodes nothing. The lanes decide
//! which request is sent when, and when it is retried. One table in `failure` says what a failure
//! means. Why not Google's own publisher: it keeps a task for each key it has ever seen, queues
//! without bound and retries out of sight (`docs/adr/0002-own-publish-call.md`).
//!
//! **Invariant.** A token is never sent over plain text.

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
mod topics;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use prost::Message;
use tonic::codegen::http::{HeaderMap, HeaderValue};

pub(crate) use backoff::Backoff;
pub(crate) use endpoint::is_global;
pub use failure::{Class, Failure};
pub(crate) use message_ids::MessageIds;
pub(crate) use topics::TopicAdmin;

use crate::error::{Code, Error, Result};
use crate::settings::Settings;
use body::RequestBody;
use channel::Channel;
use credentials::Credentials;

const METHOD: &str = "/google.pubsub.v1.Publisher/Publish";

/// The connections to Pub/Sub, opened on first use and reopened after a break.
#[derive(Debug, Clone)]
pub(crate) struct Publisher {
    channels: Arc<[Channel]>,
    next: Arc<AtomicUsize>,
    credentials: Credentials,
    timeout: Duration,
}

impl Publisher {
    /// Prepares the connections without opening any.
    ///
    /// # Errors
    /// `pubsub-endpoint`, `credentials-missing`.
    pub(crate) fn new(settings: &Settings) -> Result<Self> {
        let channels = (0..settings.pubsub_channels)
            .map(|_| endpoint::channel(&settings.pubsub, settings.publish_timeout))
            .collect::<Result<Vec<_>>>()?;
        Ok(Self {
            channels: channels.into(),
            next: Arc::new(AtomicUsize::new(0)),
            credentials: Credentials::for_endpoint(&settings.pubsub)?,
            timeout: settings.publish_timeout,
        })
    }

    /// Makes one attempt to publish encoded `PubsubMessage`s of one ordering key, with a deadline of
    /// `publish_timeout_s` after `asked_at`. The ids are in the order of the messages. The process
    /// may stall after `asked_at` and lose its right to send in the meantime, so past the deadline
    /// nothing is handed to the connection.
    ///
    /// # Errors
    /// A [`Failure`] with its class. Unless that is [`Class::Content`] or [`Class::Environment`], the
    /// messages may have been stored all the same.
    pub(crate) async fn publish<'a>(
        &self,
        topic: &str,
        messages: impl ExactSizeIterator<Item = &'a Bytes> + Clone,
        asked_at: Instant,
    ) -> Result<MessageIds, Failure> {
        let sent = messages.len();
        let deadline = tokio::time::Instant::from_std(asked_at) + self.timeout;
        let ids = tokio::select! {
            biased;
            () = tokio::time::sleep_until(deadline) => {
                return Err(Failure::unknown(format!("no answer in {:?}", self.timeout)));
            }
            answer = self.attempt(topic, messages, deadline) => answer?,
        };
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
        let mut headers = self.credentials.headers().await?;
        route(topic, &mut headers);
        let channel = self.next.fetch_add(1, Ordering::Relaxed) % self.channels.len();
        let connection = self.channels[channel].connection().await;
        let connection = connection.map_err(|status| Failure::from_status(&status))?;
        // Check the clock: after a stall the runtime's timers lag behind.
        if tokio::time::Instant::now() >= deadline {
            return Err(Failure::unknown(format!("not sent in {:?}", self.timeout)));
        }
        // Not earlier: while no connection opens, the messages should not be in memory twice.
        let body = RequestBody::publish(topic, messages);
        let answer = connection.unary(METHOD, headers, body).await;
        let answer = answer.map_err(|status| Failure::from_status(&status))?;
        MessageIds::decode(answer)
            .map_err(|e| Failure::unknown(format!("cannot decode the answer: {e}")))
    }
}

/// Characters that a routing header's value escapes: all that URLs reserve. A project name may have a
/// colon, a topic name a plus or a percent sign.
const RESERVED: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'.')
    .remove(b'_')
    .remove(b'~');

/// Adds the header by which Google's front end routes the request to its topic.
///
/// Source: Google's AIP-4222, "Routing headers".
fn route(topic: &str, headers: &mut HeaderMap) {
    let value = format!("topic={}", utf8_percent_encode(topic, RESERVED));
    if let Ok(value) = HeaderValue::try_from(value) {
        headers.insert("x-goog-request-params", value);
    }
}

/// Maps a failed publish attempt to the error code that the operator sees.
pub(crate) fn error(failure: &Failure, topic: &str) -> Error {
    let code = match (failure.class, failure.grpc_code()) {
        (Class::UnknownOutcome, _) => Code::PubsubUnreachable,
        (Class::Throttled, _) => Code::PubsubThrottled,
        (Class::Environment, Some(tonic::Code::NotFound)) => Code::TopicMissing,
        (Class::Environment, Some(tonic::Code::Unauthenticated) | None) => {
            Code::PubsubUnauthenticated
        }
        (Class::Environment, Some(_)) => Code::PubsubPermission,
        (Class::Content, _) => Code::EventRefused,
    };
    let error = Error::new(code, format!("Pub/Sub, {topic}: {failure}"));
    match (failure.class, failure.grpc_code()) {
        (Class::Environment, Some(tonic::Code::InvalidArgument)) => {
            error.hint("correct the project and topic settings, or fix what Google's message names")
        }
        _ => error,
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
