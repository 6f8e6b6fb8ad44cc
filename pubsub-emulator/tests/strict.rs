//! Where this emulator is as strict as the service and Google's own emulator is not.

mod raw;

use std::time::{Duration, Instant, SystemTime};

use googleapis_tonic_google_pubsub_v1::google::pubsub::v1 as proto;
use proto::seek_request::Target;
use pubsub_emulator::{Answer, Emulator, RunningEmulator};
use raw::{Clients, ack_ids, data, event, message, refused};
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
    let too_long = message(&"k".repeat(1_025), "x");
    let good = message(&"k".repeat(1_025), "x");
    refused(
        clients.publish(&topic, vec![good, too_long]).await,
        Code::InvalidArgument,
    );
    let mut many = event("", "1");
    many.attributes
        .extend((0..100).map(|n| (n.to_string(), String::new())));
    let status = refused(
        clients.publish(&topic, vec![event("", "0"), many]).await,
        Code::InvalidArgument,
    );
    assert!(status.message().contains("101"), "{status:?}");
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
async fn malformed_names_are_refused_before_anything_is_looked_up() {
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
async fn a_nack_brings_the_rest_of_its_key_again_and_leaves_other_keys_alone() {
    let (_emulator, mut clients) = start().await;
    let (topic, subscription) = clients.create_ordered("orders").await;
    let messages = ["1", "2", "3"].map(|data| message("a", data));
    clients
        .publish(&topic, messages.into())
        .await
        .expect("published");
    clients
        .publish(&topic, vec![message("b", "other")])
        .await
        .expect("published");
    let mut stream = clients.stream(&subscription).await;
    let received = stream.messages(4).await;
    assert_eq!(
        received.iter().map(data).collect::<Vec<_>>(),
        ["1", "2", "3", "other"]
    );
    stream.acknowledge(vec![received[2].ack_id.clone()]).await;
    stream.nack(vec![received[1].ack_id.clone()]).await;
    let again = stream.messages(2).await;
    assert_eq!(again.iter().map(data).collect::<Vec<_>>(), ["2", "3"]);
}

#[tokio::test]
async fn an_expired_deadline_brings_the_rest_of_its_key_again() {
    let (_emulator, mut clients) = start().await;
    let (topic, subscription) = clients.create_ordered("orders").await;
    let messages = ["1", "2"].map(|data| message("a", data));
    clients
        .publish(&topic, messages.into())
        .await
        .expect("published");
    let mut stream = clients.stream(&subscription).await;
    let received = stream.messages(2).await;
    let shortened = Instant::now();
    let first = vec![received[0].ack_id.clone()];
    clients
        .modify_ack_deadline(&subscription, first, 1)
        .await
        .expect("shortened");
    let again = stream.messages(2).await;
    assert!(
        shortened.elapsed() >= Duration::from_millis(990),
        "{:?}",
        shortened.elapsed()
    );
    assert_eq!(again.iter().map(data).collect::<Vec<_>>(), ["1", "2"]);
}

#[tokio::test]
async fn a_closed_stream_keeps_its_messages_until_the_deadline_and_then_gives_them_back() {
    let (_emulator, mut clients) = start().await;
    let (topic, subscription) = clients.create_ordered("orders").await;
    let messages = ["1", "2"].map(|data| message("a", data));
    clients
        .publish(&topic, messages.into())
        .await
        .expect("published");
    let mut closed = clients.stream(&subscription).await;
    let received = closed.messages(2).await;
    drop(closed);
    let mut other = clients.stream(&subscription).await;
    clients
        .publish(&topic, vec![message("b", "3")])
        .await
        .expect("published");
    assert_eq!(
        other.messages(1).await.iter().map(data).collect::<Vec<_>>(),
        ["3"]
    );
    // A client that closes its stream may still acknowledge what it has finished.
    let (finished, left) = (ack_ids(&received[..1]), ack_ids(&received[1..]));
    clients
        .acknowledge(&subscription, finished)
        .await
        .expect("acknowledged");
    clients
        .modify_ack_deadline(&subscription, left, 1)
        .await
        .expect("shortened");
    assert_eq!(
        other.messages(1).await.iter().map(data).collect::<Vec<_>>(),
        ["2"]
    );
}

#[tokio::test]
async fn a_client_that_reconnects_under_its_id_gets_the_rest_of_its_key() {
    let (_emulator, mut clients) = start().await;
    let (topic, subscription) = clients.create_ordered("orders").await;
    let first = || proto::StreamingPullRequest {
        client_id: "instance-1".to_owned(),
        ..Default::default()
    };
    clients
        .publish(&topic, vec![message("a", "1")])
        .await
        .expect("published");
    let mut stream = clients.stream_with(&subscription, first()).await;
    stream.messages(1).await;
    drop(stream);
    clients
        .publish(&topic, vec![message("a", "2")])
        .await
        .expect("published");
    // The server notices the end of a stream a moment later; until then the key stays with it.
    let give_up = Instant::now() + raw::PATIENCE;
    loop {
        let mut again = clients.stream_with(&subscription, first()).await;
        let messages = again.messages(1);
        if let Ok(received) = tokio::time::timeout(Duration::from_millis(500), messages).await {
            assert_eq!(received.iter().map(data).collect::<Vec<_>>(), ["2"]);
            return;
        }
        assert!(
            Instant::now() < give_up,
            "the client never got its key back"
        );
    }
}

#[tokio::test]
async fn filters_decide_at_publication_and_per_subscription() {
    let (_emulator, mut clients) = start().await;
    let topic = clients.create_topic("orders").await;
    let filter = "hasPrefix(attributes.event_id, \"a\") AND NOT attributes:skip".to_owned();
    let settings = proto::Subscription {
        filter,
        ..Default::default()
    };
    let filtered = clients
        .subscribe("filtered", &topic, settings)
        .await
        .expect("created");
    let mut skipped = event("", "a2");
    skipped.attributes.insert("skip".to_owned(), String::new());
    let messages = vec![event("", "a1"), skipped, event("", "b1"), event("", "a3")];
    clients.publish(&topic, messages).await.expect("published");
    let received = clients.pull_all(&filtered, 2).await;
    assert_eq!(received.iter().map(data).collect::<Vec<_>>(), ["a1", "a3"]);

    let bad = proto::Subscription {
        filter: "attributes = 1".to_owned(),
        ..Default::default()
    };
    let status = refused(
        clients.subscribe("bad", &topic, bad).await,
        Code::InvalidArgument,
    );
    assert!(
        status
            .message()
            .contains("expected : or . after attributes"),
        "{status:?}"
    );
}

#[tokio::test]
async fn a_stream_opens_at_once_and_shows_that_it_lives() {
    let (_emulator, mut clients) = start().await;
    let (_topic, subscription) = clients.create_ordered("orders").await;
    let asked = Instant::now();
    let mut stream = clients.stream(&subscription).await;
    stream.opened().await.expect("headers");
    assert!(
        asked.elapsed() < Duration::from_secs(4),
        "headers come before any heartbeat"
    );
    let heartbeat = stream.response().await.expect("a heartbeat");
    assert_eq!(heartbeat.received_messages, []);
    let properties = heartbeat.subscription_properties.expect("properties");
    assert!(properties.message_ordering_enabled && !properties.exactly_once_delivery_enabled);
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
async fn a_stream_never_holds_more_messages_than_its_flow_control_allows() {
    let (_emulator, mut clients) = start().await;
    let (topic, subscription) = clients.create_ordered("orders").await;
    let limited = proto::StreamingPullRequest {
        max_outstanding_messages: 3,
        ..Default::default()
    };
    let mut stream = clients.stream_with(&subscription, limited).await;
    let messages = (0..20).map(|n| message("k", &n.to_string())).collect();
    clients.publish(&topic, messages).await.expect("published");
    let mut seen: Vec<String> = Vec::new();
    while seen.len() < 20 {
        let received = stream.messages(1).await;
        assert!(received.len() <= 3, "{}", received.len());
        seen.extend(received.iter().map(data));
        // By turns on the stream and beside it.
        if seen.len() % 2 == 0 {
            stream.acknowledge(ack_ids(&received)).await;
        } else {
            clients
                .acknowledge(&subscription, ack_ids(&received))
                .await
                .expect("acknowledged");
        }
    }
    let expected: Vec<String> = (0..20).map(|n| n.to_string()).collect();
    assert_eq!(seen, expected);
}

#[tokio::test]
async fn flow_control_by_bytes_holds_the_next_message_back() {
    let (_emulator, mut clients) = start().await;
    let (topic, subscription) = clients.create_ordered("orders").await;
    let limited = proto::StreamingPullRequest {
        max_outstanding_bytes: 1_000,
        ..Default::default()
    };
    let mut stream = clients.stream_with(&subscription, limited).await;
    let messages = vec![message("k", &"x".repeat(600)); 5];
    clients.publish(&topic, messages).await.expect("published");
    let mut count = 0;
    while count < 5 {
        let received = stream.messages(1).await;
        assert!(received.len() <= 2, "{}", received.len());
        count += received.len();
        stream.acknowledge(ack_ids(&received)).await;
    }
}

#[tokio::test]
async fn a_pull_waits_for_a_first_message() {
    let (_emulator, mut clients) = start().await;
    let (topic, subscription) = clients.create_ordered("orders").await;
    let mut waiting = clients.clone();
    let request = proto::PullRequest {
        subscription,
        max_messages: 10,
        ..Default::default()
    };
    let pulled = tokio::spawn(async move { waiting.subscriber.pull(request).await });
    clients
        .publish(&topic, vec![message("k", "1")])
        .await
        .expect("published");
    let pulled = pulled
        .await
        .expect("no panic")
        .expect("a pull")
        .into_inner();
    assert_eq!(
        pulled
            .received_messages
            .iter()
            .map(data)
            .collect::<Vec<_>>(),
        ["1"]
    );
}

#[tokio::test]
async fn seeking_to_now_drops_the_backlog_and_to_the_past_is_refused() {
    let (_emulator, mut clients) = start().await;
    let (topic, subscription) = clients.create_ordered("orders").await;
    clients
        .publish(&topic, vec![message("k", "1")])
        .await
        .expect("published");
    let seek = |time: SystemTime| proto::SeekRequest {
        subscription: subscription.clone(),
        target: Some(Target::Time(time.into())),
    };
    let past = SystemTime::now() - Duration::from_secs(3_600);
    let status = refused(
        clients.subscriber.seek(seek(past)).await,
        Code::Unimplemented,
    );
    assert!(
        status.message().contains("Seek to the present"),
        "{status:?}"
    );
    clients
        .subscriber
        .seek(seek(SystemTime::now()))
        .await
        .expect("dropped");
    clients
        .publish(&topic, vec![message("k", "2")])
        .await
        .expect("published");
    let received = clients.pull_all(&subscription, 1).await;
    assert_eq!(received.iter().map(data).collect::<Vec<_>>(), ["2"]);
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
async fn updates_change_what_they_name_and_refuse_what_is_fixed() {
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
async fn acknowledge_requests_end_at_their_limit() {
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
