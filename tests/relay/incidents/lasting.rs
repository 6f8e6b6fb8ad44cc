//! Tests what the views say about an incident that lasts: how long it has lasted, the age of the oldest
//! event, and which further rows have to wait.

use std::time::{Duration, Instant};

use serde_json::Value;

use super::desk::Desk;
use crate::harness::{self, Database, Relay, eventually, postrider};

/// Inserts one event whose topic does not exist. It happened `ago`, an SQL interval.
async fn insert_gone(desk: &Desk, ago: &str) {
    let insert = format!(
        "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, occurred_at) \
         VALUES ('gone', 'g-1', 'E', now() - interval '{ago}')"
    );
    desk.database.execute(&insert).await;
}

fn status(desk: &Desk) -> Value {
    let shown = desk.run(&["status", "--json"]);
    serde_json::from_slice(&shown.stdout).unwrap_or_default()
}

/// Waits until `postrider status` prints this text.
async fn status_says(desk: &Desk, text: &str) {
    eventually(&format!("status says {text:?}"), || async {
        let shown = String::from_utf8(desk.run(&["status"]).stdout).unwrap();
        shown.contains(text).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_that_stops_at_the_same_event_again_and_again_says_since_when() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    database
        .execute(
            "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type) \
             VALUES ('order', repeat('k', 2000), 'E')",
        )
        .await;
    let pubsub = emulator.addr().to_string();
    let stops = || async {
        let halt = [("POSTRIDER_ON_BAD_EVENT", "halt")];
        let relay = Relay::start_with(&database, &pubsub, &halt);
        assert_eq!(relay.wait().await.code(), Some(5));
    };
    stops().await;
    let first = Instant::now();
    while first.elapsed() < Duration::from_secs(6) {
        stops().await;
    }
    // Each relay reads from `outbox.relay` how long the error has lasted, and writes the new duration when it stops.
    // Each write takes a moment, and this moment is missing from the duration. So `status` shows a little less than
    // the time since the first stop. Require only half of this time.
    let least = first.elapsed() / 2;
    let environment = [
        ("DATABASE_URL", database.url.as_str()),
        ("POSTRIDER_SLOT", database.slot()),
    ];
    let shown = postrider(&["status", "--json"], &environment).output();
    let shown: Value = serde_json::from_slice(&shown.unwrap().stdout).unwrap();
    assert_eq!(shown["state"], "broken", "{shown}");
    let lasts = shown["condition"]["for_seconds"].as_f64().unwrap();
    assert!(lasts >= least.as_secs_f64(), "{least:?}: {shown}");
}

/// The views use the time of the commit, which the relay knows. They do not use `occurred_at`, because a service
/// may write any value into this column.
#[tokio::test(flavor = "multi_thread")]
async fn all_views_measure_the_age_of_an_event_from_its_commit() {
    let desk = Desk::new().await;
    insert_gone(&desk, "2 hours").await;
    let shown = eventually("the condition names the topic", || async {
        let shown = status(&desk);
        let topic = &shown["condition"]["topics"][0];
        topic["oldest_seconds"].is_f64().then_some(shown)
    })
    .await;
    assert_eq!(shown["slot"]["lag_seconds_by"], "commit", "{shown}");
    let lag = shown["slot"]["lag_seconds"].as_f64().unwrap();
    let oldest = &shown["condition"]["topics"][0]["oldest_seconds"];
    assert!((lag - oldest.as_f64().unwrap()).abs() < 60.0, "{shown}");
}

/// A recovery waits for a topic. Rows that the stream has missed must wait too, because an audit publishes
/// them, and no audit runs before the recovery has ended. The screens must say so.
#[tokio::test(flavor = "multi_thread")]
async fn the_screens_say_what_waits_for_a_recovery_that_waits_for_a_topic() {
    let desk = Desk::new().await;
    insert_gone(&desk, "0").await;
    status_says(&desk, "BLOCKED ON PUBSUB").await;
    let asked = desk.run(&["recover", "--yes"]);
    assert!(asked.status.success(), "{asked:?}");
    let waits = "it can end only after the failing topics accept their events. Until then no audit runs, so rows \
                 that the stream has missed wait too";
    status_says(&desk, waits).await;
    let slot = String::from_utf8(desk.run(&["slot", "show"]).stdout).unwrap();
    assert!(slot.contains(waits), "{slot}");
    let id = "SELECT id::text FROM outbox.events WHERE aggregatetype = 'gone'";
    let id: String = desk
        .database
        .client
        .query_one(id, &[])
        .await
        .unwrap()
        .get(0);
    let event = String::from_utf8(desk.run(&["event", &id]).stdout).unwrap();
    assert!(event.contains("A recovery is due or running"), "{event}");
    let topic = "projects/demo/topics/gone.events";
    desk.emulator.create_topic(topic).await.unwrap();
    desk.sees_all_delivered().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_publication_is_named_beside_a_missing_topic() {
    let desk = Desk::new().await;
    insert_gone(&desk, "0").await;
    status_says(&desk, "BLOCKED ON PUBSUB").await;
    let table = "ALTER PUBLICATION postrider DROP TABLE outbox.events";
    desk.database.execute(table).await;
    status_says(&desk, "; and rows are not streamed: ").await;
    status_says(&desk, "alter publication postrider add table").await;
    assert_eq!(status(&desk)["severity"], "error");
    assert_eq!(status(&desk)["state"], "blocked-on-pubsub");
    let table = table.replace("DROP", "ADD");
    desk.database.execute(&table).await;
    let topic = "projects/demo/topics/gone.events";
    desk.emulator.create_topic(topic).await.unwrap();
    desk.sees_all_delivered().await;
}
