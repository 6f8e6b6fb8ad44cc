//! Tests requests that the service and this emulator refuse, but that Google's own emulator
//! accepts.

mod raw;

use googleapis_tonic_google_pubsub_v1::google::pubsub::v1 as proto;
use pubsub_emulator::{Answer, Emulator, RunningEmulator};
use raw::{Clients, event, message, refused};
use tonic::Code;

async fn start() -> (RunningEmulator, Clients) {
    let emulator = Emulator::builder().start().await.expect("a free port");
    let clients = Clients::connect(emulator.addr(), "strict").await;
    (emulator, clients)
}

#[tokio::test]
async fn mixed_ordering_keys_are_refused_whole_with_the_services_code() {
    let (emulator, mut clients) = start().await;
    let (topic, subscription) = clients.create_ordered("orders").await;
    let mixed = clients
        .publish(&topic, vec![message("a", "1"), message("b", "2")])
        .await;
    let status = refused(mixed, Code::FailedPrecondition);
    assert!(status.message().contains("[code=539b]"), "{status:?}");
    assert_eq!(clients.pull(&subscription, 10).await.expect("a pull"), []);
    let attempt = emulator.journal().attempts().remove(0);
    assert_eq!(attempt.answer, Answer::Error(Code::FailedPrecondition));
    assert_eq!(attempt.other_keys, ["b"]);
}

#[tokio::test]
async fn one_bad_message_refuses_the_whole_request() {
    let (_emulator, mut clients) = start().await;
    let (topic, subscription) = clients.create_ordered("orders").await;
    let mut long_value = event("", "1");
    long_value
        .attributes
        .insert("note".to_owned(), "v".repeat(1_025));
    let mut many = event("", "1");
    many.attributes
        .extend((0..100).map(|n| (n.to_string(), String::new())));
    for (bad, named) in [
        (
            long_value,
            "The attribute \"note\" in the request has a value that is too long",
        ),
        (many, "The number of attributes is 101"),
        (
            message(&"k".repeat(1_025), "x"),
            "The ordering_key in the request is too long",
        ),
        (
            message("", ""),
            "One or more messages in the publish request is empty",
        ),
    ] {
        let result = clients.publish(&topic, vec![event("", "good"), bad]).await;
        let status = refused(result, Code::InvalidArgument);
        assert!(status.message().contains(named), "{status:?}");
    }
    assert_eq!(clients.pull(&subscription, 10).await.expect("a pull"), []);
}

#[tokio::test]
async fn requests_above_ten_million_bytes_are_answered_and_not_cut_off() {
    let (_emulator, mut clients) = start().await;
    let topic = clients.create_topic("orders").await;
    let megabyte = "x".repeat(1_000_000);
    let fits = vec![message("k", &megabyte[..999_000]); 10];
    clients.publish(&topic, fits).await.expect("published");
    for megabytes in [10, 11, 40] {
        let result = clients
            .publish(&topic, vec![message("k", &megabyte); megabytes])
            .await;
        let status = refused(result, Code::InvalidArgument);
        assert!(
            status.message().contains("the maximum value is 10000000"),
            "{status:?}"
        );
    }
}

#[tokio::test]
async fn malformed_names_are_refused_before_any_lookup() {
    let (_emulator, mut clients) = start().await;
    for topic in ["orders", "projects/p/topics/x", "projects/p/topics/goog-x"] {
        let status = refused(
            clients.publish(topic, vec![message("", "x")]).await,
            Code::InvalidArgument,
        );
        assert!(
            status.message().contains("Invalid resource name given"),
            "{status:?}"
        );
    }
}

#[tokio::test]
async fn missing_topics_are_reported_in_the_services_words() {
    let (_emulator, mut clients) = start().await;
    let topic = clients.topic("missing");
    let status = refused(
        clients.publish(&topic, vec![message("", "x")]).await,
        Code::NotFound,
    );
    assert_eq!(status.message(), "Resource not found (resource=missing).");
}

#[tokio::test]
async fn a_stream_that_breaks_the_rules_ends_with_invalid_argument() {
    let (_emulator, mut clients) = start().await;
    let (_topic, subscription) = clients.create_ordered("orders").await;
    let short = proto::StreamingPullRequest {
        stream_ack_deadline_seconds: 9,
        ..Default::default()
    };
    let mut stream = clients.stream_with(&subscription, short).await;
    assert_eq!(stream.failure().await.code(), Code::InvalidArgument);

    let mut stream = clients.stream(&subscription).await;
    stream.acknowledge(vec!["no ack id".to_owned()]).await;
    assert_eq!(stream.failure().await.code(), Code::InvalidArgument);

    let mut stream = clients.stream(&subscription).await;
    let late = proto::StreamingPullRequest {
        max_outstanding_messages: 1,
        ..Default::default()
    };
    stream.requests.send(late).await.expect("open");
    assert_eq!(stream.failure().await.code(), Code::InvalidArgument);
}

#[tokio::test]
async fn a_detached_subscription_says_so() {
    let (_emulator, mut clients) = start().await;
    let (topic, subscription) = clients.create_ordered("orders").await;
    clients
        .publish(&topic, vec![message("k", "1")])
        .await
        .expect("published");
    let detach = proto::DetachSubscriptionRequest {
        subscription: subscription.clone(),
    };
    clients
        .publisher
        .detach_subscription(detach)
        .await
        .expect("detached");
    let status = refused(
        clients.pull(&subscription, 1).await,
        Code::FailedPrecondition,
    );
    assert!(status.message().contains("detached"), "{status:?}");
    let get = proto::GetSubscriptionRequest { subscription };
    let left = clients
        .subscriber
        .get_subscription(get)
        .await
        .expect("still there")
        .into_inner();
    assert!(left.detached);
}

#[tokio::test]
async fn updates_change_the_named_fields_and_refuse_immutable_ones() {
    let (_emulator, mut clients) = start().await;
    let (topic, subscription) = clients.create_ordered("orders").await;
    let mask = |path: &str| {
        Some(prost_types::FieldMask {
            paths: vec![path.to_owned()],
        })
    };
    let labels = [("team".to_owned(), "shop".to_owned())];
    let request = proto::UpdateTopicRequest {
        topic: Some(proto::Topic {
            name: topic.clone(),
            labels: labels.clone().into(),
            ..Default::default()
        }),
        update_mask: mask("labels"),
    };
    let updated = clients
        .publisher
        .update_topic(request)
        .await
        .expect("updated")
        .into_inner();
    assert_eq!(updated.labels, labels.into());

    let wanted = proto::Subscription {
        name: subscription.clone(),
        ack_deadline_seconds: 30,
        filter: "attributes:x".to_owned(),
        ..Default::default()
    };
    let update = |path| proto::UpdateSubscriptionRequest {
        subscription: Some(wanted.clone()),
        update_mask: mask(path),
    };
    let deadline = clients
        .subscriber
        .update_subscription(update("ack_deadline_seconds"))
        .await;
    let updated = deadline.expect("updated").into_inner();
    assert_eq!(
        (updated.ack_deadline_seconds, updated.filter.as_str()),
        (30, "")
    );
    refused(
        clients
            .subscriber
            .update_subscription(update("filter"))
            .await,
        Code::InvalidArgument,
    );
}

#[tokio::test]
async fn acknowledge_requests_that_are_empty_or_too_large_are_refused() {
    let (_emulator, mut clients) = start().await;
    let (_topic, subscription) = clients.create_ordered("orders").await;
    refused(
        clients.acknowledge(&subscription, Vec::new()).await,
        Code::InvalidArgument,
    );
    let ack_ids = |count| {
        (0..count)
            .map(|n| format!("1-{n:012x}"))
            .collect::<Vec<_>>()
    };
    clients
        .acknowledge(&subscription, ack_ids(30_000))
        .await
        .expect("fits");
    let status = refused(
        clients.acknowledge(&subscription, ack_ids(40_000)).await,
        Code::InvalidArgument,
    );
    assert!(status.message().contains("524288"), "{status:?}");
}
