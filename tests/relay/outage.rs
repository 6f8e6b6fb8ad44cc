//! Tests in which Pub/Sub fails in every retryable way, or refuses an event. No event is lost, reordered,
//! or confirmed too early.

use std::time::{Duration, Instant};

use fault_proxy::{FaultProxy, Flow};
use pubsub_emulator::{Action, Emulator, Fault};
use tonic::Code;

use crate::harness::{self, Database, Relay, eventually, insert_orders};
use crate::http::{self, free_addr};

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
    // Insert one row of the stuck key first. The confirmed position must stay below the commit of this row,
    // although rows of other keys are committed later.
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
async fn while_pubsub_refuses_connections_attempts_are_rare_and_all_keys_continue_together() {
    let database = Database::start().await;
    let (pubsub, port) = (free_addr(), free_addr());
    let environment = [("POSTRIDER_HTTP_ADDR", port.as_str())];
    let relay = Relay::start_with(&database, &pubsub, &environment);
    database
        .execute(
            "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, payload) \
             SELECT 'order', 'o-' || i, 'OrderPlaced', '{}' FROM generate_series(1, 5000) i",
        )
        .await;
    eventually("every key waits in its lane", || async {
        let lanes = http::metric(&port, "postrider_lanes").await?;
        (lanes >= 5_000.0).then_some(())
    })
    .await;
    relay.wait_for_log("pubsub-unreachable").await;
    let failures = || async {
        let name = "postrider_publish_failures_total kind=\"pubsub-unreachable\"";
        http::metric(&port, name).await.unwrap_or_default()
    };
    let (before, began) = (failures().await, Instant::now());
    eventually("some more attempts fail", || async {
        (failures().await >= before + 5.0).then_some(())
    })
    .await;
    let rate = (failures().await - before) / began.elapsed().as_secs_f64();
    assert!(rate <= 12.0, "{rate} failures per second, after {before}");

    let emulator = Emulator::builder()
        .listen(pubsub.parse().unwrap())
        .start()
        .await
        .unwrap();
    emulator
        .create_topic("projects/demo/topics/order.events")
        .await
        .unwrap();
    let published = || async {
        let name = "postrider_events_published_total";
        http::metric(&port, name).await.unwrap_or_default()
    };
    eventually("the first event is published", || async {
        (published().await > 0.0).then_some(())
    })
    .await;
    let began = Instant::now();
    eventually("all events are published", || async {
        (published().await >= 5_000.0).then_some(())
    })
    .await;
    let took = began.elapsed();
    // A lane sends again as soon as another lane succeeds. If each lane waited until its own pause ends, the
    // delivery of all events would take up to ten seconds.
    assert!(
        took < Duration::from_secs(5),
        "{took:?} after the first success"
    );
    println!("{rate:.1} failures per second after {before}; all published after {took:?}");
    database.wait_until_recorded().await;
    let twice = "SELECT count(*) FROM outbox.dispatch WHERE attempts <> 1";
    assert_eq!(database.number(twice).await, 0, "nothing was sent before");
    let report = harness::check_streamed(&database, &emulator).await;
    assert!(
        report.is_clean() && report.duplicates.is_empty(),
        "{report}"
    );
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
    let twice = report.duplicates.len() as u64;
    assert!(twice > 0);
    assert_eq!(harness::sent_again(&database), twice);
}

#[tokio::test(flavor = "multi_thread")]
async fn events_that_pubsub_refused_for_a_while_do_not_count_as_sent_again() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let topic = "projects/demo/topics/order.events";
    let relay = Relay::start(&database, &emulator);
    insert_orders(&database, 10, 5).await;
    database.wait_until_recorded().await;
    for code in [
        Code::ResourceExhausted,
        Code::PermissionDenied,
        Code::FailedPrecondition,
    ] {
        let fault = Fault::new(Action::Fail(code)).on_topic(topic).times(8);
        let fault = emulator.faults().inject(fault);
        insert_orders(&database, 10, 5).await;
        eventually("some requests are refused", || async {
            (emulator.faults().uses_left(fault) == Some(0)).then_some(())
        })
        .await;
        emulator.faults().lift(fault);
    }
    emulator.faults().remove_topic(topic);
    insert_orders(&database, 10, 5).await;
    relay.wait_for_log("topic-missing").await;
    emulator.faults().restore_topic(topic);
    database.wait_until_recorded().await;
    assert_eq!(harness::sent_again(&database), 0, "{}", relay.log());
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
