//! Tests of several relays on one slot. Only one relay sends at a time. A standby reports that it waits
//! for the slot. A takeover loses no event. A relay that is cut off from PostgreSQL stops sending before
//! another relay can begin.

mod late_answers;
mod lease;
mod roles;

use std::time::{Duration, Instant};

use fault_proxy::Cut;
use pubsub_emulator::{Action, Fault, RunningEmulator};

use crate::harness::{self, Database, Relay, eventually, insert_orders};
use crate::http::{free_addr, get, metric};
use crate::load::{Load, proxied, wait_for_more};

/// Settings for a short lease of 12 s. A relay stops sending after three quarters of its lease. The remaining
/// quarter, 3 s, is longer than even a busy machine stalls.
const SHORT_LEASE: [(&str, &str); 2] = [
    ("POSTRIDER_WAL_SENDER_TIMEOUT_S", "12"),
    // Much longer than the 400 ms that answers take in some tests, so that no attempt times out.
    ("POSTRIDER_PUBLISH_TIMEOUT_S", "2"),
];
const LEASE: Duration = Duration::from_secs(12);

/// The longest time that the takeover of a free slot may take. A standby checks the slot twice a
/// second, but the machine may be busy.
const LEEWAY: Duration = Duration::from_secs(5);

/// The settings for a short lease, and `more`.
fn with<'a>(more: &[(&'a str, &'a str)]) -> Vec<(&'a str, &'a str)> {
    [&SHORT_LEASE[..], more].concat()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_standby_names_the_holder_in_its_log_and_on_its_port() {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    let first = Relay::start(&database, &emulator);
    first.wait_for_log("streaming").await;
    let pid = database
        .number("SELECT active_pid::bigint FROM pg_replication_slots WHERE active")
        .await;
    let (addr, host) = (free_addr(), emulator.addr().to_string());
    let second = Relay::start_with(&database, &host, &[("POSTRIDER_HTTP_ADDR", &addr)]);
    let holder = format!("held by server process {pid}, application postrider");
    second.wait_for_log(&holder).await;
    second.wait_for_log("standby for ").await;
    let (code, ready) = get(&addr, "/readyz").await.unwrap();
    assert!(code == 200 && ready.contains(&holder), "{code} {ready}");
    let (_, status) = get(&addr, "/status").await.unwrap();
    let status: serde_json::Value = serde_json::from_str(&status).unwrap();
    assert_eq!(status["state"], "standby");
    assert!(
        status["holder"]
            .as_str()
            .unwrap()
            .contains(&pid.to_string())
    );
    assert_eq!(metric(&addr, "postrider_holds_slot").await, Some(0.0));
}

/// The first relay must remove its gauges of the slot. Otherwise they would cause alerts, although the second relay
/// holds the slot and works.
#[tokio::test(flavor = "multi_thread")]
async fn a_relay_that_lost_the_slot_to_its_standby_no_longer_shows_slot_metrics() {
    const OF_THE_SLOT: [&str; 4] = [
        "postrider_slot_retained_bytes",
        "postrider_publication_ok",
        "postrider_blocked_keys",
        "postrider_lag_seconds",
    ];
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    let (proxy, url) = proxied(&database).await;
    let (addr, host) = (free_addr(), emulator.addr().to_string());
    let settings = [("POSTRIDER_HTTP_ADDR", &*addr), ("DATABASE_URL", &*url)];
    let first = Relay::start_with(&database, &host, &settings);
    for name in OF_THE_SLOT {
        eventually(name, || metric(&addr, name)).await;
    }
    let second = Relay::start(&database, &emulator);
    second.wait_for_log("standby for ").await;
    proxy.refuse();
    proxy.cut(Cut::Reset);
    second.wait_for_log("streaming").await;
    proxy.heal();
    first.wait_for_log("standby for ").await;
    for name in OF_THE_SLOT {
        assert_eq!(metric(&addr, name).await, None, "{name}\n{}", first.log());
    }
    assert_eq!(metric(&addr, "postrider_holds_slot").await, Some(0.0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rolling_deploy_under_load_loses_and_repeats_nothing_and_takes_over_in_seconds() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let mut current = Relay::start(&database, &emulator);
    current.wait_for_log("streaming").await;
    let load = Load::start(&database);
    let mut took = Vec::new();
    for _ in 0..3 {
        wait_for_more(&database, 200).await;
        let next = Relay::start(&database, &emulator);
        next.wait_for_log("standby").await;
        current.stop().await;
        let stopped = Instant::now();
        next.wait_for_log("streaming").await;
        took.push(stopped.elapsed());
        current = next;
    }
    // Ignore the slowest takeover, because the machine may stall once.
    took.sort();
    assert!(took[1] < LEEWAY, "{took:?}");
    wait_for_more(&database, 200).await;
    load.stop().await;
    database.wait_until_recorded().await;
    database.wait_until_confirmed().await;
    let report = harness::check_streamed(&database, &emulator).await;
    assert!(
        report.is_clean() && report.duplicates.is_empty(),
        "{report}\n{}",
        current.log()
    );
}

/// The start time of the walsender that holds the slot now, on the journal's clock.
async fn session_began(database: &Database, emulator: &RunningEmulator) -> Duration {
    let row = database
        .client
        .query_one(
            "SELECT extract(epoch FROM clock_timestamp() - backend_start)::float8 \
             FROM pg_stat_replication",
            &[],
        )
        .await
        .unwrap();
    let age: f64 = row.get(0);
    emulator.journal().now() - Duration::from_secs_f64(age)
}

/// Inserts 80 MB. A relay that publishes nothing cannot take all of this from PostgreSQL, not even with the help of
/// the system's socket buffers. They usually hold up to 32 MiB on each side of a proxy.
pub(crate) async fn insert_much(database: &Database) {
    database
        .execute(
            "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, version, payload) \
             SELECT 'order', 'o-' || i % 50, 'OrderPlaced', i, \
                    jsonb_build_object('filler', repeat(md5(i::text), 30)) \
             FROM generate_series(1, 70000) i",
        )
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_standby_that_finds_the_publication_altered_at_takeover_waits() {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    let first = Relay::start(&database, &emulator);
    insert_orders(&database, 20, 5).await;
    database.wait_until_recorded().await;
    let second = Relay::start(&database, &emulator);
    second.wait_for_log("standby").await;
    database
        .execute("ALTER PUBLICATION postrider DROP TABLE outbox.events")
        .await;
    first.stop().await;
    second.wait_for_log("publication-drift").await;
    second.wait_for_log("; retrying in").await;
    database
        .execute("ALTER PUBLICATION postrider ADD TABLE outbox.events")
        .await;
    second.wait_for_log("streaming").await;
    insert_orders(&database, 20, 5).await;
    database.wait_until_recorded().await;
    let report = harness::check(&database, &emulator).await;
    assert!(
        report.is_clean() && report.duplicates.is_empty(),
        "{report}"
    );
    second.stop().await;
}

/// The first relay must not recover a slot that the second relay has already replaced.
///
/// PostgreSQL cannot decode past a row that was inserted while the publication did not exist, so the stream of the
/// first relay ends. While the first relay still waits for an answer of Pub/Sub, the second relay gets the slot and
/// recovers.
#[tokio::test(flavor = "multi_thread")]
async fn a_stuck_slot_that_another_relay_already_replaced_is_not_recovered_again() {
    let database = Database::private().await;
    let version = "SELECT current_setting('server_version_num')::bigint";
    if database.number(version).await >= 180_000 {
        eprintln!("SKIPPED: PostgreSQL 18 skips such a row");
        return;
    }
    let emulator = harness::emulator().await;
    let first = Relay::start(&database, &emulator);
    first.wait_for_log("streaming").await;
    let second = Relay::start(&database, &emulator);
    second.wait_for_log("standby").await;
    let late = Fault::new(Action::Delay(Duration::from_secs(9)));
    emulator.faults().inject(late.times(1));
    insert_orders(&database, 1, 1).await;
    eventually("a request of the first relay is in flight", || async {
        (emulator.journal().counts().attempts == 1).then_some(())
    })
    .await;
    database.execute("DROP PUBLICATION postrider").await;
    insert_orders(&database, 1, 1).await;
    database
        .execute(
            "CREATE PUBLICATION postrider FOR TABLE outbox.events \
             WITH (publish = 'insert', publish_via_partition_root = true)",
        )
        .await;
    second.wait_for_log("recovered: every row").await;
    assert!(
        !first.log().contains("closing the session"),
        "the second relay recovered too late to show anything:\n{}",
        first.log()
    );
    first.wait_for_log("standby for").await;
    let marked = "SELECT count(*) FROM outbox.relay WHERE recovering IS NOT NULL";
    assert_eq!(database.number(marked).await, 0, "{}", first.log());
    insert_orders(&database, 20, 5).await;
    database.wait_until_recorded().await;
    second.stop().await;
    first.wait_for_log("streaming").await;
    assert!(!first.log().contains("recovering:"), "{}", first.log());
}
