//! Tests of one relay in several states, one after the other. All views must name the same state, and the
//! views of a relay that catches up must say when it will have caught up.

use std::time::Duration;

use pubsub_emulator::{Action, Fault};
use serde_json::Value;
use tonic::Code;

use super::desk::Desk;
use super::sight::{Expected, Sight};
use crate::harness::{Relay, connect, eventually};
use crate::http::{free_addr, get, metric};

/// Delay of each answer of Pub/Sub, so that a backlog lasts for a while.
const SLOW: Action = Action::Delay(Duration::from_secs(2));

/// The expected views of a relay that delivers, but late.
const fn delivers(state: &'static str) -> Expected {
    Expected {
        status: (state, 0),
        slot: (state, 0),
        port: Some(state),
        says: &[],
        quarantined: None,
        ..Expected::HEALTHY
    }
}

/// Commits `thousands` transactions of 1,000 events, all of one key. A relay sends these events in
/// `thousands` requests, one after the other.
async fn write_backlog(desk: &Desk, thousands: u32) {
    let insert = format!(
        "DO $$ BEGIN FOR i IN 1..{thousands} LOOP \
         INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, version, payload) \
         SELECT 'order', 'o-1', 'OrderPlaced', n, jsonb_build_object('x', repeat('x', 1000)) \
         FROM generate_series(1, 1000) n; COMMIT; END LOOP; END $$"
    );
    desk.database.execute(&insert).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn all_views_name_the_same_state() {
    let mut desk = Desk::new().await;
    let faults = desk.emulator.faults();

    let missing = faults.inject(Fault::new(Action::Fail(Code::NotFound)).on_topic("order.events"));
    desk.write_events().await;
    let blocked = Expected {
        ready: Some(503),
        code: Some("topic-missing"),
        says: &["BLOCKED ON PUBSUB for "],
        status: ("blocked-on-pubsub", 1),
        slot: ("blocked-on-pubsub", 1),
        ..delivers("blocked-on-pubsub")
    };
    desk.sees(blocked).await;
    faults.lift(missing);
    desk.sees_all_delivered().await;
    standby_says_so(&desk).await;

    desk.kill();
    desk.write_events().await;
    desk.sees(Expected::DOWN).await;

    write_backlog(&desk, 40).await;
    let slow = faults.inject(Fault::new(SLOW));
    desk.start();
    let catching_up = Expected {
        says: &["CATCHING UP: ", "caught up    in about "],
        ..delivers("catching-up")
    };
    let sight = desk.sees(catching_up).await;
    assert_eq!(unknown_estimates(&sight), Vec::<&str>::new(), "{sight}");
    faults.lift(slow);
    desk.sees_all_delivered().await;

    desk.kill();
    let slot = desk.database.slot().to_owned();
    let drop = format!("SELECT pg_drop_replication_slot('{slot}')");
    eventually("the slot is dropped", || async {
        desk.database.client.batch_execute(&drop).await.ok()
    })
    .await;
    desk.sees(Expected {
        status: ("missing", 3),
        slot: ("missing", 3),
        ..Expected::DOWN
    })
    .await;
    write_backlog(&desk, 30).await;
    let slow = faults.inject(Fault::new(SLOW));
    desk.start();
    desk.sees(delivers("recovering")).await;
    faults.lift(slow);
    desk.sees_all_delivered().await;
}

/// While the relay delivers one transaction, the confirmed position does not move. So the estimate has to come from
/// the number of events that are left.
#[tokio::test(flavor = "multi_thread")]
async fn the_views_estimate_the_time_left_even_for_one_large_transaction() {
    let mut desk = Desk::new().await;
    desk.kill();
    let insert = "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, version, payload) \
                  SELECT 'order', 'o-1', 'OrderPlaced', n, jsonb_build_object('x', repeat('x', 1000)) \
                  FROM generate_series(1, 40000) n";
    desk.database.execute(insert).await;
    let confirmed = "SELECT confirmed_flush_lsn - '0/0' > 0 AND confirmed_flush_lsn < pg_current_wal_lsn() - 40000000 \
                     FROM pg_replication_slots WHERE slot_name = current_setting('test.slot')";
    let slot = format!("SET test.slot = '{}'", desk.database.slot());
    desk.database.execute(&slot).await;
    let slow = desk.emulator.faults().inject(Fault::new(SLOW));
    desk.start();
    let catching_up = Expected {
        says: &["CATCHING UP: ", "caught up    in about "],
        ..delivers("catching-up")
    };
    let sight = desk.sees(catching_up).await;
    assert_eq!(unknown_estimates(&sight), Vec::<&str>::new(), "{sight}");
    let row = desk
        .database
        .client
        .query_one(confirmed, &[])
        .await
        .unwrap();
    assert!(
        row.get::<_, bool>(0),
        "the transaction is not confirmed yet"
    );
    desk.emulator.faults().lift(slow);
    desk.sees_all_delivered().await;
}

/// Lists the views that do not say when the relay will have caught up.
fn unknown_estimates(sight: &Sight) -> Vec<&'static str> {
    const FIELD: &str = "caught_up_in_seconds";
    let port = sight.port.as_ref().unwrap_or(&Value::Null);
    let ready = sight.ready.as_ref().map_or("", |(_, body)| body);
    let metrics = sight.metrics.as_deref().unwrap_or_default();
    let page = sight.page.as_ref().unwrap_or(&Value::Null);
    let known = [
        ("status", sight.status.screen.contains("in about ")),
        ("status --json", sight.status.json[FIELD].is_f64()),
        ("slot show", sight.slot.screen.contains("in about ")),
        ("slot show --json", sight.slot.json[FIELD].is_f64()),
        ("/status", port[FIELD].is_f64()),
        ("/readyz", ready.contains("caught up in about ")),
        (
            "/metrics",
            metrics.contains("postrider_caught_up_in_seconds{"),
        ),
        ("the page", page[FIELD].is_f64()),
    ];
    let unknown = known.into_iter().filter(|(_, is_known)| !is_known);
    unknown.map(|(view, _)| view).collect()
}

/// Checks that the port of a second relay says that it is a standby. The commands show the slot,
/// and the relay that holds it.
async fn standby_says_so(desk: &Desk) {
    let addr = free_addr();
    let settings = [("POSTRIDER_HTTP_ADDR", addr.as_str())];
    let _second = Relay::start_with(&desk.database, &desk.pubsub, &settings);
    let ready = eventually("the second relay is a standby", || async {
        let (code, body) = get(&addr, "/readyz").await?;
        (code == 200 && body.starts_with("standby")).then_some(body)
    })
    .await;
    assert!(ready.contains("the slot is held by"), "{ready}");
    let (_, status) = get(&addr, "/status").await.unwrap();
    let status: Value = serde_json::from_str(&status).unwrap();
    assert_eq!(status["state"], "standby");
    let shown = metric(&addr, "postrider_condition kind=\"standby\"").await;
    assert_eq!(shown, Some(1.0));
    let page = Desk::page(&addr).await.unwrap();
    assert_eq!(page["state"], "standby");
    desk.sees(Expected::HEALTHY).await;
}

/// A transaction that stays open keeps WAL, so a relay that delivers everything still comes near the limit
/// of its slot.
#[tokio::test(flavor = "multi_thread")]
async fn a_slot_near_a_small_limit_is_a_warning_in_all_views() {
    let mut desk = Desk::on(super::slot::impatient("20MB", "1GB").await).await;
    let other = connect(&desk.database.url).await;
    let begin = "BEGIN; CREATE TABLE public.report ()";
    other.batch_execute(begin).await.unwrap();
    let left = "SELECT safe_wal_size FROM pg_replication_slots";
    while desk.database.number(left).await > 4_500_000 {
        let filler = "SELECT pg_logical_emit_message(false, 'filler', repeat('x', 300000))";
        desk.database.execute(filler).await;
    }
    let nearly_full = Expected {
        status: ("nearly-full", 1),
        slot: ("nearly-full", 1),
        says: &[
            "NEARLY FULL: ",
            "less than a quarter",
            "max_slot_wal_keep_size",
        ],
        ..delivers("nearly-full")
    };
    desk.sees(nearly_full).await;
    desk.kill();
    let down = Expected {
        says: &["no relay reads it: nothing is delivered", "start the relay"],
        port: None,
        ready: None,
        ..nearly_full
    };
    desk.sees(down).await;
    while desk.database.number(left).await > 1_500_000 {
        let filler = "SELECT pg_logical_emit_message(false, 'filler', repeat('x', 300000))";
        desk.database.execute(filler).await;
    }
    let nearly_lost = Expected {
        status: ("nearly-full", 2),
        slot: ("nearly-full", 2),
        says: &["less than a tenth"],
        ..down
    };
    desk.sees(nearly_lost).await;
    other.batch_execute("ROLLBACK").await.unwrap();
    desk.start();
    desk.sees_all_delivered().await;
}
