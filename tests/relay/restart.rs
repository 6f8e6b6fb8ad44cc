//! Tests in which the relay or PostgreSQL ends at an inconvenient moment. Recorded events are not sent
//! again, and no event is lost.

use std::time::Duration;

use pubsub_emulator::{Action, Fault};
use scratch_postgres::{ScratchPostgres, StopMode};

use crate::harness::{self, Database, Relay, eventually, insert_orders};

#[tokio::test(flavor = "multi_thread")]
async fn kill_9_while_streaming_loses_nothing_and_resends_only_unrecorded_events() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    emulator
        .faults()
        .inject(Fault::new(Action::Delay(Duration::from_millis(3))));
    insert_orders(&database, 3_000, 40).await;
    for round in 1..=5 {
        let relay = Relay::start(&database, &emulator);
        let target = round * 500;
        eventually("some more events are recorded", || async {
            (database
                .number("SELECT count(*) FROM outbox.dispatch")
                .await
                >= target)
                .then_some(())
        })
        .await;
        relay.kill_9();
    }
    harness::wait_until_killed_relays_are_gone(&database, &emulator).await;
    let recorded_before = database
        .number("SELECT count(*) FROM outbox.dispatch")
        .await;
    let stored_before = emulator.journal().counts().stored_messages;
    let relay = Relay::start(&database, &emulator);
    database.wait_until_recorded().await;
    database.wait_until_confirmed().await;
    let report = harness::check_streamed(&database, &emulator).await;
    assert!(report.is_clean(), "{report}\n{}", relay.log());
    let stored_after = emulator.journal().counts().stored_messages;
    assert_eq!(
        stored_after - stored_before,
        3_000 - recorded_before as u64,
        "the last run sends exactly the unrecorded events"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_clean_stop_repeats_nothing() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    emulator
        .faults()
        .inject(Fault::new(Action::Delay(Duration::from_millis(5))));
    insert_orders(&database, 2_000, 20).await;
    for target in [100, 700, 1_300] {
        let relay = Relay::start(&database, &emulator);
        relay.wait_for_log("streaming").await;
        eventually("some events are recorded", || async {
            (database
                .number("SELECT count(*) FROM outbox.dispatch")
                .await
                >= target)
                .then_some(())
        })
        .await;
        relay.stop().await;
    }
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
async fn restarts_and_crashes_of_postgresql_lose_nothing() {
    let mut database = Database::private().await;
    let emulator = harness::emulator().await;
    let relay = Relay::start(&database, &emulator);
    for mode in [Some(StopMode::Fast), Some(StopMode::Immediate), None] {
        insert_orders(&database, 300, 10).await;
        match mode {
            Some(mode) => database.server().restart(mode).unwrap(),
            None => {
                database.server().kill_9().unwrap();
                database.server().start_again().unwrap();
            }
        }
        database.reconnect().await;
        insert_orders(&database, 300, 10).await;
        database.wait_until_recorded().await;
    }
    database.wait_until_confirmed().await;
    let report = harness::check_streamed(&database, &emulator).await;
    assert!(report.is_clean(), "{report}\n{}", relay.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_terminated_walsender_is_replaced() {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    let relay = Relay::start(&database, &emulator);
    for _ in 0..3 {
        insert_orders(&database, 200, 10).await;
        database
            .execute("SELECT pg_terminate_backend(pid) FROM pg_stat_replication")
            .await;
        insert_orders(&database, 200, 10).await;
        database.wait_until_recorded().await;
    }
    let report = harness::check_streamed(&database, &emulator).await;
    assert!(report.is_clean(), "{report}\n{}", relay.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_standby_takes_over_within_seconds() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let first = Relay::start(&database, &emulator);
    first.wait_for_log("streaming").await;
    let second = Relay::start(&database, &emulator);
    second.wait_for_log("standby").await;
    insert_orders(&database, 300, 10).await;
    database.wait_until_recorded().await;
    first.kill_9();
    let began = std::time::Instant::now();
    second.wait_for_log("streaming").await;
    assert!(
        began.elapsed() < Duration::from_secs(10),
        "took {:?}",
        began.elapsed()
    );
    insert_orders(&database, 300, 10).await;
    database.wait_until_recorded().await;
    let report = harness::check_streamed(&database, &emulator).await;
    assert!(
        report.is_clean() && report.unexplained_duplicates() == 0,
        "{report}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fast_shutdown_during_writes_does_not_wait_for_the_relay_and_loses_nothing() {
    let mut database = Database::private().await;
    let emulator = harness::emulator().await;
    let relay = Relay::start(&database, &emulator);
    relay.wait_for_log("streaming").await;
    for _ in 0..3 {
        let (writer, connection) = tokio_postgres::connect(&database.url, tokio_postgres::NoTls)
            .await
            .unwrap();
        tokio::spawn(connection);
        let insert = harness::insert_orders_sql(2_000_000, 50);
        // Insert so many rows that the shutdown interrupts the inserts. Rows that were committed before the
        // shutdown must be delivered.
        let writing = tokio::spawn(async move { writer.batch_execute(&insert).await });
        let before = database
            .number("SELECT count(*) FROM outbox.dispatch")
            .await;
        eventually("events flow", || async {
            let now = database
                .number("SELECT count(*) FROM outbox.dispatch")
                .await;
            (now > before + 100).then_some(())
        })
        .await;
        let began = std::time::Instant::now();
        database
            .server()
            .stop(StopMode::Fast, harness::PATIENCE)
            .unwrap();
        assert!(
            began.elapsed() < Duration::from_secs(20),
            "took {:?}",
            began.elapsed()
        );
        assert!(writing.await.unwrap().is_err());
        database.server().start_again().unwrap();
        database.reconnect().await;
        database.wait_until_recorded().await;
    }
    database.wait_until_confirmed().await;
    let report = harness::check_streamed(&database, &emulator).await;
    assert!(report.is_clean(), "{report}\n{}", relay.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_standby_survives_a_restart_of_postgresql() {
    let mut database = Database::private().await;
    let emulator = harness::emulator().await;
    let host = emulator.addr().to_string();
    let first = Relay::start(&database, &emulator);
    first.wait_for_log("streaming").await;
    let more = [("POSTRIDER_START_TIMEOUT_S", "1")];
    let second = Relay::start_with(&database, &host, &more);
    second.wait_for_log("standby").await;
    database
        .server()
        .stop(StopMode::Fast, harness::PATIENCE)
        .unwrap();
    second.wait_for_log("postgres-unreachable").await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    database.server().start_again().unwrap();
    database.reconnect().await;
    first.kill_9();
    insert_orders(&database, 50, 5).await;
    database.wait_until_recorded().await;
    let report = harness::check_streamed(&database, &emulator).await;
    assert!(report.is_clean(), "{report}\n{}", second.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_connected_to_a_standby_server_waits_for_the_primary() {
    let mut database = Database::private().await;
    let emulator = harness::emulator().await;
    database
        .server()
        .stop(StopMode::Fast, harness::PATIENCE)
        .unwrap();
    let standby = ScratchPostgres::builder()
        .standby_of(database.server())
        .start()
        .unwrap();
    database.server().start_again().unwrap();
    database.reconnect().await;
    let url = standby.url("postgres");
    let host = emulator.addr().to_string();
    let relay = Relay::start_with(&database, &host, &[("DATABASE_URL", &url)]);
    relay.wait_for_log("postgres-standby").await;
    insert_orders(&database, 10, 2).await;
    relay.stop().await;
    assert_eq!(emulator.journal().counts().attempts, 0);
    let _relay = Relay::start(&database, &emulator);
    database.wait_until_recorded().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_begun_before_others_were_confirmed_is_delivered_after_a_restart() {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    let (early, connection) = tokio_postgres::connect(&database.url, tokio_postgres::NoTls)
        .await
        .unwrap();
    tokio::spawn(connection);
    // This transaction's row is in the WAL before the rows of transactions that commit earlier, so the
    // order of rows and the order of commits differ.
    early
        .batch_execute(
            "BEGIN; INSERT INTO outbox.events \
                 (aggregatetype, aggregateid, event_type, version, payload, occurred_at) \
             VALUES ('order', 'early', 'OrderPlaced', 1, '{}', clock_timestamp())",
        )
        .await
        .unwrap();
    let relay = Relay::start(&database, &emulator);
    insert_orders(&database, 200, 5).await;
    database.wait_until_recorded().await;
    database.wait_until_confirmed().await;
    relay.kill_9();
    early.batch_execute("COMMIT").await.unwrap();
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
async fn kill_9_within_one_transaction_resends_only_its_unrecorded_events() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    emulator
        .faults()
        .inject(Fault::new(Action::Delay(Duration::from_millis(200))));
    database
        .execute(
            "INSERT INTO outbox.events \
                 (aggregatetype, aggregateid, event_type, version, payload, occurred_at) \
             SELECT 'order', 'o-' || i % 200, 'OrderPlaced', i, '{}', now() \
             FROM generate_series(1, 10000) i",
        )
        .await;
    let recorded = "SELECT count(*) FROM outbox.dispatch";
    let host = emulator.addr().to_string();
    // Allow few requests at a time, so that the kill hits the middle of the transaction.
    let slow = [("POSTRIDER_IN_FLIGHT_REQUESTS", "10")];
    let relay = Relay::start_with(&database, &host, &slow);
    eventually("some events are recorded", || async {
        (database.number(recorded).await >= 500).then_some(())
    })
    .await;
    relay.kill_9();
    harness::wait_until_killed_relays_are_gone(&database, &emulator).await;
    let recorded_before = database.number(recorded).await;
    assert!(recorded_before < 10_000, "everything was already recorded");
    let stored_before = emulator.journal().counts().stored_messages;
    let relay = Relay::start(&database, &emulator);
    database.wait_until_recorded().await;
    database.wait_until_confirmed().await;
    let report = harness::check_streamed(&database, &emulator).await;
    assert!(report.is_clean(), "{report}\n{}", relay.log());
    let stored = emulator.journal().counts().stored_messages - stored_before;
    assert_eq!(stored, 10_000 - recorded_before as u64);
}
