//! Tests the rules that every Pub/Sub implementation must follow, on this emulator and on Google's
//! emulator.
//!
//! The same cases run on both emulators, so Google's emulator is an independent referee. Where
//! Google's emulator is lax or wrong (mixed keys, limits, filters, flow control, ordered
//! redelivery) there is no case here: see `strict.rs` and `deliveries.rs`. The Debian package
//! `google-cloud-cli-pubsub-emulator` contains the jar of Google's emulator. Without the jar or
//! Java, the cases on Google's emulator are skipped.

mod raw;
#[path = "conformance/referee.rs"]
mod referee;

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::pin::Pin;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use googleapis_tonic_google_pubsub_v1::google::pubsub::v1 as proto;
use pubsub_emulator::Emulator;
use raw::{Clients, ack_ids, data, event, message, refused};
use referee::Referee;
use tonic::Code;
use tonic::codec::CompressionEncoding;

/// Declares the cases once. On this emulator each case runs in its own test. On Google's emulator
/// all cases run in one test, because that emulator starts slowly.
macro_rules! cases {
    ($($case:ident),* $(,)?) => {
        mod this_emulator {
            $(
                #[tokio::test]
                async fn $case() {
                    let emulator = super::Emulator::builder().start().await.expect("a free port");
                    super::$case(super::Clients::connect(emulator.addr(), "conformance").await).await;
                    emulator.shutdown().await;
                }
            )*
        }

        type Case = fn(Clients) -> Pin<Box<dyn Future<Output = ()> + Send>>;
        const CASES: &[(&str, Case)] = &[
            $((stringify!($case), |clients| Box::pin($case(clients)))),*
        ];
    };
}

cases![
    message_ids_answer_the_messages_of_a_request_in_order,
    each_key_is_received_in_the_order_of_publication,
    published_messages_are_received_unchanged,
    missing_resources_are_not_found,
    existing_resources_already_exist,
    a_request_of_more_than_a_thousand_messages_is_refused_whole,
    an_empty_message_is_refused,
    every_subscription_gets_every_message_published_after_its_creation,
    acknowledged_messages_are_not_redelivered,
    a_nacked_message_is_redelivered,
    unary_acknowledgements_count_for_streamed_messages,
    a_compressed_request_is_accepted,
    topics_are_listed_in_pages,
    a_deleted_topic_leaves_its_subscriptions_behind,
    a_deleted_subscription_ends_its_streams,
];

#[tokio::test]
async fn googles_own_emulator_passes_all_our_conformance_cases() {
    let Some(referee) = Referee::start() else {
        return;
    };
    let mut failed = Vec::new();
    for (name, case) in CASES {
        let clients = Clients::connect(referee.address, name).await;
        if let Err(panic) = tokio::spawn(case(clients)).await {
            failed.push(format!("{name}: {panic}"));
        }
    }
    assert_eq!(failed, [] as [String; 0]);
}

async fn message_ids_answer_the_messages_of_a_request_in_order(mut clients: Clients) {
    let (topic, subscription) = clients.create_ordered("orders").await;
    let mut ids: Vec<u64> = Vec::new();
    for batch in 0..3 {
        let messages = (0..10)
            .map(|n| message("k", &format!("{}", batch * 10 + n)))
            .collect();
        let answered = clients.publish(&topic, messages).await.expect("published");
        ids.extend(
            answered
                .iter()
                .map(|id| id.parse::<u64>().expect("a decimal number")),
        );
    }
    assert_eq!(ids.len(), 30);
    assert!(ids.is_sorted_by(|a, b| a < b), "{ids:?}");
    let mut stream = clients.stream(&subscription).await;
    for received in stream.messages(30).await {
        let place: usize = data(&received).parse().expect("a number");
        let id = received.message.expect("a message").message_id;
        assert_eq!(id, ids[place].to_string());
    }
}

async fn each_key_is_received_in_the_order_of_publication(mut clients: Clients) {
    let (topic, subscription) = clients.create_ordered("orders").await;
    let mut stream = clients.stream(&subscription).await;
    for n in 0..40 {
        let key = format!("key-{}", n % 4);
        clients
            .publish(&topic, vec![event(&key, &format!("{n}"))])
            .await
            .expect("published");
    }
    let mut by_key: BTreeMap<String, Vec<u32>> = BTreeMap::new();
    let mut count = 0;
    while count < 40 {
        let received = stream.messages(1).await;
        count += received.len();
        stream.acknowledge(ack_ids(&received)).await;
        for received in received {
            let number = data(&received).parse().expect("a number");
            let key = received.message.expect("a message").ordering_key;
            by_key.entry(key).or_default().push(number);
        }
    }
    assert_eq!(by_key.len(), 4);
    for (key, numbers) in by_key {
        assert!(numbers.is_sorted(), "{key}: {numbers:?}");
    }
}

async fn published_messages_are_received_unchanged(mut clients: Clients) {
    let (topic, subscription) = clients.create_ordered("orders").await;
    let published = proto::PubsubMessage {
        data: vec![0, 159, 146, 150].into(),
        attributes: [
            ("größe".to_owned(), "小".to_owned()),
            ("empty".to_owned(), String::new()),
        ]
        .into(),
        ordering_key: "schlüssel".to_owned(),
        ..Default::default()
    };
    let ids = clients
        .publish(&topic, vec![published.clone()])
        .await
        .expect("published");
    let received = clients.pull_all(&subscription, 1).await.remove(0);
    let received = received.message.expect("a message");
    assert_eq!(received.message_id, ids[0]);
    let time = received.publish_time.expect("a publish time");
    assert!(time.seconds > 1_600_000_000, "{time:?}");
    let cleared = proto::PubsubMessage {
        message_id: String::new(),
        publish_time: None,
        ..received
    };
    assert_eq!(cleared, published);
}

async fn missing_resources_are_not_found(mut clients: Clients) {
    let topic = clients.topic("missing");
    let status = refused(
        clients.publish(&topic, vec![message("", "x")]).await,
        Code::NotFound,
    );
    assert!(status.message().contains("not found"), "{status:?}");
    let request = proto::GetTopicRequest {
        topic: topic.clone(),
    };
    refused(clients.publisher.get_topic(request).await, Code::NotFound);
    let settings = proto::Subscription::default();
    refused(
        clients.subscribe("orphan", &topic, settings).await,
        Code::NotFound,
    );
    let subscription = clients.subscription("missing");
    refused(clients.pull(&subscription, 1).await, Code::NotFound);
    assert_eq!(
        clients.stream(&subscription).await.failure().await.code(),
        Code::NotFound
    );
}

async fn existing_resources_already_exist(mut clients: Clients) {
    let (name, _) = clients.create_ordered("orders").await;
    let topic = proto::Topic {
        name: name.clone(),
        ..Default::default()
    };
    refused(
        clients.publisher.create_topic(topic).await,
        Code::AlreadyExists,
    );
    let settings = proto::Subscription::default();
    refused(
        clients.subscribe("orders", &name, settings).await,
        Code::AlreadyExists,
    );
}

async fn a_request_of_more_than_a_thousand_messages_is_refused_whole(mut clients: Clients) {
    let (topic, subscription) = clients.create_ordered("orders").await;
    let too_many = clients
        .publish(&topic, vec![message("", "no"); 1_001])
        .await;
    refused(too_many, Code::InvalidArgument);
    let ids = clients
        .publish(&topic, vec![message("", "yes"); 1_000])
        .await
        .expect("published");
    assert_eq!(ids.iter().collect::<BTreeSet<_>>().len(), 1_000);
    let received = clients.pull_all(&subscription, 1).await;
    assert!(received.iter().all(|received| data(received) == "yes"));
}

async fn an_empty_message_is_refused(mut clients: Clients) {
    let topic = clients.create_topic("orders").await;
    refused(
        clients.publish(&topic, vec![message("k", "")]).await,
        Code::InvalidArgument,
    );
}

async fn every_subscription_gets_every_message_published_after_its_creation(mut clients: Clients) {
    let topic = clients.create_topic("orders").await;
    clients
        .publish(&topic, vec![message("", "before")])
        .await
        .expect("published");
    let first = clients
        .subscribe("first", &topic, proto::Subscription::default())
        .await;
    let second = clients
        .subscribe("second", &topic, proto::Subscription::default())
        .await;
    clients
        .publish(&topic, vec![message("", "after")])
        .await
        .expect("published");
    for subscription in [first, second] {
        let received = clients.pull_all(&subscription.expect("created"), 1).await;
        assert_eq!(received.iter().map(data).collect::<Vec<_>>(), ["after"]);
    }
}

async fn acknowledged_messages_are_not_redelivered(mut clients: Clients) {
    let (topic, subscription) = clients.create_ordered("orders").await;
    clients
        .publish(&topic, vec![message("", "1"), message("", "2")])
        .await
        .expect("published");
    let received = clients.pull_all(&subscription, 2).await;
    clients
        .acknowledge(&subscription, ack_ids(&received))
        .await
        .expect("acknowledged");
    clients
        .publish(&topic, vec![message("", "3")])
        .await
        .expect("published");
    let received = clients.pull_all(&subscription, 1).await;
    assert_eq!(received.iter().map(data).collect::<Vec<_>>(), ["3"]);
}

async fn a_nacked_message_is_redelivered(mut clients: Clients) {
    let (topic, subscription) = clients.create_ordered("orders").await;
    clients
        .publish(&topic, vec![message("", "1")])
        .await
        .expect("published");
    let first = clients.pull_all(&subscription, 1).await;
    clients
        .modify_ack_deadline(&subscription, ack_ids(&first), 0)
        .await
        .expect("nacked");
    let again = clients.pull_all(&subscription, 1).await;
    assert_eq!(data(&again[0]), "1");
    assert_eq!(again[0].message, first[0].message);
}

async fn unary_acknowledgements_count_for_streamed_messages(mut clients: Clients) {
    let (topic, subscription) = clients.create_ordered("orders").await;
    let mut stream = clients.stream(&subscription).await;
    clients
        .publish(&topic, vec![message("", "1")])
        .await
        .expect("published");
    let received = ack_ids(&stream.messages(1).await);
    clients
        .acknowledge(&subscription, received.clone())
        .await
        .expect("acknowledged");
    // This has no effect, because the message is already acknowledged.
    clients
        .modify_ack_deadline(&subscription, received, 0)
        .await
        .expect("ignored");
    clients
        .publish(&topic, vec![message("", "2")])
        .await
        .expect("published");
    let next = stream.messages(1).await;
    assert_eq!(next.iter().map(data).collect::<Vec<_>>(), ["2"]);
}

async fn a_compressed_request_is_accepted(mut clients: Clients) {
    let topic = clients.create_topic("orders").await;
    clients.publisher = clients.publisher.send_compressed(CompressionEncoding::Gzip);
    let ids = clients
        .publish(&topic, vec![message("k", &"x".repeat(10_000))])
        .await;
    assert_eq!(ids.expect("published").len(), 1);
}

async fn topics_are_listed_in_pages(mut clients: Clients) {
    let mut created = BTreeSet::new();
    for n in 0..5 {
        created.insert(clients.create_topic(&format!("topic-{n}")).await);
    }
    let mut listed = BTreeSet::new();
    let mut page_token = String::new();
    loop {
        let request = proto::ListTopicsRequest {
            project: clients.project.clone(),
            page_size: 2,
            page_token,
        };
        let page = clients
            .publisher
            .list_topics(request)
            .await
            .expect("listed")
            .into_inner();
        assert!(page.topics.len() <= 2);
        listed.extend(page.topics.into_iter().map(|topic| topic.name));
        page_token = page.next_page_token;
        if page_token.is_empty() {
            break;
        }
    }
    assert_eq!(listed, created);
}

async fn a_deleted_topic_leaves_its_subscriptions_behind(mut clients: Clients) {
    let (topic, subscription) = clients.create_ordered("orders").await;
    let delete = proto::DeleteTopicRequest {
        topic: topic.clone(),
    };
    clients
        .publisher
        .delete_topic(delete)
        .await
        .expect("deleted");
    refused(
        clients.publish(&topic, vec![message("", "x")]).await,
        Code::NotFound,
    );
    let get = proto::GetSubscriptionRequest { subscription };
    let left = clients
        .subscriber
        .get_subscription(get)
        .await
        .expect("still there")
        .into_inner();
    assert_eq!(left.topic, "_deleted-topic_");
}

async fn a_deleted_subscription_ends_its_streams(mut clients: Clients) {
    let (topic, subscription) = clients.create_ordered("orders").await;
    let mut stream = clients.stream(&subscription).await;
    clients
        .publish(&topic, vec![message("", "x")])
        .await
        .expect("published");
    stream.messages(1).await;
    let delete = proto::DeleteSubscriptionRequest {
        subscription: subscription.clone(),
    };
    clients
        .subscriber
        .delete_subscription(delete)
        .await
        .expect("deleted");
    assert_eq!(stream.failure().await.code(), Code::NotFound);
    refused(clients.pull(&subscription, 1).await, Code::NotFound);
}
