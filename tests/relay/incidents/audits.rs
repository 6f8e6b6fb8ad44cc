//! Incidents in which the auditor fails: a script has switched on row-level security for the captured table, which
//! hides rows from the role of the relay.

use super::desk::Desk;
use super::sight::{Expected, Sight};
use crate::harness::{self, Database, Relay, eventually, insert_orders};
use crate::privileges::login_role;

const HIDE: &str = "ALTER TABLE outbox.events ENABLE ROW LEVEL SECURITY";
const SHOW: &str = "ALTER TABLE outbox.events DISABLE ROW LEVEL SECURITY";

/// A desk whose relay logs in as the role that the migrations create. The relay has not been started.
async fn with_a_role() -> Desk {
    let database = Database::private().await;
    let url = login_role(&database).await;
    let emulator = harness::emulator().await;
    let pubsub = emulator.addr().to_string();
    let mut desk = Desk::prepared(database, emulator, pubsub);
    desk.relay_url = url;
    desk
}

const fn fails(says: &'static [&'static str]) -> Expected {
    Expected {
        status: ("streaming", 1),
        slot: ("streaming", 1),
        code: Some("privilege-missing"),
        says,
        log: &["cannot compare the tables with outbox.dispatch"],
        ..Expected::HEALTHY
    }
}

/// Checks that `/status`, the page, `/metrics` and `outbox.relay` say that audits fail. `unchecked` names
/// what the relay could not check, and `meaning` is the text for the operator.
async fn assert_named(desk: &Desk, sight: &Sight, unchecked: &str, meaning: &str) {
    let port = sight.port.as_ref().unwrap();
    assert_eq!(
        (&port["severity"], &port["unchecked"]),
        (&"warning".into(), &unchecked.into()),
        "{sight}"
    );
    for what in [&port["what"], &sight.page.as_ref().unwrap()["meaning"]] {
        assert!(what.as_str().unwrap().contains(meaning), "{sight}");
    }
    assert!(port["for_seconds"].as_f64().unwrap() >= 10.0, "{sight}");
    assert!(
        port["hint"].as_str().unwrap().contains("BYPASSRLS"),
        "{sight}"
    );
    let metrics = sight.metrics.as_ref().unwrap();
    assert!(
        metrics.contains("postrider_audit_failing{slot=\"postrider\"} 1"),
        "{sight}"
    );
    let written = "SELECT condition::jsonb ->> 'unchecked' FROM outbox.relay";
    assert_eq!(desk.database.text(written).await, unchecked);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_audit_of_a_gap_fails() {
    let mut desk = with_a_role().await;
    desk.begin().await;
    desk.database.wait_until_audited().await;
    desk.database.execute(HIDE).await;
    let out = "ALTER PUBLICATION postrider DROP TABLE outbox.events";
    desk.database.execute(out).await;
    insert_orders(&desk.database, 2, 1).await;
    let back = "ALTER PUBLICATION postrider ADD TABLE outbox.events";
    desk.database.execute(back).await;
    let meaning = "has not published the rows that the stream may have left out, because no audit has succeeded";
    let says = &[
        "STREAMING: events are published as they are committed; but for ",
        "has not published the rows that the stream may have left out",
        "BYPASSRLS",
    ];
    let sight = desk.sees(fails(says)).await;
    assert_named(&desk, &sight, "gap", meaning).await;
    assert_eq!(
        sight.port.as_ref().unwrap()["lag_seconds"],
        serde_json::Value::Null,
        "the relay does not know the age of a row that it does not see: {sight}"
    );
    desk.database.execute(SHOW).await;
    let sight = desk.sees_all_delivered().await;
    let metrics = sight.metrics.as_ref().unwrap();
    assert!(
        metrics.contains("postrider_audit_failing{slot=\"postrider\"} 0"),
        "{sight}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn audits_fail_but_nothing_suggests_a_gap() {
    let mut desk = with_a_role().await;
    desk.database.execute(HIDE).await;
    desk.start();
    insert_orders(&desk.database, 10, 5).await;
    let says = &[
        "could not look for rows that the stream leaves out",
        "BYPASSRLS",
    ];
    let sight = desk.sees(fails(says)).await;
    let meaning = "could not look for rows that the stream leaves out";
    assert_named(&desk, &sight, "tables", meaning).await;
    desk.database.execute(SHOW).await;
    desk.sees_all_delivered().await;
}

/// A single audit may fail, for example because of a short lock. No view changes because of it.
#[tokio::test(flavor = "multi_thread")]
async fn one_failed_audit_is_only_a_line_of_the_log() {
    let mut desk = with_a_role().await;
    desk.database.execute(HIDE).await;
    desk.start();
    let relay: &Relay = desk.relay.as_ref().unwrap();
    relay
        .wait_for_log("cannot compare the tables with outbox.dispatch")
        .await;
    desk.database.execute(SHOW).await;
    let audited = |sight: &Sight| {
        let metrics = sight.metrics.as_deref().unwrap_or_default();
        metrics.contains("postrider_audit_failing{slot=\"postrider\"} 0")
    };
    let desk = &desk;
    eventually("an audit has succeeded", || async {
        let sight = desk.read_all_views().await;
        let port = sight.port.as_ref();
        let unchecked = port.map(|port| &port["unchecked"]);
        assert!(unchecked.is_none_or(serde_json::Value::is_null), "{sight}");
        audited(&sight).then_some(())
    })
    .await;
    desk.sees(Expected::HEALTHY).await;
}
