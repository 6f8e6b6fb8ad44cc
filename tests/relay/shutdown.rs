//! Tests of the graceful shutdown: on SIGTERM at any moment the relay exits in time, and the next relay
//! resends only unrecorded events, if any.

use std::time::{Duration, Instant};

use fault_proxy::Flow;
use pubsub_emulator::{Action, Fault};
use scratch_postgres::StopMode;

use crate::harness::{self, Database, Relay, eventually, insert_orders, postrider};
use crate::load::{Load, proxied, wait_for_more};

const TIMEOUT: (&str, &str) = ("POSTRIDER_SHUTDOWN_TIMEOUT_S", "1");

/// How long a shutdown may take beyond `shutdown_timeout_s`: three seconds to record answers, three
/// to end the session, two to write the last position, and a margin for slow machines.
const BEYOND: Duration = Duration::from_secs(12);

/// Checks that SIGTERM ends the relay in time and with success.
async fn ends_in_time(relay: Relay) {
    let began = Instant::now();
    relay.stop().await;
    let took = began.elapsed();
    assert!(took < Duration::from_secs(1) + BEYOND, "{took:?}");
}

/// Starts another relay, and checks that it delivers and confirms all remaining events.
async fn the_next_one_delivers_all(
    database: &Database,
    emulator: &pubsub_emulator::RunningEmulator,
) -> Relay {
    let relay = Relay::start(database, emulator);
    database.wait_until_recorded().await;
    database.wait_until_confirmed().await;
    let report = harness::check(database, emulator).await;
    assert!(report.is_clean(), "{report}\n{}", relay.log());
    relay
}

#[tokio::test(flavor = "multi_thread")]
async fn sigterm_ends_a_relay_in_time_while_it_connects_or_postgresql_is_down() {
    let mut database = Database::private().await;
    let emulator = harness::emulator().await;
    let host = emulator.addr().to_string();
    let (proxy, url) = proxied(&database).await;
    let environment = [
        TIMEOUT,
        ("DATABASE_URL", &url),
        ("POSTRIDER_START_TIMEOUT_S", "600"),
    ];
    proxy.set_flow(Flow::Stalled);
    let connecting = Relay::start_with(&database, &host, &environment);
    harness::eventually("the relay connects", || async {
        (proxy.open_connections() > 0).then_some(())
    })
    .await;
    ends_in_time(connecting).await;
    proxy.heal();
    proxy.refuse();
    let refused = Relay::start_with(&database, &host, &environment);
    refused.wait_for_log("postgres-unreachable").await;
    ends_in_time(refused).await;
    proxy.heal();
    let cut_off = Relay::start_with(&database, &host, &environment);
    cut_off.wait_for_log("streaming").await;
    database
        .server()
        .stop(StopMode::Fast, harness::PATIENCE)
        .unwrap();
    cut_off.wait_for_log("postgres-unreachable").await;
    ends_in_time(cut_off).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sigterm_ends_a_standby_even_if_its_connection_is_silent() {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    let host = emulator.addr().to_string();
    let first = Relay::start(&database, &emulator);
    first.wait_for_log("streaming").await;
    let (proxy, url) = proxied(&database).await;
    for flow in [Flow::Open, Flow::Stalled] {
        let standby = Relay::start_with(&database, &host, &[TIMEOUT, ("DATABASE_URL", &url)]);
        standby.wait_for_log("standby").await;
        proxy.set_flow(flow);
        ends_in_time(standby).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn after_sigterm_in_a_large_transaction_the_next_relay_sends_only_the_rest() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    emulator
        .faults()
        .inject(Fault::new(Action::Delay(Duration::from_millis(200))));
    let host = emulator.addr().to_string();
    // Keep the default shutdown timeout. With a shorter timeout the relay may give up requests, and the
    // next relay would repeat their events.
    let little = [("POSTRIDER_IN_FLIGHT_MIB", "1")];
    let relay = Relay::start_with(&database, &host, &little);
    relay.wait_for_log("streaming").await;
    database
        .execute(
            "INSERT INTO outbox.events \
                 (aggregatetype, aggregateid, event_type, version, payload, occurred_at) \
             SELECT 'order', 'o-' || i % 50, 'OrderPlaced', i, '{}', now() \
             FROM generate_series(1, 30000) i",
        )
        .await;
    wait_for_more(&database, 500).await;
    ends_in_time(relay).await;
    let recorded = database
        .number("SELECT count(*) FROM outbox.dispatch")
        .await;
    assert!(recorded < 30_000, "everything was already recorded");
    emulator.faults().lift_all();
    the_next_one_delivers_all(&database, &emulator).await;
    let report = harness::check_streamed(&database, &emulator).await;
    assert!(report.duplicates.is_empty(), "{report}");
}

#[tokio::test(flavor = "multi_thread")]
async fn sigterm_ends_a_relay_in_time_without_answers_and_a_second_one_at_once() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    emulator.faults().inject(Fault::new(Action::NeverAnswer));
    let host = emulator.addr().to_string();
    insert_orders(&database, 100, 10).await;
    let relay = Relay::start_with(&database, &host, &[TIMEOUT]);
    emulator
        .journal()
        .wait_until(harness::PATIENCE, |counts| counts.attempts > 0)
        .await
        .unwrap();
    ends_in_time(relay).await;
    let patient = [("POSTRIDER_SHUTDOWN_TIMEOUT_S", "600")];
    let relay = Relay::start_with(&database, &host, &patient);
    let before = emulator.journal().counts().attempts;
    emulator
        .journal()
        .wait_until(harness::PATIENCE, |counts| counts.attempts > before)
        .await
        .unwrap();
    relay.terminate();
    relay
        .wait_for_log("a second signal ends the program immediately")
        .await;
    let began = Instant::now();
    relay.terminate();
    assert_eq!(relay.wait().await.code(), Some(130));
    assert!(began.elapsed() < Duration::from_secs(5));
    emulator.faults().lift_all();
    the_next_one_delivers_all(&database, &emulator).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sigterm_does_not_wait_until_a_broken_session_has_drained() {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    let host = emulator.addr().to_string();
    let relay = Relay::start_with(&database, &host, &[TIMEOUT]);
    relay.wait_for_log("streaming").await;
    emulator.faults().inject(Fault::new(Action::NeverAnswer));
    insert_orders(&database, 100, 10).await;
    emulator
        .journal()
        .wait_until(harness::PATIENCE, |counts| counts.attempts > 0)
        .await
        .unwrap();
    database
        .execute("SELECT pg_terminate_backend(pid) FROM pg_stat_replication")
        .await;
    harness::eventually("the session is gone", || async {
        let streams = "SELECT count(*) FROM pg_stat_replication";
        (database.number(streams).await == 0).then_some(())
    })
    .await;
    let began = Instant::now();
    relay.stop().await;
    let took = began.elapsed();
    assert!(
        took < Duration::from_secs(6),
        "{took:?}: the shutdown waited for the drain"
    );
    emulator.faults().lift_all();
    the_next_one_delivers_all(&database, &emulator).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sigterm_ends_a_relay_in_time_while_the_dispatch_table_is_locked() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let host = emulator.addr().to_string();
    insert_orders(&database, 100, 10).await;
    let relay = Relay::start_with(&database, &host, &[TIMEOUT]);
    database.wait_until_recorded().await;
    insert_orders(&database, 100, 10).await;
    database
        .execute("BEGIN; LOCK TABLE outbox.dispatch IN ACCESS EXCLUSIVE MODE")
        .await;
    ends_in_time(relay).await;
    database.execute("COMMIT").await;
    the_next_one_delivers_all(&database, &emulator).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_recovery_interrupted_by_sigterm_is_completed_by_the_next_relay() {
    const MARKED: &str = "SELECT count(*) FROM outbox.relay WHERE recovering IS NOT NULL";
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let relay = Relay::start(&database, &emulator);
    insert_orders(&database, 100, 50).await;
    database.wait_until_recorded().await;
    database.wait_until_confirmed().await;
    relay.stop().await;
    database.drop_slot().await;
    insert_orders(&database, 2_000, 50).await;
    emulator
        .faults()
        .inject(Fault::new(Action::Delay(Duration::from_millis(300))));
    let host = emulator.addr().to_string();
    // Allow one request at a time, so that the stop hits the middle of the recovery.
    let slowly = [TIMEOUT, ("POSTRIDER_IN_FLIGHT_REQUESTS", "1")];
    let relay = Relay::start_with(&database, &host, &slowly);
    relay.wait_for_log("recovering").await;
    wait_for_more(&database, 20).await;
    ends_in_time(relay).await;
    let recorded = database
        .number("SELECT count(*) FROM outbox.dispatch")
        .await;
    assert!(recorded < 2_100, "everything was already recorded");
    assert_eq!(
        database.number(MARKED).await,
        1,
        "the recovery has not ended"
    );
    emulator.faults().lift_all();
    // The relay removes the mark only after the last event is recorded, so wait until the mark is gone.
    let _relay = the_next_one_delivers_all(&database, &emulator).await;
    harness::eventually("the recovery has ended", || async {
        (database.number(MARKED).await == 0).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_release_interrupted_by_sigterm_is_completed_by_the_next_relays() {
    const BAD: &str = "SELECT id::text FROM outbox.events WHERE version = 5";
    const RELEASED: &str = "SELECT count(*) FROM outbox.dispatch WHERE state = 'released'";
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    insert_orders(&database, 2_000, 1).await;
    let event_id = database.text(BAD).await;
    let poison = Fault::new(Action::Poison { event_id });
    let poison = emulator.faults().inject(poison);
    let relay = Relay::start(&database, &emulator);
    database.wait_until_recorded().await;
    relay.stop().await;
    emulator.faults().lift(poison);
    emulator
        .faults()
        .inject(Fault::new(Action::Delay(Duration::from_millis(400))));
    let released = postrider(
        &["quarantine", "release", "--all"],
        &[("DATABASE_URL", &database.url)],
    );
    assert!({ released }.output().unwrap().status.success());
    // Stop two relays in the middle of the release. Each relay sends a few hundred released events at a time, and
    // leaves the rest to the next relay.
    let mut left = database.number(RELEASED).await;
    assert_eq!(left, 1_996);
    for _ in 0..2 {
        let relay = Relay::start(&database, &emulator);
        eventually("some released events are sent", || async {
            (database.number(RELEASED).await < left).then_some(())
        })
        .await;
        ends_in_time(relay).await;
        left = database.number(RELEASED).await;
    }
    assert!(left > 0, "everything was already sent");
    emulator.faults().lift_all();
    let relay = Relay::start(&database, &emulator);
    eventually("all released events are sent", || async {
        (database.number(RELEASED).await == 0).then_some(())
    })
    .await;
    database.wait_until_confirmed().await;
    let report = harness::check_streamed(&database, &emulator).await;
    assert!(
        report.is_clean() && report.duplicates.is_empty(),
        "{report}\n{}",
        relay.log()
    );
}

/// The variable with the seed of the random delays. Set it to replay an earlier run.
const SEED: &str = "POSTRIDER_TEST_SEED";

fn seed() -> u64 {
    match std::env::var(SEED) {
        Ok(text) => text.parse().unwrap(),
        Err(_) => u64::from(std::process::id()),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn sigterm_at_any_moment_under_load_repeats_nothing() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    emulator
        .faults()
        .inject(Fault::new(Action::Delay(Duration::from_millis(10))));
    let seed = seed();
    println!("{SEED}={seed}");
    // Avoid the state 0, because xorshift cannot leave it.
    let mut random = seed.max(1);
    let load = Load::start(&database);
    for _ in 0..6 {
        // One step of xorshift64.
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let relay = Relay::start(&database, &emulator);
        relay.wait_until_it_takes_sigterm().await;
        // Sleep for a random time, because the signal must come at any moment, not only right after
        // an event.
        tokio::time::sleep(Duration::from_millis(random % 1_200)).await;
        relay.stop().await;
    }
    load.stop().await;
    the_next_one_delivers_all(&database, &emulator).await;
    let report = harness::check_streamed(&database, &emulator).await;
    assert!(report.duplicates.is_empty(), "{SEED}={seed}: {report}");
}
