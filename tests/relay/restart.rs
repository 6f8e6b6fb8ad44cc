//! The relay or PostgreSQL ends at a bad moment: what has an outcome is not sent again, and
//! nothing is missing.

use std::time::Duration;

use pubsub_emulator::{Action, Fault};
use scratch_postgres::StopMode;

use crate::harness::{self, Database, Relay, eventually, insert_orders};

#[tokio::test(flavor = "multi_thread")]
async fn kill_9_in_mid_stream_loses_nothing_and_repeats_only_what_had_no_record() {
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
    let recorded_before = database
        .number("SELECT count(*) FROM outbox.dispatch")
        .await;
    let stored_before = emulator.journal().counts().stored_messages;
    let relay = Relay::start(&database, &emulator);
    database.wait_until_recorded().await;
    database.wait_until_confirmed().await;
    let report = harness::check(&database, &emulator).await;
    assert!(report.is_clean(), "{report}\n{}", relay.log());
    let stored_after = emulator.journal().counts().stored_messages;
    assert_eq!(
        stored_after - stored_before,
        3_000 - recorded_before as u64,
        "the last run sends exactly what had no record"
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
    let report = harness::check(&database, &emulator).await;
    assert!(
        report.is_clean() && report.duplicates.is_empty(),
        "{report}\n{}",
        relay.log()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn restarts_and_crashes_of_postgresql_are_survived() {
    let mut database = Database::start().await;
    let emulator = harness::emulator().await;
    let relay = Relay::start(&database, &emulator);
    for mode in [Some(StopMode::Fast), Some(StopMode::Immediate), None] {
        insert_orders(&database, 300, 10).await;
        match mode {
            Some(mode) => database.server.restart(mode).unwrap(),
            None => {
                database.server.kill_9().unwrap();
                database.server.start_again().unwrap();
            }
        }
        database.reconnect().await;
        insert_orders(&database, 300, 10).await;
        database.wait_until_recorded().await;
    }
    database.wait_until_confirmed().await;
    let report = harness::check(&database, &emulator).await;
    assert!(report.is_clean(), "{report}\n{}", relay.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_terminated_walsender_is_replaced() {
    let database = Database::start().await;
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
    let report = harness::check(&database, &emulator).await;
    assert!(report.is_clean(), "{report}\n{}", relay.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_relay_stands_by_and_takes_over_within_seconds() {
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
    let report = harness::check(&database, &emulator).await;
    assert!(
        report.is_clean() && report.unexplained_duplicates() == 0,
        "{report}"
    );
}
