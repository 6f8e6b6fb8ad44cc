//! Publishing: a thin unary `Publish`, one attempt at a time.
//!
//! Messages come encoded and go out as they are; a retry costs no second encoding. Which request
//! goes when, and again, is decided by the lanes; what a failure means is one table in
//! `failure`. Why not the official publisher: it keeps a task for each key it has ever seen,
//! queues without bound and retries unseen (`docs/adr/0002-own-publish-call.md`).

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
pub(crate) use topics::Topics;

use crate::error::{Code, Error, Result};
use crate::settings::Settings;
use body::Body;
use channel::Channel;
use credentials::Credentials;

const METHOD: &str = "/google.pubsub.v1.Publisher/Publish";

/// Connections to Pub/Sub, opened when first used and again after each break.
#[derive(Debug, Clone)]
pub(crate) struct Publisher {
    channels: Arc<[Channel]>,
    next: Arc<AtomicUsize>,
    credentials: Credentials,
    timeout: Duration,
}

impl Publisher {
    /// Prepares the connections; none is opened yet.
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

    /// One attempt with encoded `PubsubMessage`s of one ordering key, which ends `publish_timeout_s`
    /// after `asked_at`. The ids stand in the order of the messages. A process may stand still between
    /// the two, and the right to send may end meanwhile: what is overdue is not handed to the
    /// connection.
    ///
    /// # Errors
    /// A [`Failure`] with its class; unless it is of [`Class::Content`] or
    /// [`Class::Environment`], the messages may have been stored all the same.
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
                "Pub/Sub answered with {} ids for {sent} messages",
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
        // The runtime's timers lag behind when the process has stood still.
        if tokio::time::Instant::now() >= deadline {
            return Err(Failure::unknown(format!("not sent in {:?}", self.timeout)));
        }
        // Not sooner: while no connection opens, messages are not to be in memory twice.
        let body = Body::publish(topic, messages);
        let answer = connection.unary(METHOD, headers, body).await;
        let answer = answer.map_err(|status| Failure::from_status(&status))?;
        MessageIds::decode(answer)
            .map_err(|e| Failure::unknown(format!("the answer cannot be read: {e}")))
    }
}

/// What a value of the routing header escapes: all that URLs reserve. A project's name may have a colon,
/// a topic's a plus or a percent sign.
const RESERVED: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'.')
    .remove(b'_')
    .remove(b'~');

/// Tells Google's front end which topic the request is for.
///
/// Source: Google's AIP-4222, "Routing headers".
fn route(topic: &str, headers: &mut HeaderMap) {
    let value = format!("topic={}", utf8_percent_encode(topic, RESERVED));
    if let Ok(value) = HeaderValue::try_from(value) {
        headers.insert("x-goog-request-params", value);
    }
}

/// The operator's error for a failure that is not retried, or that is worth telling of.
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
        (Class::Environment, Some(tonic::Code::InvalidArgument)) => error
            .hint("correct the project and the topic settings, or what Google's message asks for"),
        _ => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_routing_header_escapes_what_is_reserved_in_urls() {
        let mut headers = HeaderMap::new();
        route("projects/example.com:p/topics/a+b%c~d_e-1", &mut headers);
        assert_eq!(
            headers["x-goog-request-params"],
            "topic=projects%2Fexample.com%3Ap%2Ftopics%2Fa%2Bb%25c~d_e-1"
        );
    }
}
