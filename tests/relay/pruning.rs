//! Runs `postrider prune` while a relay runs, is held up, or was killed. The command deletes no
//! undelivered event, and no record that a restart needs.

use pubsub_emulator::RunningEmulator;

use crate::exceptions::{BAD, poison, stored, wait_until_vouched};
use crate::harness::{self, Database, Relay, eventually, postrider};

/// Number of old rows: more than `prune` reads in one step.
const OLD: u32 = 12_000;

/// Runs `postrider prune --older-than 7d --yes --json`. Returns the exit status and the JSON
/// output, or standard error if there is no JSON output.
fn prune(database: &Database, dispatch: &str) -> (Option<i32>, serde_json::Value) {
    let environment = [
        ("DATABASE_URL", database.url.as_str()),
        ("POSTRIDER_SLOT", database.slot()),
        ("POSTRIDER_DISPATCH", dispatch),
    ];
    let arguments = [
        "prune",
        "--older-than",
        "7d",
        "--yes",
        "--json",
        "--pause",
        "1ms",
    ];
    let ran = postrider(&arguments, &environment).output().unwrap();
    let said = String::from_utf8_lossy(&ran.stderr).into_owned();
    let json = serde_json::from_slice(&ran.stdout).unwrap_or(serde_json::Value::String(said));
    (ran.status.code(), json)
}

async fn insert(database: &Database, count: u32, key: &str, age: &str) {
    database
        .execute(&format!(
            "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, payload, occurred_at) \
             SELECT 'order', '{key}-' || i % 50, 'OrderPlaced', '{{}}', now() - interval '{age}' \
             FROM generate_series(1, {count}) i"
        ))
        .await;
}

async fn wait_until_stored(emulator: &RunningEmulator, count: u32) {
    eventually("everything is stored", || async {
        (stored(emulator).len() == count as usize).then_some(())
    })
    .await;
}

/// Makes all records look eight days old.
async fn age_records(database: &Database) {
    database
        .execute("UPDATE outbox.dispatch SET dispatched_at = now() - interval '8 days'")
        .await;
}

/// Waits until the floor is above all rows, and `restart_lsn` is above the positions of all records. From then
/// on, a crash of PostgreSQL cannot set the slot back to a position before a recorded event.
pub(crate) async fn wait_until_settled(database: &Database) {
    let settled = "SELECT count(*) FROM pg_replication_slots s, outbox.capture c \
        WHERE s.slot_name = c.slot \
          AND s.restart_lsn > coalesce((SELECT max(commit_lsn) FROM outbox.dispatch), '0/0') \
          AND NOT EXISTS (SELECT FROM outbox.events e WHERE e.inserted_xid >= c.floor)";
    eventually(
        "the position is durable, the floor is above all rows",
        || async {
            // A checkpoint writes the running transactions to the WAL, which lets `restart_lsn` advance.
            database.execute("CHECKPOINT").await;
            (database.number(settled).await == 1).then_some(())
        },
    )
    .await;
}

/// Restarts the relay, because the first audit after a start comes soon and raises the floor. Then waits with
/// [`wait_until_settled`].
async fn restarted(database: &Database, relay: Relay, run: &impl Fn() -> Relay) -> Relay {
    relay.stop().await;
    let relay = run();
    wait_until_settled(database).await;
    relay
}

#[tokio::test(flavor = "multi_thread")]
async fn prune_deletes_delivered_events_with_their_records_and_keeps_waiting_ones() {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    poison(&emulator);
    let run = || Relay::start(&database, &emulator);
    let relay = run();
    insert(&database, OLD, "o", "8 days").await;
    database
        .execute(&format!(
            "INSERT INTO outbox.events (id, aggregatetype, aggregateid, event_type, payload) \
             VALUES ('{BAD}', 'order', 'bad', 'Bad', '{{}}')"
        ))
        .await;
    wait_until_stored(&emulator, OLD).await;
    database.wait_until_recorded().await;
    database.wait_until_confirmed().await;
    let relay = restarted(&database, relay, &run).await;
    age_records(&database).await;
    insert(&database, 100, "new", "0").await;
    wait_until_stored(&emulator, OLD + 100).await;
    database.wait_until_recorded().await;

    let (code, json) = prune(&database, "full");
    assert_eq!(code, Some(0), "{json:#}");
    assert_eq!(json["tables"][0]["rows"], OLD, "{json:#}");
    assert_eq!(json["tables"][0]["kept"]["quarantined"], 1, "{json:#}");
    assert_eq!(json["dispatch"]["rows"], OLD, "{json:#}");
    let left = "SELECT string_agg(DISTINCT split_part(aggregateid, '-', 1), ' ') || count(*) \
                FROM outbox.events";
    assert_eq!(database.text(left).await, "bad new101");

    relay.stop().await;
    let relay = run();
    insert(&database, 100, "later", "0").await;
    wait_until_stored(&emulator, OLD + 200).await;
    database.wait_until_recorded().await;
    relay.stop().await;
    let messages = emulator.journal().counts().stored_messages;
    assert_eq!(messages, u64::from(OLD) + 200, "nothing is sent again");
}

#[tokio::test(flavor = "multi_thread")]
async fn without_records_prune_deletes_below_the_floor_and_keeps_quarantined_events() {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    poison(&emulator);
    let host = emulator.addr().to_string();
    let mode = [("POSTRIDER_DISPATCH", "exceptions")];
    let run = || Relay::start_with(&database, &host, &mode);
    let relay = run();
    insert(&database, OLD, "o", "8 days").await;
    database
        .execute(&format!(
            "INSERT INTO outbox.events (id, aggregatetype, aggregateid, event_type, payload, \
                 occurred_at) \
             VALUES ('{BAD}', 'order', 'bad', 'Bad', '{{}}', now() - interval '8 days')"
        ))
        .await;
    wait_until_stored(&emulator, OLD).await;
    wait_until_vouched(&database).await;
    insert(&database, 100, "new", "0").await;
    wait_until_stored(&emulator, OLD + 100).await;
    age_records(&database).await;

    // `prune` must use the relay's dispatch mode, and not the command's own setting.
    let (code, json) = prune(&database, "full");
    assert_eq!(code, Some(0), "{json:#}");
    assert_eq!(json["tables"][0]["rows"], OLD, "{json:#}");
    assert_eq!(json["tables"][0]["kept"]["quarantined"], 1, "{json:#}");
    assert_eq!(json["dispatch"]["rows"], 0, "{json:#}");
    let left = "SELECT string_agg(DISTINCT split_part(aggregateid, '-', 1), ' ') || count(*) \
                FROM outbox.events";
    assert_eq!(database.text(left).await, "bad new101");

    relay.stop().await;
    let before = emulator.journal().counts().stored_messages;
    // Without the slot, `prune` cannot know which rows are published, and deletes nothing.
    let recreate = format!(
        "SELECT pg_create_logical_replication_slot('{}', 'pgoutput')",
        database.slot()
    );
    database.drop_slot().await;
    let (code, json) = prune(&database, "exceptions");
    assert_eq!(code, Some(3), "{json:#}");
    assert!(
        json.as_str().unwrap().contains("\"slot-missing\""),
        "{json:#}"
    );
    database.execute(&recreate).await;
    let relay = run();
    insert(&database, 100, "later", "0").await;
    wait_until_stored(&emulator, OLD + 200).await;
    relay.stop().await;
    let after = emulator.journal().counts().stored_messages;
    // The recovery repeats rows above the floor, but cannot repeat a pruned row.
    assert!(
        (before + 100..=before + 200).contains(&after),
        "{before} {after}"
    );
}

/// A missing topic holds back the confirmed position while the relay publishes events of other topics. `prune`
/// must keep the records of these events. PostgreSQL streams the events again after a restart, and only the records
/// tell the relay to skip them.
#[tokio::test(flavor = "multi_thread")]
async fn prune_keeps_records_after_the_confirmed_position_so_a_restart_repeats_nothing() {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    let run = || Relay::start(&database, &emulator);
    let relay = run();
    insert(&database, 300, "early", "0").await;
    wait_until_stored(&emulator, 300).await;
    database.wait_until_recorded().await;
    database.wait_until_confirmed().await;
    let relay = restarted(&database, relay, &run).await;
    database
        .execute(
            "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, payload) \
             VALUES ('nowhere', 'n-1', 'Lost', '{}')",
        )
        .await;
    insert(&database, 300, "late", "0").await;
    wait_until_stored(&emulator, 600).await;
    let recorded = "SELECT count(*) FROM outbox.dispatch WHERE state = 'published'";
    eventually("everything published is recorded", || async {
        (database.number(recorded).await == 600).then_some(())
    })
    .await;
    age_records(&database).await;
    let (code, json) = prune(&database, "full");
    assert_eq!(code, Some(1), "{json:#}");
    assert_eq!(json["tables"][0]["rows"], 300, "{json:#}");
    assert_eq!(json["tables"][0]["kept"]["unconfirmed"], 300, "{json:#}");
    assert_eq!(json["dispatch"]["rows"], 0, "{json:#}");
    let why = json["dispatch"]["postponed"].as_str().unwrap();
    assert!(why.contains("something holds it back"), "{why}");

    relay.kill_9();
    harness::wait_until_killed_relays_are_gone(&database, &emulator).await;
    // Delete rows and insert them again while no relay runs. PostgreSQL will stream them a second time.
    database
        .execute(
            "WITH moved AS (DELETE FROM outbox.events WHERE aggregateid LIKE 'late-%' RETURNING *) \
             INSERT INTO outbox.events SELECT * FROM moved",
        )
        .await;
    let (code, json) = prune(&database, "full");
    assert_eq!(code, Some(1), "{json:#}");
    let why = json["dispatch"]["postponed"].as_str().unwrap();
    assert!(why.contains("no relay reads it"), "{why}");
    let relay = run();
    relay.wait_for_log("streaming").await;
    let topic = "projects/demo/topics/nowhere.events";
    emulator.create_topic(topic).await.unwrap();
    wait_until_stored(&emulator, 601).await;
    database.wait_until_recorded().await;
    database.wait_until_confirmed().await;
    let relay = restarted(&database, relay, &run).await;
    age_records(&database).await;
    let (code, json) = prune(&database, "full");
    assert_eq!(code, Some(0), "{json:#}");
    assert_eq!(json["tables"][0]["rows"], 301, "{json:#}");
    assert_eq!(json["dispatch"]["rows"], 601, "{json:#}");
    relay.kill_9();
    let relay = run();
    relay.wait_for_log("streaming").await;
    insert(&database, 1, "end", "0").await;
    wait_until_stored(&emulator, 602).await;
    relay.stop().await;
    let messages = emulator.journal().counts().stored_messages;
    assert_eq!(messages, 602, "nothing is sent again");
}

/// If a published row is deleted and inserted again, PostgreSQL streams the row a second time. `prune` must keep the
/// record of this row until the slot has passed the second insert. Without the record, the relay would publish the row
/// as a new event.
#[tokio::test(flavor = "multi_thread")]
async fn the_record_of_a_row_moved_while_no_relay_ran_outlives_pruning() {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    let run = || Relay::start(&database, &emulator);
    let relay = run();
    insert(&database, 300, "o", "8 days").await;
    wait_until_stored(&emulator, 300).await;
    database.wait_until_recorded().await;
    database.wait_until_confirmed().await;
    let relay = restarted(&database, relay, &run).await;
    relay.kill_9();
    harness::wait_until_killed_relays_are_gone(&database, &emulator).await;
    age_records(&database).await;
    database
        .execute(
            "WITH moved AS (DELETE FROM outbox.events RETURNING *) \
             INSERT INTO outbox.events SELECT * FROM moved",
        )
        .await;
    let (code, json) = prune(&database, "full");
    assert_eq!(code, Some(1), "{json:#}");
    assert_eq!(json["tables"][0]["rows"], 300, "{json:#}");
    assert_eq!(json["dispatch"]["rows"], 0, "{json:#}");
    let relay = run();
    insert(&database, 1, "end", "0").await;
    wait_until_stored(&emulator, 301).await;
    database.wait_until_confirmed().await;
    let (code, json) = prune(&database, "full");
    assert_eq!(code, Some(0), "{json:#}");
    assert_eq!(json["dispatch"]["rows"], 300, "{json:#}");
    relay.stop().await;
    let messages = emulator.journal().counts().stored_messages;
    assert_eq!(messages, 301, "nothing is sent again");
}
