//! Tests of the lease. PostgreSQL may free the slot of a relay that is cut off, and another relay may take it. The
//! first relay must stop sending before that, although it cannot see when PostgreSQL frees the slot.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use fault_proxy::{Direction, FaultProxy, Flow};
use pubsub_emulator::checks::Violation;
use pubsub_emulator::{Action, Attempt, Fault, RunningEmulator};

use super::{LEASE, LEEWAY, insert_much, session_began, with};
use crate::harness::{self, Database, Relay, eventually, insert_orders};
use crate::load::{Load, proxied, wait_for_more};
use crate::privileges::login_role;

/// Runs two relays under load with a slow Pub/Sub, and disturbs the first relay's connection to
/// PostgreSQL with `disturb`. Checks that the second relay takes over, and that Pub/Sub receives no
/// request of the first relay after the session of the second relay has begun.
async fn the_cut_off_relay_stops_before_the_other_begins(disturb: impl FnOnce(&FaultProxy)) {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    let (proxy, url) = proxied(&database).await;
    // Give the first relay a proxy to Pub/Sub, so that the journal shows which attempts are its own.
    let pubsub = FaultProxy::start(emulator.addr()).await.unwrap();
    let of_first = with(&[("DATABASE_URL", &url)]);
    let first = Relay::start_with(&database, &pubsub.addr().to_string(), &of_first);
    first.wait_for_log("streaming").await;
    let second = Relay::start_with(&database, &emulator.addr().to_string(), &with(&[]));
    second.wait_for_log("standby").await;
    let load = Load::start(&database);
    wait_for_more(&database, 100).await;
    // From now on each answer takes 400 ms, so that many requests are in flight.
    let slow = emulator
        .faults()
        .inject(Fault::new(Action::Delay(Duration::from_millis(400))));
    wait_for_more(&database, 50).await;
    let disturbed = emulator.journal().now();
    disturb(&proxy);
    first.wait_for_log("lease-lost").await;
    second.wait_for_log("streaming").await;
    let began = session_began(&database, &emulator).await;
    let took = began.saturating_sub(disturbed);
    assert!(took < LEASE + LEEWAY, "the second took over after {took:?}");
    wait_for_more(&database, 100).await;
    proxy.heal();
    first.wait_for_log("standby").await;
    emulator.faults().lift(slow);
    load.stop().await;
    database.wait_until_recorded().await;
    let ports = pubsub.ports();
    let attempts = emulator.journal().attempts();
    let is_of_first = |attempt: &&Attempt| {
        attempt
            .peer
            .is_some_and(|peer| ports.contains(&peer.port()))
    };
    let (late, before): (Vec<_>, Vec<_>) = attempts
        .iter()
        .filter(is_of_first)
        .partition(|attempt| attempt.received >= began);
    assert!(!before.is_empty());
    assert!(late.is_empty(), "{late:?} after the second's session began");
    let report = harness::check_streamed(&database, &emulator).await;
    assert!(report.is_clean(), "{report}\n{}", first.log());
}

/// The client port of the relay's replication connection.
async fn port_of_the_stream(database: &Database) -> u16 {
    let port = "SELECT client_port::bigint FROM pg_stat_replication";
    database.number(port).await.try_into().unwrap()
}

/// The client addresses of all publish attempts.
fn peers(emulator: &RunningEmulator) -> BTreeSet<std::net::SocketAddr> {
    let attempts = emulator.journal().attempts();
    attempts.iter().filter_map(|attempt| attempt.peer).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_cut_off_by_the_network_stops_before_its_standby_begins() {
    the_cut_off_relay_stops_before_the_other_begins(|proxy| proxy.set_flow(Flow::Stalled)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_that_postgresql_no_longer_hears_stops_even_if_it_hears_postgresql() {
    the_cut_off_relay_stops_before_the_other_begins(|proxy| {
        proxy.set_flow_of(Direction::ToTarget, Flow::Swallowed);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_with_a_delayed_connection_stops_before_its_standby_begins() {
    the_cut_off_relay_stops_before_the_other_begins(|proxy| {
        proxy.set_flow_of(Direction::ToTarget, Flow::Swallowed);
        proxy.set_flow_of(Direction::FromTarget, Flow::Delayed(Duration::from_secs(4)));
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn backpressure_keeps_the_lease_as_long_as_postgresql_hears_the_relay() {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    emulator.faults().inject(Fault::new(Action::NeverAnswer));
    let (proxy, url) = proxied(&database).await;
    let host = emulator.addr().to_string();
    insert_much(&database).await;
    let environment = with(&[("DATABASE_URL", &url), ("POSTRIDER_IN_FLIGHT_MIB", "1")]);
    let relay = Relay::start_with(&database, &host, &environment);
    relay.wait_for_log("streaming").await;
    // Wait for longer than a lease. During this time the relay reads only a part of the rows of `insert_much`, because
    // its memory budget is full.
    tokio::time::sleep(LEASE + LEASE / 3).await;
    let log = relay.log();
    assert!(!log.contains("lease-lost"), "{log}");
    assert_eq!(log.matches("streaming").count(), 1, "one session:\n{log}");
    assert!(
        proxy.bytes(Direction::FromTarget) < 60_000_000,
        "reading is held back"
    );
    proxy.set_flow(Flow::Stalled);
    let stalled = Instant::now();
    relay.wait_for_log("lease-lost").await;
    let took = stalled.elapsed();
    assert!(took < LEASE, "lost after {took:?}");
    let attempts = emulator.journal().counts().attempts;
    eventually("PostgreSQL frees the slot too", || async {
        let free = "SELECT count(*) FROM pg_replication_slots WHERE NOT active";
        (database.number(free).await == 1).then_some(())
    })
    .await;
    assert_eq!(emulator.journal().counts().attempts, attempts);
}

/// The relay must stop sending before PostgreSQL frees the slot, although its role has no right to see when the
/// walsender last heard from it. The test cuts only the replication connection.
#[tokio::test(flavor = "multi_thread")]
async fn a_relay_without_rights_to_statistics_stops_in_time_when_only_its_stream_is_cut() {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    let (proxy, url) = proxied(&database).await;
    login_role(&database).await;
    let url = url.replace("postgres@", "shop_relay@");
    let host = emulator.addr().to_string();
    let relay = Relay::start_with(&database, &host, &with(&[("DATABASE_URL", &url)]));
    let load = Load::start(&database);
    wait_for_more(&database, 100).await;
    let walsender = "SELECT active_pid::bigint FROM pg_replication_slots WHERE active";
    let walsender = database.number(walsender).await;
    proxy.set_flow_of_one(port_of_the_stream(&database).await, Flow::Swallowed);
    relay.wait_for_log("lease-lost").await;
    let still = format!("SELECT count(*) FROM pg_replication_slots WHERE active_pid = {walsender}");
    let still = database.number(&still).await;
    assert_eq!(still, 1, "the slot was free before:\n{}", relay.log());
    proxy.heal();
    load.stop().await;
    database.wait_until_recorded().await;
    let report = harness::check_streamed(&database, &emulator).await;
    assert!(report.is_clean(), "{report}\n{}", relay.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn backpressure_without_rights_to_statistics_keeps_the_lease_until_the_slot_is_free() {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    emulator.faults().inject(Fault::new(Action::NeverAnswer));
    let (proxy, url) = proxied(&database).await;
    login_role(&database).await;
    let url = url.replace("postgres@", "shop_relay@");
    let host = emulator.addr().to_string();
    insert_much(&database).await;
    let environment = with(&[("DATABASE_URL", &url), ("POSTRIDER_IN_FLIGHT_MIB", "1")]);
    let relay = Relay::start_with(&database, &host, &environment);
    relay.wait_for_log("streaming").await;
    tokio::time::sleep(LEASE + LEASE / 2).await;
    let log = relay.log();
    assert!(!log.contains("lease-lost"), "{log}");
    proxy.set_flow_of_one(port_of_the_stream(&database).await, Flow::Swallowed);
    eventually("PostgreSQL frees the slot", || async {
        let free = "SELECT count(*) FROM pg_replication_slots WHERE NOT active";
        (database.number(free).await == 1).then_some(())
    })
    .await;
    let free = Instant::now();
    relay.wait_for_log("lease-lost").await;
    // The relay checks the slot eight times per lease, so it must notice soon that the slot is free.
    assert!(free.elapsed() < LEASE / 2, "{:?}", free.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_relay_sends_nothing_new_when_it_wakes_up_after_a_takeover() {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    let host = emulator.addr().to_string();
    let first = Relay::start_with(&database, &host, &with(&[]));
    first.wait_for_log("streaming").await;
    let second = Relay::start_with(&database, &host, &with(&[]));
    second.wait_for_log("standby").await;
    let load = Load::start(&database);
    wait_for_more(&database, 100).await;
    let peers_of_first = peers(&emulator);
    first.signal("STOP");
    second.wait_for_log("streaming").await;
    wait_for_more(&database, 100).await;
    let woken = emulator.journal().now();
    first.signal("CONT");
    first.wait_for_log("standby").await;
    load.stop().await;
    database.wait_until_recorded().await;
    let attempts = emulator.journal().attempts();
    let of_first = |attempt: &&Attempt| attempt.peer.is_some_and(|p| peers_of_first.contains(&p));
    let late = attempts.iter().filter(of_first);
    let late = late.filter(|attempt| attempt.received >= woken).count();
    // Allow the requests that were in the first relay's sockets when it froze. There is at most one per key, and
    // there are ten keys.
    assert!(late <= 10, "{late} requests after it woke up");
    let report = harness::check_streamed(&database, &emulator).await;
    let missing = |violation: &&Violation| matches!(violation, Violation::Missing { .. });
    assert_eq!(
        report.violations.iter().filter(missing).count(),
        0,
        "{report}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_standby_with_a_silent_connection_notices_and_still_takes_over() {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    let first = Relay::start(&database, &emulator);
    first.wait_for_log("streaming").await;
    let (proxy, url) = proxied(&database).await;
    let host = emulator.addr().to_string();
    let second = Relay::start_with(&database, &host, &[("DATABASE_URL", &url)]);
    second.wait_for_log("standby").await;
    proxy.set_flow(Flow::Stalled);
    second.wait_for_log("has not answered").await;
    first.kill_9();
    proxy.heal();
    second.wait_for_log("streaming").await;
    insert_orders(&database, 50, 5).await;
    database.wait_until_recorded().await;
}

/// PostgreSQL terminates the walsender, but its message about the termination arrives late. Before that, the relay
/// notices that its slot is free. A free slot may mean a takeover, after which the relay must give up its requests in
/// flight. So the relay must first wait for the message. The message shows that there was no takeover, so the relay
/// records the published events.
#[tokio::test(flavor = "multi_thread")]
async fn published_events_are_recorded_even_if_the_relay_first_finds_the_slot_free() {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    let (proxy, url) = proxied(&database).await;
    let settings = [
        ("DATABASE_URL", &*url),
        // The relay checks the slot eight times per timeout, here about every 0.9 s. So a check
        // comes before the late message.
        ("POSTRIDER_WAL_SENDER_TIMEOUT_S", "7"),
        ("POSTRIDER_PUBLISH_TIMEOUT_S", "1"),
    ];
    let relay = Relay::start_with(&database, &emulator.addr().to_string(), &settings);
    relay.wait_for_log("streaming").await;
    let mut beside = harness::connect(&database.url).await;
    let lock = beside.transaction().await.unwrap();
    lock.batch_execute("LOCK TABLE outbox.dispatch IN EXCLUSIVE MODE")
        .await
        .unwrap();
    insert_orders(&database, 3, 3).await;
    eventually("everything is published", || async {
        (emulator.journal().counts().attempts == 3).then_some(())
    })
    .await;
    let late = Flow::Delayed(Duration::from_millis(900));
    proxy.set_flow_of_one(port_of_the_stream(&database).await, late);
    database
        .execute("SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE active")
        .await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    lock.commit().await.unwrap();
    relay.wait_for_log("administrator command").await;
    database.wait_until_recorded().await;
    database.wait_until_confirmed().await;
    let report = harness::check_streamed(&database, &emulator).await;
    assert!(
        report.is_clean() && report.duplicates.is_empty(),
        "{report}\n{}",
        relay.log()
    );
}
