//! Tests that `check`, `recover --dry-run` and `run` agree on whether and why the relay recovers.

use serde_json::Value;

use super::*;
use crate::harness::postrider;

const EXCEPTIONS: &[(&str, &str)] = &[("POSTRIDER_DISPATCH", "exceptions")];

/// Drops the slot, and creates a new one of the same name at the end of the WAL.
const RECREATE: &str = "SELECT pg_drop_replication_slot('SLOT'); \
                        INSERT INTO outbox.events (aggregatetype, event_type, payload) \
                        VALUES ('order', 'OrderPlaced', '{}'); \
                        SELECT pg_create_logical_replication_slot('SLOT', 'pgoutput')";

/// The server's WAL ends before the position that the relay has recorded.
const AHEAD: &str = "UPDATE outbox.relay SET confirmed_lsn = pg_current_wal_lsn() + 1000000000, \
                         confirmed_is_final = FINAL";

/// A situation of a stopped relay: the statements that cause it, the relay's settings, and the reason for which the
/// relay recovers (`None` if it simply streams).
type Case = (
    &'static str,
    &'static [(&'static str, &'static str)],
    Option<&'static str>,
);

const CASES: &[Case] = &[
    ("SELECT 1", &[], None),
    ("SELECT 1", EXCEPTIONS, None),
    (
        "SELECT pg_drop_replication_slot('SLOT')",
        &[],
        Some("slot-missing"),
    ),
    (RECREATE, &[], Some("slot-recreated")),
    (AHEAD, &[], Some("wal-missing")),
    (
        "UPDATE outbox.relay SET recovering = 'requested'",
        &[],
        Some("recovery-unfinished"),
    ),
    (
        "ALTER PUBLICATION postrider RENAME TO other; ALTER PUBLICATION other RENAME TO postrider",
        EXCEPTIONS,
        Some("publication-changed"),
    ),
    (
        "UPDATE outbox.relay SET timeline = 7",
        EXCEPTIONS,
        Some("slot-unproven"),
    ),
    ("UPDATE outbox.relay SET timeline = 7", &[], None),
    (
        "DELETE FROM outbox.relay; DELETE FROM outbox.capture",
        &[("POSTRIDER_START", "all")],
        Some("first-start"),
    ),
];

/// The reason according to `check`, and according to `recover --dry-run`.
fn forecasts(database: &Database, more: &[(&str, &str)]) -> (Option<String>, Option<String>) {
    let mut environment = vec![
        ("DATABASE_URL", database.url.as_str()),
        ("POSTRIDER_SLOT", database.slot()),
        ("PUBSUB_PROJECT_ID", "demo"),
    ];
    environment.extend(more);
    let json = |arguments: &[&str]| -> Value {
        let ran = postrider(arguments, &environment).output().unwrap();
        serde_json::from_slice(&ran.stdout).unwrap_or_else(|_| panic!("{ran:?}"))
    };
    let checked = json(&["check", "--json"]);
    let recovers = checked["run"]["recovers"].as_array().unwrap();
    assert!(recovers.len() < 2, "{checked}");
    let previewed = json(&["recover", "--dry-run", "--json"]);
    let text = |value: &Value| value.as_str().map(str::to_owned);
    (recovers.first().and_then(text), text(&previewed["why"]))
}

#[tokio::test(flavor = "multi_thread")]
async fn check_and_a_dry_run_name_the_reason_for_which_the_relay_then_recovers() {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    let host = emulator.addr().to_string();
    for (change, more, expected) in CASES {
        // First run a relay with the same settings. Then only `change` can be the reason for a recovery.
        let relay = Relay::start_with(&database, &host, more);
        relay.wait_for_log("streaming").await;
        wait_until_recovered(&database).await;
        let mode = if *more == EXCEPTIONS {
            "exceptions"
        } else {
            "full"
        };
        let kept = format!(
            "SELECT count(*) FROM outbox.relay WHERE audited_at > since AND dispatch = '{mode}'"
        );
        eventually("an audit of this session", || async {
            (database.number(&kept).await == 1).then_some(())
        })
        .await;
        database.wait_until_confirmed().await;
        relay.stop().await;
        for end in ["true", "false"]
            .iter()
            .take(if *change == AHEAD { 2 } else { 1 })
        {
            let change = change
                .replace("SLOT", database.slot())
                .replace("FINAL", end);
            for statement in change.split("; ") {
                database.execute(statement).await;
            }
            let expected = expected.map(str::to_owned);
            let said = forecasts(&database, more);
            assert_eq!(
                said,
                (expected.clone(), expected.clone()),
                "{change} {more:?}"
            );
            let relay = Relay::start_with(&database, &host, more);
            relay.wait_for_log("streaming").await;
            let log = relay.log();
            match expected {
                Some(kind) => assert!(log.contains(&format!("kind=\"{kind}\"")), "{change}: {log}"),
                None => assert!(!log.contains("recover"), "{change}: {log}"),
            }
            wait_until_recovered(&database).await;
            // Once the relay runs, nothing is due.
            let running = forecasts(&database, more);
            assert_eq!(running, (None, None), "{change} {more:?}");
            relay.stop().await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_relay_that_was_killed_recovers_as_check_says_and_a_running_one_needs_nothing() {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    let host = emulator.addr().to_string();
    let relay = Relay::start_with(&database, &host, EXCEPTIONS);
    insert(&database, 1, 20).await;
    // Returns 1 if the slot is past the position that the relay has recorded. An idle relay lets the slot advance, but
    // records no new position.
    let unproven = "SELECT count(*) FROM outbox.relay r, pg_replication_slots s \
                    WHERE s.restart_lsn >= r.confirmed_lsn AND s.confirmed_flush_lsn > r.confirmed_lsn";
    eventually("the slot has left the recorded position behind", || async {
        let write = "SELECT pg_log_standby_snapshot()";
        if database.client.batch_execute(write).await.is_err() {
            database.execute("CHECKPOINT").await;
        }
        if database.number(unproven).await == 0 {
            return None;
        }
        // The relay records a position up to 5 s after a delivery.
        tokio::time::sleep(Duration::from_secs(6)).await;
        (database.number(unproven).await == 1).then_some(())
    })
    .await;
    assert_eq!(forecasts(&database, EXCEPTIONS), (None, None));
    relay.kill_9();
    harness::wait_until_killed_relays_are_gone(&database, &emulator).await;
    let due = Some("slot-unproven".to_owned());
    assert_eq!(forecasts(&database, EXCEPTIONS), (due.clone(), due));
    let relay = Relay::start_with(&database, &host, EXCEPTIONS);
    relay.wait_for_log("kind=\"slot-unproven\"").await;
}

/// Without the right to compute event ids, the relay can stream, but cannot recover.
#[tokio::test(flavor = "multi_thread")]
async fn check_says_that_a_due_recovery_would_stop_without_the_right_to_compute_event_ids() {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    let host = emulator.addr().to_string();
    let url = crate::privileges::login_role(&database).await;
    let as_role = [("DATABASE_URL", url.as_str())];
    let relay = Relay::start_with(&database, &host, &as_role);
    insert(&database, 1, 20).await;
    database.wait_until_confirmed().await;
    relay.stop().await;
    database
        .execute("REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA outbox FROM PUBLIC, postrider_relay")
        .await;
    let environment = [
        ("DATABASE_URL", url.as_str()),
        ("POSTRIDER_SLOT", database.slot()),
        ("PUBSUB_PROJECT_ID", "demo"),
        ("PUBSUB_EMULATOR_HOST", &host),
    ];
    let stops = || {
        let ran = postrider(&["check", "--json"], &environment)
            .output()
            .unwrap();
        let checked: Value = serde_json::from_slice(&ran.stdout).unwrap();
        let stops = checked["run"]["stops"].as_array().unwrap();
        stops.iter().any(|code| code == "privilege-missing")
    };
    assert!(!stops(), "the relay can stream");
    database.drop_slot().await;
    assert!(stops(), "the relay cannot recover");
    let relay = Relay::start_with(&database, &host, &as_role);
    relay.wait_for_error("privilege-missing").await;
    assert_eq!(relay.wait().await.code(), Some(3));
}
