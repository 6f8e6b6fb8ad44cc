//! Pub/Sub fails in every way that is retried: nothing is lost, swapped, or confirmed too early.

use std::time::Duration;

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
    let report = harness::check(&database, &emulator).await;
    assert!(report.is_clean(), "{report}\n{}", relay.log());
    assert!(
        !report.duplicates.is_empty(),
        "what was stored and answered with an error comes twice"
    );
    assert_eq!(report.unexplained_duplicates(), 0, "{report}");
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_confirmed_past_an_event_without_answer_and_other_keys_go_on() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let stuck = emulator
        .faults()
        .inject(Fault::new(Action::Fail(Code::Unavailable)).on_ordering_key("o-0"));
    let before = database.confirmed().await;
    let relay = Relay::start(&database, &emulator);
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
    let first = database
        .number("SELECT min((commit_lsn - '0/0')::bigint) FROM outbox.dispatch")
        .await;
    let confirmed = database.confirmed().await;
    assert!(
        confirmed >= before && confirmed < first + 100_000,
        "the stuck key holds the slot"
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
    let report = harness::check(&database, &emulator).await;
    assert!(
        report.is_clean() && report.duplicates.is_empty(),
        "{report}\n{}",
        relay.log()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn an_outage_of_pubsub_costs_lag_alone() {
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
    let report = harness::check(&database, &emulator).await;
    assert!(report.is_clean(), "{report}\n{}", relay.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_never_comes_is_given_up_after_the_publish_timeout() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    emulator
        .faults()
        .inject(Fault::new(Action::StoreThenNeverAnswer).times(2));
    let addr = emulator.addr().to_string();
    let relay = Relay::start_with(&database, &addr, &[("POSTRIDER_PUBLISH_TIMEOUT_S", "1")]);
    insert_orders(&database, 50, 5).await;
    database.wait_until_recorded().await;
    let report = harness::check(&database, &emulator).await;
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
    relay.wait_for_log("error[event-refused]").await;
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
    let report = harness::check(&database, &emulator).await;
    assert!(
        report.is_clean() && report.duplicates.is_empty(),
        "{report}\n{}",
        relay.log()
    );
}
