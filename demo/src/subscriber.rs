//! The subscriber: Google's own client library on an ordered subscription.
//!
//! The library creates subscriptions only over REST, which an emulator might not offer. So this
//! module creates the subscription over plain gRPC, without the library.

use std::time::{Duration, Instant};

use google_cloud_auth::credentials::anonymous;
use google_cloud_pubsub::client::Subscriber as Client;
use google_cloud_pubsub::model::Message;
use googleapis_tonic_google_pubsub_v1::google::pubsub::v1::Subscription;
use googleapis_tonic_google_pubsub_v1::google::pubsub::v1::subscriber_client::SubscriberClient;
use tokio::task::JoinHandle;
use tonic::transport::Endpoint;

use crate::error::{Result, failed};
use crate::ledger::{Arrival, Step};

/// Ack deadline of the subscription. It is longer than any pause of the demonstration, so that
/// Pub/Sub never redelivers a message because of a late ack.
const ACK_DEADLINE: Duration = Duration::from_secs(60);

/// A running subscriber, which ends when this value is dropped.
#[derive(Debug)]
pub(crate) struct Subscriber {
    task: JoinHandle<String>,
}

impl Subscriber {
    /// Creates the subscription and starts to receive. Each message is passed to `on_message` and then
    /// acknowledged.
    pub(crate) async fn start(
        emulator: &str,
        topic: &str,
        subscription: &str,
        mut on_message: impl FnMut(&Message) + Send + 'static,
    ) -> Result<Self> {
        let endpoint = format!("http://{emulator}");
        subscribe(&endpoint, topic, subscription).await?;
        let client = Client::builder()
            .with_endpoint(&endpoint)
            .with_credentials(anonymous::Builder::new().build())
            .build()
            .await
            .map_err(|e| failed("the subscriber does not start").caused_by(e))?;
        let mut stream = client.subscribe(subscription).build();
        let task = tokio::spawn(async move {
            loop {
                match stream.next().await {
                    Some(Ok((message, handler))) => {
                        on_message(&message);
                        handler.ack();
                    }
                    Some(Err(error)) => return error.to_string(),
                    None => return "the stream ended".into(),
                }
            }
        });
        Ok(Self { task })
    }

    /// Returns an error if the subscriber has ended.
    pub(crate) async fn must_run(&mut self) -> Result<()> {
        if !self.task.is_finished() {
            return Ok(());
        }
        Err(match (&mut self.task).await {
            Ok(reason) => failed("the subscriber has ended").caused_by(reason),
            Err(panic) => failed("the subscriber has ended").caused_by(panic),
        })
    }
}

impl Drop for Subscriber {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Reads a message as an event of the demonstration. Returns `None` for any other message.
pub(crate) fn arrival(message: &Message) -> Option<Arrival> {
    let attribute = |name: &str| message.attributes.get(name);
    Some(Arrival {
        step: Step {
            order: message.ordering_key.parse().ok()?,
            version: attribute("version")?.parse().ok()?,
        },
        event_id: attribute("event_id")?.parse().ok()?,
        message_id: message.message_id.clone(),
        at: Instant::now(),
    })
}

async fn subscribe(endpoint: &str, topic: &str, subscription: &str) -> Result<()> {
    let unreachable = |e| failed("cannot reach the emulator").caused_by(e);
    let channel = Endpoint::new(endpoint.to_owned()).map_err(unreachable)?;
    let channel = channel.connect().await.map_err(unreachable)?;
    let ordered = Subscription {
        name: subscription.into(),
        topic: topic.into(),
        enable_message_ordering: true,
        ack_deadline_seconds: ACK_DEADLINE.as_secs().try_into().unwrap_or(i32::MAX),
        ..Subscription::default()
    };
    match SubscriberClient::new(channel)
        .create_subscription(ordered)
        .await
    {
        Ok(_) => Ok(()),
        Err(status) => Err(failed("cannot create the subscription").caused_by(status)),
    }
}
