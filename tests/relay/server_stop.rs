//! Tests that the relay confirms the rest of the WAL, as far as it can, while PostgreSQL shuts down.
//! Otherwise `pg_upgrade` would refuse the slot.

use std::process::Command;
use std::time::{Duration, Instant};

use pubsub_emulator::{Action, Fault, RunningEmulator};
use scratch_postgres::{ScratchPostgres, StopMode};

use crate::harness::{self, Database, Relay, eventually, insert_orders, signal};

/// The relay's log line when it has noticed the shutdown.
pub(crate) const NOTICED: &str = "PostgreSQL is shutting down";

/// Maximum number of bytes between the last confirmed position and the shutdown checkpoint. The two need not be
/// equal, because PostgreSQL may leave the rest of a WAL page empty between them.
const LAST_PAGE: u64 = 8192;

/// Runs the SQL `work` while the walsender is frozen, and stops the server. The walsender continues, and sends the WAL
/// of `work`, only when the relay has noticed the shutdown. Returns the time from then until the server has stopped.
pub(crate) async fn stop_with_unsent_wal(
    database: &mut Database,
    relay: &Relay,
    work: &str,
) -> Duration {
    let walsender =
        "SELECT active_pid::bigint FROM pg_replication_slots WHERE active_pid IS NOT NULL";
    let walsender = database.number(walsender).await;
    signal("STOP", walsender);
    database.execute(work).await;
    let noticed = || relay.log().matches(NOTICED).count();
    let before = noticed();
    let postmaster = database.server().pid().unwrap();
    signal("INT", postmaster);
    eventually("the relay notices the shutdown", || async {
        (noticed() > before).then_some(())
    })
    .await;
    let began = Instant::now();
    signal("CONT", walsender);
    database
        .server()
        .stop(StopMode::Fast, harness::PATIENCE)
        .unwrap();
    began.elapsed()
}

fn lsn(text: &str) -> u64 {
    let (high, low) = text.split_once('/').unwrap();
    let part = |hex| u64::from_str_radix(hex, 16).unwrap();
    (part(high) << 32) + part(low)
}

/// The position of the shutdown checkpoint of a stopped server. `None` if the server lacks the program that shows it.
fn shutdown_checkpoint(server: &ScratchPostgres) -> Option<u64> {
    let program = server.programs().join("pg_controldata");
    if !program.exists() {
        eprintln!("SKIPPED in part: this PostgreSQL has no pg_controldata");
        return None;
    }
    let output = Command::new(program)
        .env("LC_ALL", "C")
        .arg(server.data_dir())
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let line = |name| text.lines().find_map(|line| line.strip_prefix(name));
    assert_eq!(
        line("Database cluster state:").map(str::trim),
        Some("shut down")
    );
    Some(lsn(line("Latest checkpoint location:").unwrap().trim()))
}

/// Asserts that the relay has confirmed all WAL of a stopped server.
fn assert_confirmed_to_the_end(server: &ScratchPostgres, confirmed: u64, relay: &Relay) {
    if let Some(end) = shutdown_checkpoint(server) {
        assert!(
            end.saturating_sub(confirmed) < LAST_PAGE,
            "{confirmed:X} < {end:X}\n{}",
            relay.log()
        );
    }
}

/// Waits until a session of the relay is closed, and returns the last position that this session confirmed.
/// `sessions` is the number of earlier sessions.
async fn last_confirmed(relay: &Relay, sessions: usize) -> u64 {
    let positions = || {
        let log = relay.log();
        let lines = log
            .lines()
            .filter(|line| line.contains("closing the session"));
        let positions = lines.map(|line| {
            let (_, rest) = line.split_once("confirmed=").unwrap();
            let end = rest.find(|c: char| !c.is_ascii_hexdigit() && c != '/');
            lsn(&rest[..end.unwrap_or(rest.len())])
        });
        positions.collect::<Vec<_>>()
    };
    eventually("the session is closed", || async {
        positions().get(sessions).copied()
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_shuts_down_under_load_has_all_its_wal_confirmed() {
    let mut database = Database::private().await;
    database.execute("CREATE TABLE other (n bigint)").await;
    let emulator = harness::emulator().await;
    let relay = Relay::start(&database, &emulator);
    let many =
        "DO $$ BEGIN FOR i IN 1..3000 LOOP INSERT INTO other VALUES (i); COMMIT; END LOOP; END $$";
    let large = "INSERT INTO other SELECT generate_series(1, 300000)";
    for (round, work) in [many, large, many].into_iter().enumerate() {
        insert_orders(&database, 100, 10).await;
        database.wait_until_recorded().await;
        database.wait_until_confirmed().await;
        stop_with_unsent_wal(&mut database, &relay, work).await;
        let confirmed = last_confirmed(&relay, round).await;
        assert_confirmed_to_the_end(database.server(), confirmed, &relay);
        database.server().start_again().unwrap();
        database.reconnect().await;
    }
    database.wait_until_confirmed().await;
    let report = harness::check_streamed(&database, &emulator).await;
    assert!(
        report.is_clean() && report.duplicates.is_empty(),
        "{report}"
    );
}

/// Starts a relay with `dispatch = exceptions`, which has delivered some events.
async fn serving_without_records() -> (Database, RunningEmulator, Relay) {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    let host = emulator.addr().to_string();
    let relay = Relay::start_with(&database, &host, &[("POSTRIDER_DISPATCH", "exceptions")]);
    insert_orders(&database, 100, 10).await;
    database.wait_until_confirmed().await;
    (database, emulator, relay)
}

#[tokio::test(flavor = "multi_thread")]
async fn with_exceptions_the_last_events_before_a_shutdown_are_delivered_and_confirmed() {
    let (mut database, emulator, relay) = serving_without_records().await;
    let rows = harness::insert_orders_sql(2_000, 10);
    stop_with_unsent_wal(&mut database, &relay, &rows).await;
    let confirmed = last_confirmed(&relay, 0).await;
    assert_confirmed_to_the_end(database.server(), confirmed, &relay);
    database.server().start_again().unwrap();
    database.reconnect().await;
    database.wait_until_confirmed().await;
    let report = harness::check_streamed(&database, &emulator).await;
    // Allow duplicates before PostgreSQL 17. An older server forgets the last confirmed position when it stops, so it
    // sends events again.
    let has_forgotten = database.server().major_version().unwrap() < 17;
    assert!(report.is_clean(), "{report}");
    assert!(report.duplicates.is_empty() || has_forgotten, "{report}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_shuts_down_does_not_wait_for_events_that_cannot_be_recorded() {
    let mut database = Database::private().await;
    let emulator = harness::emulator().await;
    let relay = Relay::start(&database, &emulator);
    insert_orders(&database, 100, 10).await;
    database.wait_until_recorded().await;
    emulator.faults().inject(Fault::new(Action::NeverAnswer));
    let rows = harness::insert_orders_sql(100, 10);
    let waited = stop_with_unsent_wal(&mut database, &relay, &rows).await;
    assert!(waited < Duration::from_secs(30), "{waited:?}");
    emulator.faults().lift_all();
    database.server().start_again().unwrap();
    database.reconnect().await;
    database.wait_until_recorded().await;
    let report = harness::check(&database, &emulator).await;
    assert!(report.is_clean(), "{report}");
}

/// With `dispatch = exceptions`, the session must wait for the answers of Pub/Sub, which take 6.5 seconds here. With
/// `dispatch = full`, it ends after 5 seconds without progress.
#[tokio::test(flavor = "multi_thread")]
async fn with_exceptions_a_shutdown_leaves_no_wal_unconfirmed_even_if_pubsub_is_slow() {
    let (mut database, emulator, relay) = serving_without_records().await;
    let slow = Action::Delay(Duration::from_millis(6_500));
    emulator.faults().inject(Fault::new(slow));
    let rows = "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, version, payload) \
                SELECT 'order', 'o-' || i % 10, 'OrderPlaced', i, '{}' FROM generate_series(1, 2000) i";
    stop_with_unsent_wal(&mut database, &relay, rows).await;
    let confirmed = last_confirmed(&relay, 0).await;
    assert_confirmed_to_the_end(database.server(), confirmed, &relay);
}
