//! The same way against Google's own emulator, an independent referee, where its jar is installed.

use std::collections::{BTreeMap, BTreeSet};
use std::process::{Child, Command, Stdio};

use fault_proxy::{Cut, FaultProxy, Target};
use googleapis_tonic_google_pubsub_v1::google::pubsub::v1::publisher_client::PublisherClient;
use googleapis_tonic_google_pubsub_v1::google::pubsub::v1::subscriber_client::SubscriberClient;
use googleapis_tonic_google_pubsub_v1::google::pubsub::v1::{
    AcknowledgeRequest, PullRequest, Subscription, Topic,
};

use pubsub_emulator::checks::Expected;
use tonic::transport::Channel;

use crate::harness::{self, Database, PATIENCE, Relay, insert_orders};
use crate::load::{Load, wait_for_more};

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

/// Google's emulator with the topic of the orders, and a subscription that keeps their order.
struct Referee {
    emulator: GoogleEmulator,
    subscriber: SubscriberClient<Channel>,
    subscription: String,
}

impl Referee {
    /// `None` where it is not installed.
    async fn start() -> Option<Self> {
        let Some(emulator) = GoogleEmulator::start() else {
            eprintln!("SKIPPED: Google's Pub/Sub emulator (or Java) is not installed");
            return None;
        };
        let channel = harness::channel(&emulator.host).await;
        let topic = Topic {
            name: "projects/demo/topics/order.events".into(),
            ..Topic::default()
        };
        let subscription = Subscription {
            name: "projects/demo/subscriptions/orders".into(),
            topic: topic.name.clone(),
            enable_message_ordering: true,
            ack_deadline_seconds: 60,
            ..Subscription::default()
        };
        let mut publisher = PublisherClient::new(channel.clone());
        publisher.create_topic(topic).await.unwrap();
        let mut subscriber = SubscriberClient::new(channel);
        let made = subscriber.create_subscription(subscription).await.unwrap();
        Some(Self {
            emulator,
            subscriber,
            subscription: made.into_inner().name,
        })
    }

    /// Everything that is delivered until each of `expected` was seen: per key the event ids in
    /// the order of delivery, repeats included.
    async fn deliveries(&mut self, expected: &Expected, relay: &Relay) -> Deliveries {
        let mut missing: BTreeSet<String> = expected.values().flatten().cloned().collect();
        let mut seen = Deliveries::new();
        let deadline = std::time::Instant::now() + PATIENCE;
        while !missing.is_empty() {
            assert!(
                std::time::Instant::now() < deadline,
                "missing: {missing:?}\n{}",
                relay.log()
            );
            let request = PullRequest {
                subscription: self.subscription.clone(),
                max_messages: 1_000,
                ..PullRequest::default()
            };
            let answer = self.subscriber.pull(request).await.unwrap().into_inner();
            let received = answer.received_messages;
            let ack = AcknowledgeRequest {
                subscription: self.subscription.clone(),
                ack_ids: received.iter().map(|m| m.ack_id.clone()).collect(),
            };
            self.subscriber.acknowledge(ack).await.unwrap();
            for message in received.into_iter().filter_map(|m| m.message) {
                let id = message.attributes["event_id"].clone();
                missing.remove(&id);
                seen.entry(message.ordering_key).or_default().push(id);
            }
        }
        seen
    }
}

type Deliveries = BTreeMap<String, Vec<String>>;

#[tokio::test(flavor = "multi_thread")]
async fn googles_own_emulator_gets_every_event_once_in_order() {
    let Some(mut referee) = Referee::start().await else {
        return;
    };
    let database = Database::start().await;
    insert_orders(&database, 250, 5).await;
    let relay = Relay::start_with(&database, &referee.emulator.host, &[]);
    insert_orders(&database, 250, 5).await;
    database.wait_until_recorded().await;
    database.wait_until_confirmed().await;
    let expected = database.expected().await;
    let seen = referee.deliveries(&expected, &relay).await;
    for (stream, ids) in expected {
        assert_eq!(seen[&stream.ordering_key], ids, "{stream}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn googles_own_emulator_gets_every_event_in_order_through_cut_connections_and_kill_9() {
    let Some(mut referee) = Referee::start().await else {
        return;
    };
    let database = Database::start().await;
    let proxy = FaultProxy::start(Target::tcp(referee.emulator.host.clone()))
        .await
        .unwrap();
    let host = proxy.addr().to_string();
    insert_orders(&database, 500, 10).await;
    let mut relay = Relay::start_with(&database, &host, &[]);
    let load = Load::start(&database);
    for how in [Cut::Reset, Cut::Finish, Cut::Reset] {
        for _ in 0..3 {
            wait_for_more(&database, 30).await;
            proxy.cut(how);
        }
        wait_for_more(&database, 30).await;
        relay.kill_9();
        relay = Relay::start_with(&database, &host, &[]);
    }
    wait_for_more(&database, 30).await;
    load.stop().await;
    database.wait_until_recorded().await;
    database.wait_until_confirmed().await;
    let expected = database.expected().await;
    let seen = referee.deliveries(&expected, &relay).await;
    for (stream, ids) in expected {
        let mut first = BTreeSet::new();
        let mut deliveries = seen[&stream.ordering_key].clone();
        deliveries.retain(|id| first.insert(id.clone()));
        assert_eq!(deliveries, ids, "{stream}\n{}", relay.log());
    }
}
