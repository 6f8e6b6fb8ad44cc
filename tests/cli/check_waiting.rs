//! Tests that `postrider check` examines the waiting events, which can block a relay. It must find them even in a
//! table with many more rows than the sample that it reads.

use pubsub_emulator::{Emulator, RunningEmulator};
use serde_json::json;

use crate::support::{Database, Ran, assert_contains};

/// Starts Pub/Sub with the topic of the delivered events.
async fn emulator() -> (RunningEmulator, String) {
    let builder = Emulator::builder().listen("127.0.0.1:0".parse().unwrap());
    let emulator = builder.start().await.unwrap();
    let host = emulator.addr().to_string();
    let topic = "projects/demo/topics/order.events";
    emulator.create_topic(topic).await.unwrap();
    (emulator, host)
}

async fn check(database: &Database, host: &str, more: &[(&str, &str)]) -> Ran {
    let env = [
        ("PUBSUB_EMULATOR_HOST", host),
        ("PUBSUB_PROJECT_ID", "demo"),
    ];
    let env = [&env[..], more].concat();
    database.run_with(&["check", "--json"], &env).await
}

/// Inserts events of the type `order`. Their ids are higher than those of [`insert`], so `check` reads them first.
async fn insert_orders(database: &Database, events: u32) {
    let insert = format!(
        "insert into outbox.events (id, aggregatetype, aggregateid, event_type) \
         select ('ffffffff-0000-4000-8000-' || lpad(i::text, 12, '0'))::uuid, 'order', 'o-1', 'Placed' \
         from generate_series(1, {events}) i"
    );
    database.execute(&insert).await;
}

/// Records all events as published.
async fn record(database: &Database) {
    let record = "insert into outbox.dispatch (commit_lsn, committed_at, ordinal, attempts, event_id, state) \
                  select '0/10', now(), seq, 1, id, 'published' from outbox.events";
    database.execute(record).await;
}

/// Inserts one event with the lowest id of all.
async fn insert(database: &Database, aggregate_type: &str, key: &str) {
    let insert = format!(
        "insert into outbox.events (id, aggregatetype, aggregateid, event_type) \
         values ('00000000-0000-4000-8000-000000000001', '{aggregate_type}', {key}, 'Placed')"
    );
    database.execute(&insert).await;
}

/// Writes this condition to `outbox.relay`, in which a relay reports its condition.
async fn condition(database: &Database, json: &serde_json::Value) {
    let written = format!(
        "insert into outbox.relay (slot, system_identifier, timeline, confirmed_lsn, instance, condition, \
             condition_at) \
         select '{}', system_identifier::text, 1, '0/1', 'test', '{json}', now() from pg_control_system()",
        database.name
    );
    database.execute(&written).await;
}

fn broken(code: &str, what: &str) -> serde_json::Value {
    json!({"state": "broken", "for_seconds": 1.0, "code": code, "what": what, "hint": "do this",
           "caught_up_in_seconds": null, "topics": [], "failing_topics": 0})
}

#[tokio::test]
async fn the_topic_of_a_waiting_event_is_looked_up_however_many_rows_are_newer() {
    let (_emulator, host) = emulator().await;
    let delivered = Database::initialised().await;
    insert_orders(&delivered, 1_500).await;
    record(&delivered).await;
    insert(&delivered, "gone", "'g-1'").await;
    let waiting = Database::initialised().await;
    insert_orders(&waiting, 1_500).await;
    insert(&waiting, "gone", "'g-1'").await;
    for database in [delivered, waiting] {
        let ran = check(&database, &host, &[]).await;
        ran.assert_status(2);
        let what = ran.finding("topic-missing")["what"].to_string();
        assert_contains(&what, "projects/demo/topics/gone.events");
        assert_eq!(ran.json()["run"]["waits"], json!(["topic-missing"]));
    }
}

/// The settings have a topic rule for the aggregate type `order`. The waiting event has the aggregate type `other`, so
/// its topic comes from the template: `Placed.events`. `check` must look up this topic. To find out that the rule does
/// not apply, `check` must read the aggregate type, although the template does not name it.
#[tokio::test]
async fn the_topic_of_a_rule_is_looked_up_too() {
    let (_emulator, host) = emulator().await;
    let database = Database::initialised().await;
    insert_orders(&database, 1_500).await;
    record(&database).await;
    insert(&database, "other", "'g-1'").await;
    let mut file = tempfile::NamedTempFile::new().unwrap();
    let settings = "[[tables]]\ntable = 'outbox.events'\ntopic = '{event_type}.events'\n\
                    topic_rules = { order = 'order.events' }\n";
    std::io::Write::write_all(&mut file, settings.as_bytes()).unwrap();
    let file = [("POSTRIDER_CONFIG", file.path().to_str().unwrap())];
    let ran = check(&database, &host, &file).await;
    let what = ran.finding("topic-missing")["what"].to_string();
    assert_contains(&what, "projects/demo/topics/Placed.events");
}

#[tokio::test]
async fn a_topic_for_which_the_relay_waits_is_looked_up() {
    let (_emulator, host) = emulator().await;
    let database = Database::initialised().await;
    let topic = "projects/demo/topics/elsewhere";
    let said = json!({"state": "blocked-on-pubsub", "for_seconds": 9.0, "code": "topic-missing",
        "what": "x", "hint": "y", "caught_up_in_seconds": null, "failing_topics": 1,
        "topics": [{"topic": topic, "code": "topic-missing", "error": "x", "hint": "y",
            "for_seconds": 9.0, "failures": 3, "waiting_events": 1, "oldest_seconds": 9.0}]});
    condition(&database, &said).await;
    let ran = check(&database, &host, &[]).await;
    assert_contains(&ran.finding("topic-missing")["what"].to_string(), topic);
}

#[tokio::test]
async fn with_halt_a_waiting_event_that_cannot_be_sent_stops_the_relay() {
    let (_emulator, host) = emulator().await;
    let database = Database::initialised().await;
    insert_orders(&database, 1_500).await;
    record(&database).await;
    insert(&database, "order", "repeat('k', 2000)").await;
    let halt = [("POSTRIDER_ON_BAD_EVENT", "halt")];
    let ran = check(&database, &host, &halt).await;
    ran.assert_status(2);
    assert_eq!(
        ran.json()["run"]["stops"],
        json!(["event-invalid"]),
        "{ran}"
    );
    let what = ran.finding("event-invalid")["what"].to_string();
    assert_contains(&what, "the relay stops at such an event");
    let ran = check(&database, &host, &[]).await;
    assert_eq!(ran.json()["run"]["stops"], json!([]), "{ran}");
    assert_eq!(ran.finding("event-invalid")["severity"], "warning");

    // The outcome of an event in quarantine is recorded, so the event no longer stops the relay.
    let recorded = "insert into outbox.dispatch (commit_lsn, committed_at, ordinal, attempts, event_id, state) \
                    values ('0/20', now(), 1, 0, '00000000-0000-4000-8000-000000000001', 'quarantined')";
    database.execute(recorded).await;
    let ran = check(&database, &host, &halt).await;
    assert_eq!(ran.json()["run"]["stops"], json!([]), "{ran}");
}

#[tokio::test]
async fn with_halt_the_event_that_stopped_a_relay_also_stops_the_next_relay() {
    let (_emulator, host) = emulator().await;
    let database = Database::initialised().await;
    condition(&database, &broken("event-refused", "Pub/Sub refuses it")).await;
    let halt = [("POSTRIDER_ON_BAD_EVENT", "halt")];
    let ran = check(&database, &host, &halt).await;
    assert_eq!(
        ran.json()["run"]["stops"],
        json!(["event-refused"]),
        "{ran}"
    );
    let found = ran.finding("event-refused");
    assert_contains(&found["what"].to_string(), "Pub/Sub refuses it");
    assert_eq!(found["remedy"], "do this");
    let ran = check(&database, &host, &[]).await;
    assert!(!ran.stdout.contains("event-refused"), "{ran}");
}
