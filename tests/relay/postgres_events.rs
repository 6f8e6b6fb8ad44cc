//! Tests of ordinary operations on a database under load. No event is lost, and the order of each key
//! holds. The relay continues automatically, or stops with an error that says what to do.

mod partitions;

use std::time::{Duration, Instant};

use pubsub_emulator::{Action, Fault, RunningEmulator};
use scratch_postgres::StopMode;
use tonic::Code;

use crate::harness::{self, Database, Relay, eventually, insert_orders};
use crate::load::{Load, wait_for_more};

/// The longest time that the server may take to stop. The server may have to wait for the relay's next
/// check, at which the relay notices the shutdown.
const STOP_LIMIT: Duration = Duration::from_secs(15);

async fn all_is_delivered(
    database: &Database,
    emulator: &pubsub_emulator::RunningEmulator,
    relay: &Relay,
) {
    database.wait_until_recorded().await;
    database.wait_until_confirmed().await;
    let report = harness::check_streamed(database, emulator).await;
    assert!(report.is_clean(), "{report}\n{}", relay.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn restarts_of_every_kind_under_load_lose_nothing() {
    let mut database = Database::private().await;
    let emulator = harness::emulator().await;
    let relay = Relay::start(&database, &emulator);
    let load = Load::start(&database);
    for mode in [Some(StopMode::Fast), Some(StopMode::Immediate), None] {
        wait_for_more(&database, 100).await;
        match mode {
            Some(mode) => database.server().stop(mode, harness::PATIENCE).unwrap(),
            None => database.server().kill_9().unwrap(),
        }
        database.server().start_again().unwrap();
        database.reconnect().await;
    }
    wait_for_more(&database, 100).await;
    load.stop().await;
    all_is_delivered(&database, &emulator, &relay).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sessions_terminated_repeatedly_under_load_lose_nothing() {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    let relay = Relay::start(&database, &emulator);
    let load = Load::start(&database);
    for victims in [
        "backend_type = 'walsender'",
        "application_name LIKE 'postrider dispatch%'",
        "application_name LIKE 'postrider supervisor%'",
        "application_name LIKE 'postrider%'",
        "backend_type = 'walsender'",
        "application_name LIKE 'postrider dispatch%'",
    ] {
        wait_for_more(&database, 60).await;
        let terminate = format!(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE {victims}"
        );
        // Retry, because the session may be reconnecting at this moment.
        eventually(victims, || async {
            (database.number(&terminate).await > 0).then_some(())
        })
        .await;
    }
    wait_for_more(&database, 60).await;
    load.stop().await;
    all_is_delivered(&database, &emulator, &relay).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fast_shutdown_does_not_wait_for_a_relay_that_cannot_reach_pubsub() {
    let mut database = Database::private().await;
    let emulator = harness::emulator().await;
    let relay = Relay::start(&database, &emulator);
    relay.wait_for_log("streaming").await;
    emulator
        .faults()
        .inject(Fault::new(Action::Fail(Code::Unavailable)));
    insert_orders(&database, 500, 20).await;
    relay.wait_for_log("pubsub-unreachable").await;
    let began = Instant::now();
    let stopped = database.server().stop(StopMode::Fast, STOP_LIMIT);
    assert!(stopped.is_ok(), "{stopped:?}\n{}", relay.log());
    relay.wait_for_log("postgres-stopping").await;
    println!("the server stopped after {:?}", began.elapsed());
    database.server().start_again().unwrap();
    database.reconnect().await;
    emulator.faults().lift_all();
    all_is_delivered(&database, &emulator, &relay).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fast_shutdown_during_a_huge_transaction_does_not_wait_for_the_relay() {
    let mut database = Database::private().await;
    let emulator = harness::emulator().await;
    emulator
        .faults()
        .inject(Fault::new(Action::Delay(Duration::from_millis(200))));
    let host = emulator.addr().to_string();
    let relay = Relay::start_with(&database, &host, &[("POSTRIDER_IN_FLIGHT_MIB", "2")]);
    relay.wait_for_log("streaming").await;
    database
        .execute(
            "INSERT INTO outbox.events \
                 (aggregatetype, aggregateid, event_type, version, payload, occurred_at) \
             SELECT 'order', 'o-' || i % 100, 'OrderPlaced', i, \
                    jsonb_build_object('filler', repeat(md5(i::text), 10)), now() \
             FROM generate_series(1, 60000) i",
        )
        .await;
    wait_for_more(&database, 3_000).await;
    let stopped = database.server().stop(StopMode::Fast, STOP_LIMIT);
    assert!(stopped.is_ok(), "{stopped:?}\n{}", relay.log());
    database.server().start_again().unwrap();
    database.reconnect().await;
    let recorded = database
        .number("SELECT count(*) FROM outbox.dispatch")
        .await;
    assert!(recorded < 60_000, "everything was already recorded");
    emulator.faults().lift_all();
    all_is_delivered(&database, &emulator, &relay).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_column_added_while_the_relay_runs_changes_nothing() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let relay = Relay::start(&database, &emulator);
    let load = Load::start(&database);
    wait_for_more(&database, 50).await;
    database
        .execute("ALTER TABLE outbox.events ADD COLUMN note text DEFAULT 'none'")
        .await;
    wait_for_more(&database, 100).await;
    load.stop().await;
    all_is_delivered(&database, &emulator, &relay).await;
    assert!(!relay.log().contains("error["), "{}", relay.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_column_renamed_and_renamed_back_without_a_row_in_between_loses_nothing() {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    let relay = Relay::start(&database, &emulator);
    insert_orders(&database, 50, 5).await;
    database.wait_until_recorded().await;
    database
        .execute("ALTER TABLE outbox.events RENAME COLUMN aggregateid TO aggregate_id")
        .await;
    // The supervisor notices the new column name although no row is written. The next session starts only
    // when the column has its old name again.
    relay.wait_for_log("publication-drift").await;
    database
        .execute("SELECT pg_terminate_backend(pid) FROM pg_stat_replication")
        .await;
    relay
        .wait_for_log("has no column aggregateid; retrying")
        .await;
    database
        .execute("ALTER TABLE outbox.events RENAME COLUMN aggregate_id TO aggregateid")
        .await;
    insert_orders(&database, 50, 5).await;
    all_is_delivered(&database, &emulator, &relay).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_with_a_renamed_column_stop_the_relay_until_the_settings_name_it() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let relay = Relay::start(&database, &emulator);
    insert_orders(&database, 50, 5).await;
    database.wait_until_recorded().await;
    database
        .execute(
            "ALTER TABLE outbox.events RENAME COLUMN aggregateid TO subject; \
             INSERT INTO outbox.events \
                 (aggregatetype, subject, event_type, version, payload, occurred_at) \
             SELECT 'order', 'o-' || i % 5, 'OrderPlaced', i, '{}', clock_timestamp() \
             FROM generate_series(51, 60) i",
        )
        .await;
    relay.wait_for_error("column-missing").await;
    let log = relay.log();
    assert!(
        log.contains("aggregateid") && log.contains("hint:"),
        "{log}"
    );
    assert_eq!(relay.wait().await.code(), Some(5), "{log}");
    let file = tempfile::NamedTempFile::new().unwrap();
    let settings = "[[tables]]\ntable = 'outbox.events'\ncolumns = { aggregateid = 'subject' }\n";
    std::fs::write(file.path(), settings).unwrap();
    let path = file.path().display().to_string();
    let host = emulator.addr().to_string();
    let relay = Relay::start_with(&database, &host, &[("POSTRIDER_CONFIG", &path)]);
    database.wait_until_recorded().await;
    database.wait_until_confirmed().await;
    let attempts = emulator.journal().attempts();
    let keys: std::collections::BTreeSet<_> = attempts
        .iter()
        .map(|attempt| &*attempt.ordering_key)
        .collect();
    assert_eq!(keys.len(), 5, "the new column is the key: {keys:?}");
    assert_eq!(
        emulator.journal().counts().stored_messages,
        60,
        "{}",
        relay.log()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rotated_password_keeps_the_session_and_ends_a_relay_with_only_the_old_one() {
    let database = Database::with_password("rotated", "old-one").await;
    let emulator = harness::emulator().await;
    let host = emulator.addr().to_string();
    let url = |password: &str| {
        let credentials = format!("postgres://rotated:{password}@");
        database.url.replace("postgres://postgres@", &credentials)
    };
    let relay = Relay::start_with(&database, &host, &[("DATABASE_URL", &url("old-one"))]);
    insert_orders(&database, 50, 5).await;
    database.wait_until_recorded().await;
    database
        .execute("ALTER ROLE rotated PASSWORD 'new-one'")
        .await;
    insert_orders(&database, 50, 5).await;
    database.wait_until_recorded().await;
    database
        .execute("SELECT pg_terminate_backend(pid) FROM pg_stat_replication")
        .await;
    relay.wait_for_error("postgres-authentication").await;
    let log = relay.log();
    assert!(!log.contains("old-one"), "a password in the log");
    // The relay exits, so an operator starts it again, with the new password.
    assert_eq!(relay.wait().await.code(), Some(3), "{log}");
    insert_orders(&database, 50, 5).await;
    let relay = Relay::start_with(&database, &host, &[("DATABASE_URL", &url("new-one"))]);
    all_is_delivered(&database, &emulator, &relay).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn timeouts_of_the_role_and_a_locked_dispatch_table_end_no_session_and_lose_nothing() {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    database
        .execute(
            "ALTER DATABASE postgres SET statement_timeout = '300ms'; \
             ALTER ROLE postgres SET lock_timeout = '100ms'; \
             ALTER ROLE postgres SET idle_session_timeout = '500ms'; \
             ALTER ROLE postgres SET idle_in_transaction_session_timeout = '200ms'",
        )
        .await;
    let version = "SELECT current_setting('server_version_num')::bigint";
    if database.number(version).await >= 170_000 {
        database
            .execute("ALTER ROLE postgres SET transaction_timeout = '200ms'")
            .await;
    } else {
        eprintln!("SKIPPED in part: transaction_timeout needs PostgreSQL 17");
    }
    let relay = Relay::start(&database, &emulator);
    relay.wait_for_log("streaming").await;
    insert_orders(&database, 100, 5).await;
    // Insert a large transaction. The walsender needs longer than the role's timeouts to send it.
    database
        .execute(
            "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, version, payload) \
             SELECT 'order', 'large', 'OrderPlaced', n, jsonb_build_object('n', repeat('x', 200)) \
             FROM generate_series(1, 50000) n",
        )
        .await;
    database.wait_until_recorded().await;
    database
        .execute("BEGIN; LOCK TABLE outbox.dispatch IN ACCESS EXCLUSIVE MODE")
        .await;
    insert_orders_in_another_session(&database).await;
    // Watch from another session. The transaction that holds the lock would see the same statistics in every
    // query.
    let watcher = harness::connect(&database.url).await;
    eventually("the writer waits for the lock", || async {
        let waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' \
                       AND application_name LIKE 'postrider dispatch%'";
        let row = watcher.query_one(waiting, &[]).await.unwrap();
        (row.get::<_, i64>(0) > 0).then_some(())
    })
    .await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(!relay.log().contains("SQLSTATE"), "{}", relay.log());
    database.execute("COMMIT").await;
    all_is_delivered(&database, &emulator, &relay).await;
    // Stay idle for longer than the role's timeouts for idle sessions.
    tokio::time::sleep(Duration::from_secs(1)).await;
    insert_orders(&database, 100, 5).await;
    all_is_delivered(&database, &emulator, &relay).await;
    let report = harness::check_streamed(&database, &emulator).await;
    assert!(report.duplicates.is_empty(), "{report}\n{}", relay.log());
    assert_eq!(relay.log().matches("streaming").count(), 1, "one session");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_short_statement_timeout_of_the_role_ends_no_statement_waiting_for_a_lock() {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    // Connect `locker` before the role's settings change, so that the new timeouts do not apply to this session.
    let locker = harness::connect(&database.url).await;
    database
        .execute(
            "ALTER ROLE postgres SET statement_timeout = '300ms'; \
             ALTER ROLE postgres SET lock_timeout = '5s'",
        )
        .await;
    let relay = Relay::start(&database, &emulator);
    relay.wait_for_log("streaming").await;
    insert_orders(&database, 50, 5).await;
    database.wait_until_recorded().await;
    locker
        .batch_execute("BEGIN; LOCK TABLE outbox.dispatch IN ACCESS EXCLUSIVE MODE")
        .await
        .unwrap();
    insert_orders(&database, 50, 5).await;
    eventually("the records wait for the lock", || async {
        let waiting = "SELECT count(*) FROM pg_stat_activity \
             WHERE application_name LIKE 'postrider dispatch%' AND wait_event_type = 'Lock'";
        (database.number(waiting).await > 0).then_some(())
    })
    .await;
    // Wait for several times the role's `statement_timeout`.
    tokio::time::sleep(Duration::from_secs(1)).await;
    locker.batch_execute("COMMIT").await.unwrap();
    all_is_delivered(&database, &emulator, &relay).await;
    let log = relay.log();
    // Ignore the supervisor's queries, which have their own statement timeout.
    let is_ended = |line: &str| line.contains("57014") && !line.contains("the publication");
    assert!(!log.lines().any(is_ended), "{log}");
    let report = harness::check_streamed(&database, &emulator).await;
    assert!(report.duplicates.is_empty(), "{report}\n{log}");
    assert_eq!(log.matches("streaming").count(), 1, "one session:\n{log}");
}

/// Inserts orders from another session, because the test's own session holds the lock.
async fn insert_orders_in_another_session(database: &Database) {
    let load = Load::start(database);
    load.wait_for_rows(100).await;
    load.stop().await;
}
