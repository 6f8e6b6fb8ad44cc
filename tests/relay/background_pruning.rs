//! Tests of `prune_after`. The relay prunes automatically while events flow, and only while it holds the
//! slot. The relay deletes no row that is still needed, and errors of pruning do not affect delivery.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use pubsub_emulator::RunningEmulator;
use pubsub_emulator::checks::{self, Expected, Report, Stream};
use tokio::task::JoinHandle;

use crate::exceptions::{BAD, poison, stored};
use crate::harness::{self, Database, Relay, connect, eventually, insert_orders, postrider};
use crate::http::{free_addr, get, metric};
use crate::privileges::login_role;

const PRUNE_AFTER: (&str, &str) = ("POSTRIDER_PRUNE_AFTER", "1s");

/// A service that keeps inserting events, and copies their ids to `public.written`.
struct Service {
    stop: Arc<AtomicBool>,
    writing: JoinHandle<()>,
}

impl Service {
    async fn start(database: &Database) -> Self {
        database
            .execute("CREATE TABLE public.written (id uuid, aggregateid text, seq bigint)")
            .await;
        let client = connect(&database.url).await;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let writing = tokio::spawn(async move {
            while !stopped.load(Ordering::Relaxed) {
                client
                    .batch_execute(
                        "WITH new AS ( \
                             INSERT INTO outbox.events \
                                 (aggregatetype, aggregateid, event_type, payload) \
                             SELECT 'order', 'o-' || i % 7, 'OrderPlaced', '{}' \
                             FROM generate_series(1, 20) i RETURNING id, aggregateid, seq) \
                         INSERT INTO public.written SELECT * FROM new",
                    )
                    .await
                    .unwrap();
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        });
        Self { stop, writing }
    }

    async fn stop(self) {
        self.stop.store(true, Ordering::Relaxed);
        self.writing.await.unwrap();
    }
}

/// The events that the service has written, including those whose rows are already deleted.
pub(crate) async fn written(database: &Database) -> Expected {
    let rows = "SELECT id::text, aggregateid FROM public.written ORDER BY seq";
    let mut expected = BTreeMap::new();
    for row in database.client.query(rows, &[]).await.unwrap() {
        let key: String = row.get(1);
        let stream = Stream::new("projects/demo/topics/order.events".to_owned(), key);
        let ids: &mut Vec<String> = expected.entry(stream).or_default();
        ids.push(row.get(0));
    }
    expected
}

/// Waits until the relay has deleted the rows that were written so far (except the bad event's row) and the
/// records of the service's rows.
async fn wait_until_pruned(database: &Database) {
    let last = database.number("SELECT max(seq) FROM public.written").await;
    let left = format!(
        "SELECT (SELECT count(*) FROM outbox.events WHERE seq <= {last} AND id <> '{BAD}') \
              + (SELECT count(*) FROM outbox.dispatch d JOIN public.written w ON w.id = d.event_id \
                 WHERE w.seq <= {last})"
    );
    eventually("old rows and records are deleted", || async {
        // `prune` deletes only what lies below `restart_lsn`. A checkpoint writes the running transactions
        // to the WAL, which lets `restart_lsn` advance.
        database.execute("CHECKPOINT").await;
        tokio::time::sleep(Duration::from_millis(200)).await;
        (database.number(&left).await == 0).then_some(())
    })
    .await;
}

/// Runs a pruning relay while a service keeps writing. Restarts the relay several times and drops
/// the slot once. Returns a report that compares the journal with all written events.
async fn prune_while_events_flow(
    database: &Database,
    emulator: &RunningEmulator,
    dispatch: &str,
) -> Report {
    poison(emulator);
    let host = emulator.addr().to_string();
    let settings = [PRUNE_AFTER, ("POSTRIDER_DISPATCH", dispatch)];
    let run = || Relay::start_with(database, &host, &settings);
    let relay = run();
    relay.wait_for_log("streaming").await;
    let service = Service::start(database).await;
    database
        .execute(&format!(
            "INSERT INTO outbox.events (id, aggregatetype, aggregateid, event_type, payload) \
             VALUES ('{BAD}', 'order', 'bad', 'Bad', '{{}}')"
        ))
        .await;
    eventually("events flow", || async {
        (stored(emulator).len() > 500).then_some(())
    })
    .await;
    // Restart the relay: its first audit runs soon after the start and raises the floor. Without a
    // restart, pruning would wait for the next audit, up to five minutes later.
    relay.stop().await;
    let relay = run();
    wait_until_pruned(database).await;

    relay.stop().await;
    database.drop_slot().await;
    let before = database.number("SELECT count(*) FROM outbox.events").await;
    eventually("events wait for the recovery", || async {
        let rows = database.number("SELECT count(*) FROM outbox.events").await;
        (rows > before + 100).then_some(())
    })
    .await;
    let relay = run();
    wait_until_pruned(database).await;
    relay.stop().await;
    let relay = run();
    wait_until_pruned(database).await;
    service.stop().await;
    let count = database.number("SELECT count(*) FROM public.written").await;
    eventually("everything is stored", || async {
        (i64::try_from(stored(emulator).len()).unwrap() == count).then_some(())
    })
    .await;
    relay.stop().await;
    let bad = format!("SELECT count(*) FROM outbox.events WHERE id = '{BAD}'");
    assert_eq!(database.number(&bad).await, 1, "the bad event stays");
    checks::check(&emulator.journal().attempts(), &written(database).await)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_that_prunes_while_events_flow_loses_and_repeats_nothing() {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    let report = prune_while_events_flow(&database, &emulator, "full").await;
    assert!(report.is_clean(), "{report}");
    assert!(report.duplicates.is_empty(), "{report}");
}

#[tokio::test(flavor = "multi_thread")]
async fn without_records_a_relay_that_prunes_while_events_flow_loses_nothing() {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    let report = prune_while_events_flow(&database, &emulator, "exceptions").await;
    // Check that nothing is lost or out of order. Duplicates are allowed, because the recovery may repeat
    // events.
    assert!(report.is_clean(), "{report}");
}

/// Starts a pruning relay with the additional settings `more`.
fn start(database: &Database, emulator: &RunningEmulator, more: &[(&str, &str)]) -> Relay {
    let settings = [&[PRUNE_AFTER], more].concat();
    Relay::start_with(database, &emulator.addr().to_string(), &settings)
}

async fn outbox(database: &Database) -> i64 {
    database.number("SELECT count(*) FROM outbox.events").await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_right_to_delete_is_named_everywhere_and_delivery_goes_on() {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    let url = login_role(&database).await;
    let addr = free_addr();
    let environment = [
        ("DATABASE_URL", url.as_str()),
        ("POSTRIDER_HTTP_ADDR", &addr),
    ];
    let settings = [&environment[..], &[PRUNE_AFTER]].concat();
    let relay = start(&database, &emulator, &environment);
    let grant = "GRANT DELETE ON outbox.events, outbox.dispatch TO shop_relay";
    relay.wait_for_log("cannot prune, retrying in").await;
    relay.wait_for_log(grant).await;
    relay.wait_for_log("code=privilege-missing").await;
    insert_orders(&database, 100, 5).await;
    eventually("events are delivered", || async {
        (stored(&emulator).len() == 100).then_some(())
    })
    .await;
    assert_eq!(metric(&addr, "postrider_prune_failing").await, Some(1.0));
    let (_, status) = get(&addr, "/status").await.unwrap();
    let status: serde_json::Value = serde_json::from_str(&status).unwrap();
    assert_eq!(status["state"], "streaming", "{status:#}");
    assert_eq!(status["pruning"]["code"], "privilege-missing", "{status:#}");
    let checked = postrider(&["check", "--json"], &settings).output().unwrap();
    let checked: serde_json::Value = serde_json::from_slice(&checked.stdout).unwrap();
    let findings = checked["findings"].as_array().unwrap();
    let mut findings = findings.iter();
    let finding = findings.find(|finding| finding["code"] == "privilege-missing");
    let finding = finding.unwrap_or_else(|| panic!("{checked:#}"));
    assert_eq!(finding["severity"], "warning", "{finding:#}");
    assert!(finding["remedy"].as_str().unwrap().contains(grant));
    let shown = postrider(&["status"], &settings).output().unwrap();
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    assert!(
        shown.contains("(privilege-missing): role shop_relay needs"),
        "{shown}"
    );

    // Run `init` as the owner of the tables, who is allowed to grant the right to delete.
    let owner = [("DATABASE_URL", database.url.as_str()), PRUNE_AFTER];
    let init = postrider(&["init", "--apply"], &owner).output().unwrap();
    assert!(init.status.success(), "{init:?}");
    relay.stop().await;
    let relay = start(&database, &emulator, &environment);
    eventually("old rows are deleted", || async {
        (outbox(&database).await == 0).then_some(())
    })
    .await;
    eventually("the metrics count the deleted rows", || async {
        let failing = metric(&addr, "postrider_prune_failing").await;
        let pruned = metric(&addr, "postrider_rows_pruned_total kind=\"outbox\"").await;
        (failing == Some(0.0) && pruned.is_some_and(|rows| rows >= 100.0)).then_some(())
    })
    .await;
    let shown = postrider(&["status", "--json"], &settings)
        .output()
        .unwrap();
    let shown: serde_json::Value = serde_json::from_slice(&shown.stdout).unwrap();
    assert_eq!(
        shown["pruning"]["code"],
        serde_json::Value::Null,
        "{shown:#}"
    );
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn only_the_relay_that_holds_the_slot_prunes_and_its_successor_continues() {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    let ports = [free_addr(), free_addr()];
    let run = |port: usize| {
        start(
            &database,
            &emulator,
            &[("POSTRIDER_HTTP_ADDR", &ports[port])],
        )
    };
    let pruned = async |port: usize| {
        let rows = metric(&ports[port], "postrider_rows_pruned_total kind=\"outbox\"").await;
        rows.unwrap_or_default()
    };
    // The metric rises only after the rows are deleted, so wait for the metric.
    let has_pruned = async |port: usize, rows: f64| {
        eventually("the relay counts its deleted rows", async || {
            (pruned(port).await >= rows).then_some(())
        })
        .await;
        assert_eq!(pruned(port).await, rows);
    };
    // Deliver 100 rows with another relay. The first audit of the next relay raises the floor above
    // these rows, so the next relay can prune them.
    let first_start = Relay::start(&database, &emulator);
    insert_orders(&database, 100, 5).await;
    database.wait_until_recorded().await;
    first_start.stop().await;
    assert_eq!(outbox(&database).await, 100, "off by default");
    let first = run(0);
    first.wait_for_log("streaming").await;
    let second = run(1);
    second.wait_for_log("standby for ").await;
    eventually("the first relay deletes the old rows", || async {
        (outbox(&database).await == 0).then_some(())
    })
    .await;
    has_pruned(0, 100.0).await;
    insert_orders(&database, 50, 5).await;
    database.wait_until_recorded().await;
    assert_eq!(pruned(1).await, 0.0);
    let (_, status) = get(&ports[1], "/status").await.unwrap();
    let status: serde_json::Value = serde_json::from_str(&status).unwrap();
    assert_eq!(
        status["pruning"]["ended_seconds_ago"],
        serde_json::Value::Null
    );
    first.stop().await;
    eventually("the second relay deletes the later rows", || async {
        (outbox(&database).await == 0).then_some(())
    })
    .await;
    has_pruned(1, 50.0).await;
    second.stop().await;
}
