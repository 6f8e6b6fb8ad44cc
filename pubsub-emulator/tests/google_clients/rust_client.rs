//! Tests Google's own Rust client, in the test process.

use std::collections::BTreeMap;
use std::time::Duration;

use google_cloud_auth::credentials::anonymous;
use google_cloud_pubsub::client::{Publisher, Subscriber, SubscriptionAdmin, TopicAdmin};
use google_cloud_pubsub::model::Message;
use pubsub_emulator::Emulator;

use crate::{KEYS, PER_KEY, PROJECT, assert_published_in_order};

const LIMIT: Duration = Duration::from_secs(60);

#[tokio::test]
async fn googles_rust_client_publishes_and_receives_in_order() {
    // An error means that a crypto provider is already installed.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let emulator = Emulator::builder().start().await.expect("a free port");
    let endpoint = format!("http://{}", emulator.addr());
    let topic = format!("projects/{PROJECT}/topics/rust-orders");
    let subscription = format!("projects/{PROJECT}/subscriptions/rust-orders");
    create(&endpoint, &topic, &subscription).await;

    let publisher = Publisher::builder(&topic)
        .with_endpoint(&endpoint)
        .with_credentials(anonymous::Builder::new().build())
        .build()
        .await
        .expect("a publisher");
    let mut published = Vec::new();
    for n in 0..PER_KEY {
        for key in 0..KEYS {
            let key = format!("key-{key}");
            let message = Message::new()
                .set_data(n.to_string())
                .set_attributes([("event_id", format!("{key}/{n}"))])
                .set_ordering_key(key);
            published.push(publisher.publish(message));
        }
    }
    for message_id in published {
        message_id.await.expect("published");
    }
    assert_published_in_order(&emulator, "rust-orders");

    let received = tokio::time::timeout(LIMIT, receive(&endpoint, &subscription)).await;
    let expected: Vec<u64> = (0..PER_KEY).collect();
    for (key, numbers) in received.expect("all messages come in time") {
        assert_eq!(numbers, expected, "{key}");
    }
    emulator.shutdown().await;
}

async fn admin(endpoint: &str) -> (TopicAdmin, SubscriptionAdmin) {
    let topics = TopicAdmin::builder()
        .with_endpoint(endpoint)
        .with_credentials(anonymous::Builder::new().build())
        .build()
        .await
        .expect("a topic client");
    let subscriptions = SubscriptionAdmin::builder()
        .with_endpoint(endpoint)
        .with_credentials(anonymous::Builder::new().build())
        .build()
        .await
        .expect("a subscription client");
    (topics, subscriptions)
}

async fn create(endpoint: &str, topic: &str, subscription: &str) {
    let (topics, subscriptions) = admin(endpoint).await;
    topics
        .create_topic()
        .set_name(topic)
        .send()
        .await
        .expect("a new topic");
    subscriptions
        .create_subscription()
        .set_name(subscription)
        .set_topic(topic)
        .set_enable_message_ordering(true)
        .send()
        .await
        .expect("a new subscription");
}

/// Receives all messages. Returns the numbers of each key in the order in which they were received.
async fn receive(endpoint: &str, subscription: &str) -> BTreeMap<String, Vec<u64>> {
    let subscriber = Subscriber::builder()
        .with_endpoint(endpoint)
        .with_credentials(anonymous::Builder::new().build())
        .build()
        .await
        .expect("a subscriber");
    let mut stream = subscriber.subscribe(subscription).build();
    let mut received: BTreeMap<String, Vec<u64>> = BTreeMap::new();
    for _ in 0..KEYS as u64 * PER_KEY {
        let next = stream.next().await.expect("the stream continues");
        let (message, handler) = next.expect("the stream continues");
        let number = String::from_utf8(message.data.to_vec()).expect("text");
        let number = number.parse().expect("a number");
        received
            .entry(message.ordering_key)
            .or_default()
            .push(number);
        handler.ack();
    }
    stream.shutdown_token().shutdown().await;
    received
}

#[tokio::test]
async fn googles_rust_client_administers_over_rest() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let emulator = Emulator::builder().start().await.expect("a free port");
    let endpoint = format!("http://{}", emulator.addr());
    let topic = format!("projects/{PROJECT}/topics/rust-orders");
    let subscription = format!("projects/{PROJECT}/subscriptions/rust-orders");
    create(&endpoint, &topic, &subscription).await;
    let (topics, subscriptions) = admin(&endpoint).await;

    let again = topics.create_topic().set_name(&topic).send().await;
    let error = again.expect_err("it exists");
    let status = error.status().expect("the emulator's answer");
    assert_eq!(status.code.name(), "ALREADY_EXISTS");
    assert_eq!(
        status.message,
        "Resource already exists in the project (resource=rust-orders)."
    );

    let list = topics
        .list_topics()
        .set_project(format!("projects/{PROJECT}"))
        .set_page_size(1);
    let listed = list.send().await.expect("listed");
    let names = listed.topics.iter().map(|topic| &topic.name);
    assert_eq!(names.collect::<Vec<_>>(), [&topic]);

    let get = subscriptions
        .get_subscription()
        .set_subscription(&subscription);
    let found = get.send().await.expect("found");
    assert!(found.enable_message_ordering);
    assert_eq!(
        (found.topic.as_str(), found.ack_deadline_seconds),
        (topic.as_str(), 10)
    );

    let dead_letter =
        google_cloud_pubsub::model::DeadLetterPolicy::new().set_dead_letter_topic(&topic);
    let unsupported = subscriptions
        .create_subscription()
        .set_name(format!("{subscription}-2"))
        .set_topic(&topic)
        .set_dead_letter_policy(dead_letter);
    let error = unsupported.send().await.expect_err("not offered");
    assert!(error.to_string().contains("deadLetterPolicy"), "{error}");

    let delete = subscriptions
        .delete_subscription()
        .set_subscription(&subscription);
    delete.send().await.expect("deleted");
    topics
        .delete_topic()
        .set_topic(&topic)
        .send()
        .await
        .expect("deleted");
    let gone = topics
        .get_topic()
        .set_topic(&topic)
        .send()
        .await
        .expect_err("gone");
    assert_eq!(gone.http_status_code(), Some(404));
    emulator.shutdown().await;
}
