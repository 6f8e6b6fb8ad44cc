//! Tests scripted faults as a client sees them, and what the journal and its checks report.

mod raw;

use std::time::{Duration, Instant};

use googleapis_tonic_google_pubsub_v1::google::pubsub::v1 as proto;
use pubsub_emulator::checks::{self, Expected, Reason, Stream, Violation};
use pubsub_emulator::{Action, Answer, Emulator, Fault, Recording, RunningEmulator};
use raw::{Clients, PATIENCE, data, event, refused};
use tonic::{Code, Request};

async fn start() -> (RunningEmulator, Clients, String, String) {
    let emulator = Emulator::builder().start().await.expect("a free port");
    let mut clients = Clients::connect(emulator.addr(), "faults").await;
    let (topic, subscription) = clients.create_ordered("orders").await;
    (emulator, clients, topic, subscription)
}

fn expected(topic: &str, key: &str, events: &[&str]) -> Expected {
    let events = events.iter().map(|event| (*event).to_owned()).collect();
    [(Stream::new(topic, key), events)].into()
}

/// Publishes with a client deadline, which tonic sends as a gRPC timeout.
async fn publish_within(
    clients: &mut Clients,
    topic: &str,
    event_id: &str,
    limit: Duration,
) -> Result<Vec<String>, tonic::Status> {
    let messages = vec![event("k", event_id)];
    let mut request = Request::new(proto::PublishRequest {
        topic: topic.to_owned(),
        messages,
    });
    request.set_timeout(limit);
    Ok(clients
        .publisher
        .publish(request)
        .await?
        .into_inner()
        .message_ids)
}

#[tokio::test]
async fn a_failed_publish_is_not_stored() {
    let (emulator, mut clients, topic, subscription) = start().await;
    emulator
        .faults()
        .inject(Fault::new(Action::Fail(Code::Unavailable)).times(2));
    for _ in 0..2 {
        refused(
            clients.publish(&topic, vec![event("k", "1")]).await,
            Code::Unavailable,
        );
    }
    clients
        .publish(&topic, vec![event("k", "2")])
        .await
        .expect("the fault is used up");
    let received = clients.pull_all(&subscription, 1).await;
    assert_eq!(received.iter().map(data).collect::<Vec<_>>(), ["2"]);
    let attempts = emulator.journal().attempts();
    let stored: Vec<bool> = attempts.iter().map(|attempt| attempt.is_stored()).collect();
    assert_eq!(stored, [false, false, true]);
}

#[tokio::test]
async fn a_stored_publish_that_fails_explains_its_duplicate() {
    let (emulator, mut clients, topic, subscription) = start().await;
    emulator
        .faults()
        .inject(Fault::new(Action::StoreThenFail(Code::Internal)).times(1));
    refused(
        clients.publish(&topic, vec![event("k", "1")]).await,
        Code::Internal,
    );
    clients
        .publish(&topic, vec![event("k", "1")])
        .await
        .expect("published");
    let received = clients.pull_all(&subscription, 2).await;
    assert_eq!(received.iter().map(data).collect::<Vec<_>>(), ["1", "1"]);

    let report = checks::check(
        &emulator.journal().attempts(),
        &expected(&topic, "k", &["1"]),
    );
    assert!(report.is_clean(), "{report}");
    assert_eq!(report.duplicates.len(), 1);
    assert_eq!(report.duplicates[0].reason, Reason::NotAnswered);
}

#[tokio::test]
async fn a_delayed_answer_is_late_but_its_message_is_not() {
    let (emulator, mut clients, topic, subscription) = start().await;
    emulator
        .faults()
        .inject(Fault::new(Action::Delay(Duration::from_secs(5))).times(1));
    let mut publisher = clients.clone();
    let asked = Instant::now();
    let publishing = {
        let topic = topic.clone();
        tokio::spawn(async move { publisher.publish(&topic, vec![event("k", "1")]).await })
    };
    let received = clients.pull_all(&subscription, 1).await;
    assert_eq!(data(&received[0]), "1");
    assert_eq!(emulator.journal().attempts()[0].answer, Answer::Pending);
    publishing.await.expect("no panic").expect("published");
    assert!(
        asked.elapsed() >= Duration::from_secs(5),
        "{:?}",
        asked.elapsed()
    );
}

#[tokio::test]
async fn a_withheld_answer_is_noted_when_the_client_gives_up() {
    for (action, stored) in [(Action::NeverAnswer, 0), (Action::StoreThenNeverAnswer, 1)] {
        let (emulator, mut clients, topic, _) = start().await;
        emulator.faults().inject(Fault::new(action).times(1));
        let result = publish_within(&mut clients, &topic, "1", Duration::from_secs(2)).await;
        let code = result.expect_err("nothing is answered").code();
        assert!(
            matches!(code, Code::DeadlineExceeded | Code::Cancelled),
            "{code:?}"
        );
        let journal = emulator.journal();
        let noted = journal
            .wait_until(PATIENCE, |counts| counts.withheld_answers == 1)
            .await;
        assert_eq!(noted.expect("the journal notes it").stored_messages, stored);
        assert_eq!(journal.attempts()[0].answer, Answer::Never);
    }
}

#[tokio::test]
async fn poison_refuses_every_request_with_its_event_and_no_other() {
    let (emulator, mut clients, topic, _) = start().await;
    let poison = Action::Poison {
        event_id: "bad".to_owned(),
    };
    emulator.faults().inject(Fault::new(poison));
    for events in [
        vec![event("k", "bad")],
        vec![event("k", "1"), event("k", "bad")],
    ] {
        refused(clients.publish(&topic, events).await, Code::InvalidArgument);
    }
    clients
        .publish(&topic, vec![event("k", "1")])
        .await
        .expect("published");
}

#[tokio::test]
async fn a_throttle_answers_resource_exhausted_until_it_is_lifted() {
    let (emulator, mut clients, topic, _) = start().await;
    let throttle = Action::Throttle {
        messages_per_second: 1,
    };
    let fault = emulator.faults().inject(Fault::new(throttle));
    // The throttle never splits a request. So all 60 messages of this request pass, and use up the
    // allowance of the next minute.
    clients
        .publish(&topic, vec![event("k", "many"); 60])
        .await
        .expect("published");
    refused(
        clients.publish(&topic, vec![event("k", "1")]).await,
        Code::ResourceExhausted,
    );
    emulator.faults().lift(fault);
    clients
        .publish(&topic, vec![event("k", "1")])
        .await
        .expect("published");
}

#[tokio::test]
async fn a_removed_topic_is_not_found_until_it_is_restored_or_created() {
    let (emulator, mut clients, topic, subscription) = start().await;
    let faults = emulator.faults();
    faults.remove_topic(&topic);
    refused(
        clients.publish(&topic, vec![event("k", "1")]).await,
        Code::NotFound,
    );
    let get = proto::GetTopicRequest {
        topic: topic.clone(),
    };
    refused(clients.publisher.get_topic(get).await, Code::NotFound);
    assert!(faults.restore_topic(&topic));
    clients
        .publish(&topic, vec![event("k", "2")])
        .await
        .expect("published");

    faults.remove_topic(&topic);
    clients.create_topic("orders").await;
    clients
        .publish(&topic, vec![event("k", "3")])
        .await
        .expect("published");
    let received = clients.pull_all(&subscription, 2).await;
    assert_eq!(received.iter().map(data).collect::<Vec<_>>(), ["2", "3"]);
}

#[tokio::test]
async fn a_reset_connection_fails_requests_in_flight_and_clients_reconnect() {
    let (emulator, mut clients, topic, _) = start().await;
    emulator
        .faults()
        .inject(Fault::new(Action::StoreThenNeverAnswer).times(1));
    let mut publisher = clients.clone();
    let under_way = {
        let topic = topic.clone();
        tokio::spawn(async move { publisher.publish(&topic, vec![event("k", "1")]).await })
    };
    let journal = emulator.journal();
    journal
        .wait_until(PATIENCE, |counts| counts.stored_messages == 1)
        .await
        .expect("stored");
    emulator.faults().reset_connections();
    under_way
        .await
        .expect("no panic")
        .expect_err("the connection is gone");
    let noted = journal
        .wait_until(PATIENCE, |counts| counts.withheld_answers == 1)
        .await;
    noted.expect("the journal notes it");
    publish_again(&mut clients, &topic, "1").await;
    let report = checks::check(&journal.attempts(), &expected(&topic, "k", &["1"]));
    assert!(report.is_clean(), "{report}");
    assert_eq!(report.unexplained_duplicates(), 0);
}

#[tokio::test]
async fn refused_connections_are_unavailable_until_accepted_again() {
    let (emulator, mut clients, topic, _) = start().await;
    let faults = emulator.faults();
    faults.refuse_connections(true);
    faults.reset_connections();
    for _ in 0..3 {
        let result = clients.publish(&topic, vec![event("k", "1")]).await;
        let code = result.expect_err("no connection").code();
        assert!(
            matches!(code, Code::Unavailable | Code::Unknown | Code::Cancelled),
            "{code:?}"
        );
    }
    assert_eq!(emulator.journal().counts().attempts, 0);
    faults.refuse_connections(false);
    publish_again(&mut clients, &topic, "1").await;
}

/// Publishes repeatedly until the client has reconnected.
async fn publish_again(clients: &mut Clients, topic: &str, event_id: &str) {
    let publishing = async {
        while clients
            .publish(topic, vec![event("k", event_id)])
            .await
            .is_err()
        {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, publishing)
        .await
        .expect("the client reconnects");
}

#[tokio::test]
async fn the_checks_see_a_client_that_skips_or_overlaps() {
    let (emulator, mut clients, topic, _) = start().await;
    emulator
        .faults()
        .inject(Fault::new(Action::Delay(Duration::from_secs(5))).times(1));
    let mut second = clients.clone();
    let (first, second) = tokio::join!(
        clients.publish(&topic, vec![event("k", "1")]),
        second.publish(&topic, vec![event("k", "3")]),
    );
    first.and(second).expect("published");
    let events = ["1", "2", "3"];
    let report = checks::check(
        &emulator.journal().attempts(),
        &expected(&topic, "k", &events),
    );
    let found = |sought: fn(&Violation) -> bool| report.violations.iter().any(sought);
    assert!(
        found(|violation| matches!(violation, Violation::Missing { .. })),
        "{report}"
    );
    assert!(
        found(|violation| matches!(violation, Violation::Skipped { .. })),
        "{report}"
    );
    assert!(
        found(|violation| matches!(violation, Violation::InFlightTogether { .. })),
        "{report}"
    );
}

#[tokio::test]
async fn an_emulator_that_only_counts_keeps_no_attempts() {
    let builder = Emulator::builder().recording(Recording::Counts);
    let emulator = builder.start().await.expect("a free port");
    let mut clients = Clients::connect(emulator.addr(), "faults").await;
    let topic = clients.create_topic("orders").await;
    clients
        .publish(&topic, vec![event("k", "1"), event("k", "2")])
        .await
        .expect("published");
    assert_eq!(emulator.journal().counts().answered_messages, 2);
    assert_eq!(emulator.journal().attempts(), []);
}

#[tokio::test]
async fn a_publish_answered_with_too_few_ids_is_stored_but_counts_as_unanswered() {
    let (emulator, mut clients, topic, _) = start().await;
    emulator
        .faults()
        .inject(Fault::new(Action::FewerIds).times(1));
    for ids in [1, 2] {
        let messages = vec![event("k", "1"), event("k", "2")];
        let answer = clients.publish(&topic, messages).await.expect("stored");
        assert_eq!(answer.len(), ids);
    }
    let attempts = emulator.journal().attempts();
    assert_eq!(attempts[0].answer, Answer::FewerIds);
    let report = checks::check(&attempts, &expected(&topic, "k", &["1", "2"]));
    assert!(report.is_clean(), "{report}");
    assert_eq!(
        (report.duplicates.len(), report.unexplained_duplicates()),
        (2, 0)
    );
}

#[tokio::test]
async fn a_connection_past_its_maximum_age_is_replaced_and_no_arrived_request_fails() {
    let builder = Emulator::builder().max_connection_age(Duration::from_millis(200));
    let emulator = builder.start().await.expect("a free port");
    let mut clients = Clients::connect(emulator.addr(), "faults").await;
    let (topic, _) = clients.create_ordered("orders").await;
    let peers = || {
        let attempts = emulator.journal().attempts();
        let peers = attempts.iter().filter_map(|attempt| attempt.peer);
        peers.collect::<std::collections::BTreeSet<_>>().len()
    };
    let began = Instant::now();
    for n in 0.. {
        assert!(began.elapsed() < PATIENCE);
        // A request on a connection that the server has already closed never arrives, so send it
        // again.
        loop {
            let messages = vec![event("k", &n.to_string())];
            match clients.publish(&topic, messages).await {
                Ok(_) => break,
                Err(status) => assert_eq!(status.code(), Code::Cancelled, "{status}"),
            }
        }
        if peers() >= 3 {
            let ids: Vec<_> = (0..=n).map(|n| n.to_string()).collect();
            let ids: Vec<_> = ids.iter().map(String::as_str).collect();
            let attempts = emulator.journal().attempts();
            let report = checks::check(&attempts, &expected(&topic, "k", &ids));
            // A duplicate would show that a request arrived but was not answered, because the client
            // then publishes the event again.
            assert!(
                report.is_clean() && report.duplicates.is_empty(),
                "{report}"
            );
            break;
        }
    }
}
