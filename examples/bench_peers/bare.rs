//! A bare tonic client that sends a given number of requests of one message each. It keeps as many
//! requests in flight as the relay does by default.
//!
//! The client has nothing to read, no order to keep and nothing to record, so its cost per request is the
//! lowest possible.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use googleapis_tonic_google_pubsub_v1::google::pubsub::v1::publisher_client::PublisherClient;
use googleapis_tonic_google_pubsub_v1::google::pubsub::v1::{PublishRequest, PubsubMessage};
use tokio::task::JoinSet;
use tonic::transport::{Channel, Endpoint};

use crate::Done;

/// Number of channels: the relay's default of `pubsub_channels`.
const CHANNELS: usize = 4;
/// Maximum number of requests in flight: the relay's default of `in_flight_requests`.
const IN_FLIGHT: usize = 512;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Requests to send
    #[arg(long)]
    requests: u64,
    /// Address of the emulator
    #[arg(long)]
    emulator: String,
    /// Full name of the topic
    #[arg(long)]
    topic: Arc<str>,
}

pub(crate) async fn run(args: Args) -> Done {
    let mut clients = Vec::new();
    for _ in 0..CHANNELS {
        let endpoint = Endpoint::from_shared(format!("http://{}", args.emulator))?;
        let channel = endpoint.tcp_nodelay(true).connect().await?;
        clients.push(PublisherClient::new(channel));
    }
    let next = Arc::new(AtomicU64::new(1));
    let mut senders = JoinSet::new();
    for sender in 0..IN_FLIGHT {
        let client = clients[sender % CHANNELS].clone();
        let next = next.clone();
        senders.spawn(send(client, next, args.requests, args.topic.clone()));
    }
    while let Some(ended) = senders.join_next().await {
        ended??;
    }
    Ok(())
}

/// Sends one request after another until all senders together have sent enough.
async fn send(
    mut client: PublisherClient<Channel>,
    next: Arc<AtomicU64>,
    requests: u64,
    topic: Arc<str>,
) -> Done {
    loop {
        let n = next.fetch_add(1, Ordering::Relaxed);
        if n > requests {
            return Ok(());
        }
        let request = PublishRequest {
            topic: topic.to_string(),
            messages: vec![message(n)],
        };
        client.publish(request).await?;
    }
}

/// Builds the message that the relay builds from row `n` of the benchmark's backlog.
fn message(n: u64) -> PubsubMessage {
    let note = "x".repeat(100);
    let attributes = [
        ("event_id", format!("00000000-0000-4000-8000-{n:012}")),
        ("event_type", "OrderPlaced".into()),
        ("aggregate_type", "order".into()),
        ("aggregate_id", format!("k-{n}")),
        ("version", n.to_string()),
        ("schema_version", "1".into()),
        ("occurred_at", "2026-01-01T00:00:00.000000Z".into()),
    ];
    PubsubMessage {
        data: format!(r#"{{"note": "{note}", "order": {n}}}"#).into(),
        attributes: attributes
            .map(|(name, value)| (name.to_owned(), value))
            .into_iter()
            .collect::<HashMap<_, _>>(),
        ordering_key: format!("k-{n}"),
        ..PubsubMessage::default()
    }
}
