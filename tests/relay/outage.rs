//! Pub/Sub fails in every retryable way, or refuses an event. No event is lost, reordered, or
//! confirmed too early.

use std::time::Duration;

use fault_proxy::{FaultProxy, Flow};
use pubsub_emulator::{Action, Fault};
use tonic::Code;

use crate::harness::{self, Database, Relay, eventually, insert_orders};

#[tokio::test(flavor = "multi_thread")]
async fn every_retryable_code_is_retried_until_it_succeeds_and_order_holds() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let relay = Relay::start(&database, &emulator);
    for code in [
        Code::Unavailable,
        Code::Internal,
        Code::Unknown,
        Code::Aborted,
        Code::Cancelled,
        Code::DeadlineExceeded,
        Code::ResourceExhausted,
    ] {
        emulator
            .faults()
            .inject(Fault::new(Action::Fail(code)).times(3));
        emulator
            .faults()
            .inject(Fault::new(Action::StoreThenFail(code)).times(2));
        insert_orders(&database, 40, 4).await;
    }
    database.wait_until_recorded().await;
    database.wait_until_confirmed().await;
    let report = harness::check_streamed(&database, &emulator).await;
    assert!(report.is_clean(), "{report}\n{}", relay.log());
    assert!(
        !report.duplicates.is_empty(),
        "messages that were stored but answered with an error are repeated"
    );
    assert_eq!(report.unexplained_duplicates(), 0, "{report}");
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_confirmed_past_an_unanswered_event_and_other_keys_continue() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let stuck = emulator
        .faults()
        .inject(Fault::new(Action::Fail(Code::Unavailable)).on_ordering_key("o-0"));
    let before = database.confirmed().await;
    let relay = Relay::start(&database, &emulator);
    // Insert one row of the stuck key. All other rows are committed after it.
    insert_orders(&database, 1, 1).await;
    let bound = database.current_wal().await;
    insert_orders(&database, 300, 3).await;
    eventually("the other keys are recorded", || async {
        (database
            .number("SELECT count(*) FROM outbox.dispatch")
            .await
            == 200)
            .then_some(())
    })
    .await;
    tokio::time::sleep(Duration::from_millis(600)).await;
    let confirmed = database.confirmed().await;
    assert!(
        confirmed >= before && confirmed < bound,
        "the stuck key holds the slot: {before} <= {confirmed} < {bound}"
    );
    assert_eq!(
        database
            .number("SELECT count(*) FROM outbox.dispatch WHERE ordering_key = 'o-0'")
            .await,
        0
    );
    emulator.faults().lift(stuck);
    database.wait_until_recorded().await;
    database.wait_until_confirmed().await;
    let report = harness::check_streamed(&database, &emulator).await;
    assert!(
        report.is_clean() && report.duplicates.is_empty(),
        "{report}\n{}",
        relay.log()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pubsub_outage_only_adds_lag() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let relay = Relay::start(&database, &emulator);
    insert_orders(&database, 100, 5).await;
    database.wait_until_recorded().await;
    emulator.faults().refuse_connections(true);
    emulator.faults().reset_connections();
    insert_orders(&database, 2_000, 100).await;
    relay.wait_for_log("pubsub-unreachable").await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    emulator.faults().refuse_connections(false);
    database.wait_until_recorded().await;
    database.wait_until_confirmed().await;
    let report = harness::check_streamed(&database, &emulator).await;
    assert!(report.is_clean(), "{report}\n{}", relay.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unanswered_request_is_given_up_after_the_publish_timeout() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    emulator
        .faults()
        .inject(Fault::new(Action::StoreThenNeverAnswer).times(2));
    let addr = emulator.addr().to_string();
    let relay = Relay::start_with(&database, &addr, &[("POSTRIDER_PUBLISH_TIMEOUT_S", "3")]);
    insert_orders(&database, 50, 5).await;
    database.wait_until_recorded().await;
    let report = harness::check_streamed(&database, &emulator).await;
    assert!(
        report.is_clean() && report.unexplained_duplicates() == 0,
        "{report}\n{}",
        relay.log()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn under_halt_a_refused_event_stops_the_relay_and_nothing_past_it_is_confirmed() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    insert_orders(&database, 50, 1).await;
    let row = database
        .client
        .query_one("SELECT id::text FROM outbox.events WHERE version = 30", &[])
        .await
        .unwrap();
    let event_id: String = row.get(0);
    let poison = emulator.faults().inject(Fault::new(Action::Poison {
        event_id: event_id.clone(),
    }));
    let addr = emulator.addr().to_string();
    let policy = [("POSTRIDER_ON_BAD_EVENT", "halt")];
    let relay = Relay::start_with(&database, &addr, &policy);
    relay.wait_for_error("event-refused").await;
    let log = relay.log();
    let status = relay.wait().await;
    assert_eq!(status.code(), Some(5), "{log}");
    assert!(log.contains("hint:") && !log.contains("panicked"), "{log}");
    let published = database
        .number("SELECT count(*) FROM outbox.dispatch")
        .await;
    assert!(published < 30);
    emulator.faults().lift(poison);
    let relay = Relay::start(&database, &emulator);
    database.wait_until_recorded().await;
    let report = harness::check_streamed(&database, &emulator).await;
    assert!(
        report.is_clean() && report.duplicates.is_empty(),
        "{report}\n{}",
        relay.log()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_topic_over_its_quota_slows_down_alone_and_is_delivered_in_order() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let slow = "projects/demo/topics/slow.events";
    emulator.create_topic(slow).await.unwrap();
    let quota = Action::Throttle {
        messages_per_second: 5,
    };
    let quota = Fault::new(quota).on_topic("slow.events");
    let quota = emulator.faults().inject(quota);
    database
        .execute(
            "INSERT INTO outbox.events \
                 (aggregatetype, aggregateid, event_type, version, occurred_at) \
             SELECT 'slow', 's-' || (i % 400), 'Happened', i, clock_timestamp() \
             FROM generate_series(1, 800) i",
        )
        .await;
    insert_orders(&database, 3_000, 300).await;
    // Make the round trip as long as to the real Pub/Sub, so that the number of concurrent requests
    // limits the rate.
    let way = FaultProxy::start(emulator.addr()).await.unwrap();
    way.set_flow(Flow::Delayed(Duration::from_millis(50)));
    let relay = Relay::start_with(&database, &way.addr().to_string(), &[]);
    eventually("the other topic is delivered", || async {
        let sql = "SELECT count(*) FROM outbox.dispatch WHERE topic LIKE '%order.events'";
        (database.number(sql).await == 3_000).then_some(())
    })
    .await;
    let sql = "SELECT count(*) FROM outbox.dispatch WHERE topic LIKE '%slow.events'";
    let through = database.number(sql).await;
    assert!(through < 700, "{through} of 800 at 5 a second");
    assert!(relay.log().contains("pubsub-throttled"), "{}", relay.log());
    let asked = || {
        let attempts = emulator.journal().attempts();
        attempts.iter().filter(|a| a.topic.contains("slow")).count()
    };
    let before = asked();
    tokio::time::sleep(Duration::from_secs(3)).await;
    let more = asked() - before;
    println!("asked {more} times");
    assert!(more < 200, "asked {more} times in 3 s");
    way.heal();
    emulator.faults().lift(quota);
    database.wait_until_recorded().await;
    let report = harness::check_streamed(&database, &emulator).await;
    assert!(
        report.is_clean() && report.duplicates.is_empty(),
        "{report}\n{}",
        relay.log()
    );
}
