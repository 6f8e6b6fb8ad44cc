//! Tests that rows of a gap do not wait for events of a topic that is missing.

use super::{IN, OUT, assert_everything_arrives, insert_gap};
use crate::harness::{self, Database, Relay, eventually, insert_orders, postrider};
use crate::http::{free_addr, get};

const LATE_TOPIC: &str = "projects/demo/topics/late.events";

/// Inserts rows whose topic is missing, all with the same key.
async fn insert_late(database: &Database, rows: u32) {
    database
        .execute(&format!(
            "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, version, payload, occurred_at) \
             SELECT 'late', 'l', 'OrderPlaced', n, '{{}}', clock_timestamp() FROM generate_series(1, {rows}) n"
        ))
        .await;
}

/// Waits until every row of the topic `order.events` has a record, and checks that no row of `late.events` has one.
async fn wait_for_orders(database: &Database) {
    let unrecorded = |topic: &str| {
        format!(
            "SELECT count(*) FROM outbox.events e WHERE aggregatetype = '{topic}' \
             AND NOT EXISTS (SELECT FROM outbox.dispatch d WHERE d.event_id = e.id)"
        )
    };
    eventually("every order is recorded", || async {
        (database.number(&unrecorded("order")).await == 0).then_some(())
    })
    .await;
    let late = "SELECT count(*) FROM outbox.events WHERE aggregatetype = 'late'";
    assert_eq!(
        database.number(&unrecorded("late")).await,
        database.number(late).await
    );
}

async fn gap(database: &Database, late: u32) {
    database.execute(OUT).await;
    insert_gap(database, 20).await;
    insert_late(database, late).await;
    database.execute(IN).await;
    insert_orders(database, 20, 5).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_of_gaps_are_published_while_events_of_another_topic_wait() {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    let relay = Relay::start(&database, &emulator);
    insert_orders(&database, 10, 5).await;
    database.wait_until_audited().await;
    insert_late(&database, 3).await;
    gap(&database, 0).await;
    wait_for_orders(&database).await;
    // The rows of this gap whose topic is missing must not hold up the next gap.
    gap(&database, 2).await;
    wait_for_orders(&database).await;
    gap(&database, 1).await;
    wait_for_orders(&database).await;
    relay.stop().await;
    // The events of the missing topic have held back the confirmed position. So the stream of the new relay begins at
    // the first of these events, and contains all later events again.
    let relay = Relay::start(&database, &emulator);
    gap(&database, 0).await;
    wait_for_orders(&database).await;
    emulator.create_topic(LATE_TOPIC).await.unwrap();
    assert_everything_arrives(&database, &emulator, &relay).await;
    let audited = "SELECT count(*) FROM outbox.relay WHERE audited_publication <> '' AND audited_at > \
                   (SELECT max(occurred_at) FROM outbox.events)";
    eventually("the gaps are closed", || async {
        (database.number(audited).await == 1).then_some(())
    })
    .await;
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_views_do_not_claim_more_than_they_know_about_a_gap() {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    let addr = free_addr();
    // The events that wait use up this budget, so the relay reads neither the stream nor the tables.
    let environment = [
        ("POSTRIDER_HTTP_ADDR", addr.as_str()),
        ("POSTRIDER_IN_FLIGHT_MIB", "8"),
    ];
    let relay = Relay::start_with(&database, &emulator.addr().to_string(), &environment);
    insert_orders(&database, 10, 5).await;
    database.wait_until_audited().await;
    database
        .execute(
            "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, version, payload) \
             SELECT 'late', 'l', 'OrderPlaced', n, to_jsonb(repeat('x', 1000000)) FROM generate_series(1, 20) n",
        )
        .await;
    relay.wait_for_log("topic-missing").await;
    gap(&database, 0).await;
    relay.wait_for_log("an audit of the tables follows").await;
    eventually("the status says that rows may be missing", || async {
        let (_, status) = get(&addr, "/status").await?;
        let status: serde_json::Value = serde_json::from_str(&status).ok()?;
        (status["state"] == "blocked-on-pubsub" && status["unchecked"] == "gap").then_some(())
    })
    .await;
    let (_, metrics) = get(&addr, "/metrics").await.unwrap();
    assert!(!metrics.contains("postrider_audit_failing{"), "{metrics}");
    let log = relay.log();
    assert!(!log.contains("comparing the tables"), "{log}");
    let arguments = [("DATABASE_URL", database.url.as_str())];
    for (command, expected) in [
        (
            "status",
            "has not published the rows that the stream may have left out",
        ),
        ("audit", "nobody knows whether the stream has left out any"),
    ] {
        // `status` learns of the gap from the relay's row, a few seconds later than the HTTP port.
        eventually(expected, || async {
            let ran = postrider(&[command], &arguments).output().unwrap();
            let shown = String::from_utf8(ran.stdout).unwrap();
            let shown = shown.split_whitespace().collect::<Vec<_>>().join(" ");
            assert!(!shown.contains("Nothing is missing"), "{shown}");
            shown.contains(expected).then_some(())
        })
        .await;
    }
    emulator.create_topic(LATE_TOPIC).await.unwrap();
    relay.wait_for_log("comparing the tables").await;
    database.wait_until_recorded().await;
    eventually("an audit has succeeded", || async {
        let (_, metrics) = get(&addr, "/metrics").await?;
        metrics
            .contains("postrider_audit_failing{slot=\"postrider\"} 0")
            .then_some(())
    })
    .await;
    relay.stop().await;
}
