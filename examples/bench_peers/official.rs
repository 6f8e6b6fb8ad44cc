//! Reads and maps events with the relay's own source, decoder and mapper, and publishes them with
//! Google's own Publisher.
//!
//! The Publisher accepts messages only as its own type, so this program decodes each encoded message again.
//! The decoding takes about a microsecond per message, which the relay does not spend. On the other hand,
//! only the relay writes dispatch rows.

use std::collections::VecDeque;

use decoder::Lsn;
use google_cloud_auth::credentials::anonymous;
use google_cloud_pubsub::client::Publisher;
use google_cloud_pubsub::model::Message;
use google_cloud_pubsub::publisher::PublishFuture;
use googleapis_tonic_google_pubsub_v1::google::pubsub::v1::PubsubMessage;
use postrider::session::{MappedEvent, MappedStream};
use prost::Message as _;

use crate::{Done, settings};

/// Maximum number of messages that wait for their message id: about as many messages of the benchmark as
/// fit into the relay's budget of 24 MiB. The Publisher's own queues have no limit.
const IN_FLIGHT: usize = 40_000;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Position of the WAL at which to end
    #[arg(long)]
    until: Lsn,
    /// Address of the emulator
    #[arg(long)]
    emulator: String,
    /// Full name of the topic
    #[arg(long)]
    topic: String,
}

pub(crate) async fn run(args: Args) -> Done {
    let publisher = Publisher::builder(&args.topic)
        .with_endpoint(format!("http://{}", args.emulator))
        .with_credentials(anonymous::Builder::new().build())
        .build()
        .await?;
    let mut stream = MappedStream::open(&settings()?).await?;
    let mut waiting = VecDeque::new();
    let mut events = Vec::new();
    loop {
        let confirmed = stream.next(|event| events.push(event)).await?;
        for event in events.drain(..) {
            if waiting.len() >= IN_FLIGHT
                && let Some(oldest) = waiting.pop_front()
            {
                published(oldest).await?;
            }
            waiting.push_back(publisher.publish(message(event)?));
        }
        if confirmed >= args.until {
            break;
        }
    }
    for rest in waiting {
        published(rest).await?;
    }
    stream.close().await;
    Ok(())
}

async fn published(waiting: PublishFuture) -> Done {
    waiting
        .await
        .map(drop)
        .map_err(|error| error.to_string().into())
}

fn message(event: MappedEvent) -> Done<Message> {
    let decoded = PubsubMessage::decode(event.message)?;
    Ok(Message::new()
        .set_data(decoded.data)
        .set_attributes(decoded.attributes)
        .set_ordering_key(decoded.ordering_key))
}
