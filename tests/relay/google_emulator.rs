//! The same way against Google's own emulator, an independent referee, where its jar is installed.

use std::collections::BTreeMap;
use std::process::{Child, Command, Stdio};

use googleapis_tonic_google_pubsub_v1::google::pubsub::v1::publisher_client::PublisherClient;
use googleapis_tonic_google_pubsub_v1::google::pubsub::v1::subscriber_client::SubscriberClient;
use googleapis_tonic_google_pubsub_v1::google::pubsub::v1::{
    AcknowledgeRequest, PullRequest, Subscription, Topic,
};

use crate::harness::{self, Database, PATIENCE, Relay, insert_orders};

/// Google's emulator on a free port; ends with the test.
struct GoogleEmulator {
    child: Child,
    host: String,
}

impl GoogleEmulator {
    fn start() -> Option<Self> {
        let files = Command::new("dpkg")
            .args(["-L", "google-cloud-cli-pubsub-emulator"])
            .output();
        let files = String::from_utf8(files.ok()?.stdout).ok()?;
        let jar = files
            .lines()
            .find(|file| file.ends_with("-all.jar"))?
            .to_owned();
        let port = std::net::TcpListener::bind("127.0.0.1:0")
            .ok()?
            .local_addr()
            .ok()?
            .port();
        let child = Command::new("java")
            .args(["-jar", &jar, "--host=127.0.0.1", &format!("--port={port}")])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .ok()?;
        Some(Self {
            child,
            host: format!("127.0.0.1:{port}"),
        })
    }
}

impl Drop for GoogleEmulator {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn googles_own_emulator_gets_every_event_once_in_order() {
    let Some(emulator) = GoogleEmulator::start() else {
        eprintln!("SKIPPED: Google's Pub/Sub emulator (or Java) is not installed");
        return;
    };
    let channel = harness::channel(&emulator.host).await;
    let topic = "projects/demo/topics/order.events";
    let mut publisher = PublisherClient::new(channel.clone());
    publisher
        .create_topic(Topic {
            name: topic.into(),
            ..Topic::default()
        })
        .await
        .unwrap();
    let mut subscriber = SubscriberClient::new(channel);
    let subscription = "projects/demo/subscriptions/orders".to_owned();
    subscriber
        .create_subscription(Subscription {
            name: subscription.clone(),
            topic: topic.into(),
            enable_message_ordering: true,
            ack_deadline_seconds: 60,
            ..Subscription::default()
        })
        .await
        .unwrap();
    let database = Database::start().await;
    insert_orders(&database, 250, 5).await;
    let relay = Relay::start_with(&database, &emulator.host, &[]);
    insert_orders(&database, 250, 5).await;
    database.wait_until_recorded().await;
    database.wait_until_confirmed().await;
    let mut seen: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let deadline = std::time::Instant::now() + PATIENCE;
    while seen.values().map(Vec::len).sum::<usize>() < 500 {
        assert!(
            std::time::Instant::now() < deadline,
            "{seen:?}\n{}",
            relay.log()
        );
        let request = PullRequest {
            subscription: subscription.clone(),
            max_messages: 1_000,
            ..PullRequest::default()
        };
        let received = subscriber
            .pull(request)
            .await
            .unwrap()
            .into_inner()
            .received_messages;
        let ack_ids = received.iter().map(|m| m.ack_id.clone()).collect();
        let ack = AcknowledgeRequest {
            subscription: subscription.clone(),
            ack_ids,
        };
        subscriber.acknowledge(ack).await.unwrap();
        for message in received.into_iter().filter_map(|m| m.message) {
            seen.entry(message.ordering_key)
                .or_default()
                .push(message.attributes["event_id"].clone());
        }
    }
    let expected = database.expected().await;
    for (stream, ids) in expected {
        assert_eq!(seen[&stream.ordering_key], ids, "{stream}");
    }
}
