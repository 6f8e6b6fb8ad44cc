//! Tests which messages subscribers get, and when: order, redelivery, flow control, filters.
//!
//! Google's own emulator differs from the service in these points, so `conformance.rs`, which runs
//! on both emulators, cannot test them.

mod raw;

use std::time::{Duration, Instant, SystemTime};

use googleapis_tonic_google_pubsub_v1::google::pubsub::v1 as proto;
use proto::seek_request::Target;
use pubsub_emulator::{Emulator, RunningEmulator};
use raw::{Clients, ack_ids, data, event, message, refused};
use tonic::Code;

async fn start() -> (RunningEmulator, Clients) {
    let emulator = Emulator::builder().start().await.expect("a free port");
    let clients = Clients::connect(emulator.addr(), "strict").await;
    (emulator, clients)
}

#[tokio::test]
async fn a_nack_redelivers_the_rest_of_its_key_and_leaves_other_keys_alone() {
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
async fn an_expired_deadline_redelivers_the_rest_of_its_key() {
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
    // A client that closes its stream may still acknowledge the messages it has processed.
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
    // The server may notice the end of the first stream only a moment later. Until then, a new stream
    // gets no messages of the key. So open new streams until one gets the message.
    let give_up = Instant::now() + raw::PATIENCE;
    loop {
        let mut again = clients.stream_with(&subscription, first()).await;
        let messages = again.messages(1);
        if let Ok(received) = tokio::time::timeout(Duration::from_secs(3), messages).await {
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
async fn a_subscription_gets_only_matching_messages_and_a_bad_filter_is_refused() {
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
async fn a_stream_opens_at_once_and_sends_heartbeats() {
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
        // Acknowledge some messages over the stream, and others with a unary call.
        if seen.len().is_multiple_of(2) {
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
