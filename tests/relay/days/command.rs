//! Tests of `postrider prune` on a table with daily partitions.

use scratch_postgres::StopMode;

use super::*;
use crate::exceptions::{BAD, poison, wait_until_vouched};
use crate::harness::{self, Relay};
use crate::privileges::login_role;

/// Inserts the event [`BAD`], which Pub/Sub refuses, with a time in the given day.
async fn insert_bad(database: &Database, days: i32) {
    database
        .execute(&format!(
            "INSERT INTO outbox.events (id, aggregatetype, aggregateid, event_type, payload, occurred_at) \
             VALUES ('{BAD}', 'order', 'bad', 'Bad', '{{}}', {})",
            midnight(days)
        ))
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_old_day_is_dropped_once_all_its_rows_may_go_and_nothing_is_sent_again() {
    let mut database = daily_database().await;
    let emulator = harness::emulator().await;
    poison(&emulator);
    let gone = add_past_day(&database, -20).await;
    let with_bad = add_past_day(&database, -19).await;
    let empty = add_past_day(&database, -18).await;
    let young = add_past_day(&database, -3).await;
    let relay = Relay::start(&database, &emulator);
    insert(&database, 6_000, "gone", -20).await;
    insert(&database, 100, "kept", -19).await;
    insert_bad(&database, -19).await;
    insert(&database, 50, "young", -3).await;
    insert(&database, 50, "default", -30).await;
    wait_until_stored(&emulator, 6_200).await;
    database.wait_until_recorded().await;
    database.wait_until_confirmed().await;
    // Restart the relay: its first audit runs soon after the start and raises the floor.
    relay.stop().await;
    let relay = Relay::start(&database, &emulator);
    wait_until_settled(&database).await;
    age_records(&database).await;

    let (code, json) = prune(&database, "--dry-run");
    assert_eq!(code, Some(0), "{json:#}");
    assert_eq!(dropped(&json), [6_000, 0], "{json:#}");
    // Every row may be deleted except the row in quarantine, because the test has aged the records of all
    // days. The day of the quarantined row keeps its partition.
    assert_eq!(json["tables"][0]["rows"], 6_200, "{json:#}");
    assert!(exists(&database, &gone).await);

    let (code, json) = prune(&database, "--yes");
    assert_eq!(code, Some(0), "{json:#}");
    assert_eq!(dropped(&json), [6_000, 0], "{json:#}");
    assert_eq!(json["tables"][0]["rows"], 6_200, "{json:#}");
    assert_eq!(json["tables"][0]["kept"]["quarantined"], 1, "{json:#}");
    assert_eq!(
        json["tables"][0]["notes"],
        serde_json::json!([]),
        "{json:#}"
    );
    assert_eq!(json["dispatch"]["rows"], 6_200, "{json:#}");
    assert!(!exists(&database, &gone).await && !exists(&database, &empty).await);
    assert_eq!(rows(&database, &with_bad).await, 1);
    assert!(
        exists(&database, &young).await,
        "it is within the retention"
    );

    let environment = [
        ("DATABASE_URL", database.url.as_str()),
        ("PUBSUB_PROJECT_ID", "demo"),
    ];
    // One event is in quarantine, so `audit` exits with 1.
    let audited = postrider(&["audit"], &environment).output().unwrap();
    assert_eq!(audited.status.code(), Some(1), "{audited:?}");
    let found = postrider(&["event", BAD], &environment).output().unwrap();
    assert!(found.status.success(), "{found:?}");

    relay.stop().await;
    database.server().restart(StopMode::Immediate).unwrap();
    database.reconnect().await;
    let relay = Relay::start(&database, &emulator);
    insert(&database, 100, "later", 0).await;
    wait_until_stored(&emulator, 6_300).await;
    database.wait_until_recorded().await;
    assert!(!relay.log().contains("publication-gap"), "{}", relay.log());
    relay.stop().await;
    assert_eq!(emulator.journal().counts().stored_messages, 6_300);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_records_the_floor_proves_that_a_day_may_go() {
    let database = daily_database().await;
    let emulator = harness::emulator().await;
    poison(&emulator);
    let gone = add_past_day(&database, -20).await;
    let with_bad = add_past_day(&database, -19).await;
    let host = emulator.addr().to_string();
    let relay = Relay::start_with(&database, &host, &[("POSTRIDER_DISPATCH", "exceptions")]);
    insert(&database, 300, "gone", -20).await;
    insert(&database, 100, "kept", -19).await;
    insert_bad(&database, -19).await;
    wait_until_stored(&emulator, 400).await;
    wait_until_vouched(&database).await;
    let (code, json) = prune(&database, "--yes");
    assert_eq!(code, Some(0), "{json:#}");
    assert_eq!(dropped(&json), [300], "{json:#}");
    assert!(!exists(&database, &gone).await);
    assert_eq!(rows(&database, &with_bad).await, 1);

    // A recovery repeats the rows from the floor on. It can read only rows in the remaining partitions.
    relay.stop().await;
    database.drop_slot().await;
    insert(&database, 10, "later", 0).await;
    let relay = Relay::start_with(&database, &host, &[("POSTRIDER_DISPATCH", "exceptions")]);
    wait_until_stored(&emulator, 410).await;
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn after_a_drop_events_are_replayed_and_a_lost_slot_is_recovered() {
    let database = daily_database().await;
    let emulator = harness::emulator().await;
    let gone = add_past_day(&database, -20).await;
    let relay = Relay::start(&database, &emulator);
    insert(&database, 100, "gone", -20).await;
    wait_until_stored(&emulator, 100).await;
    database.wait_until_recorded().await;
    database.wait_until_confirmed().await;
    relay.stop().await;
    let relay = Relay::start(&database, &emulator);
    wait_until_settled(&database).await;
    age_records(&database).await;
    insert(&database, 50, "live", 0).await;
    wait_until_stored(&emulator, 150).await;
    database.wait_until_recorded().await;
    let (_, json) = prune(&database, "--yes");
    assert_eq!(dropped(&json), [100], "{json:#}");
    assert!(!exists(&database, &gone).await);

    let environment = [
        ("DATABASE_URL", database.url.as_str()),
        ("PUBSUB_PROJECT_ID", "demo"),
    ];
    let replay = ["replay", "--key", "live-1", "--yes"];
    let replayed = postrider(&replay, &environment).output().unwrap();
    assert!(replayed.status.success(), "{replayed:?}");
    assert_eq!(emulator.journal().counts().stored_messages, 150 + 10);

    relay.stop().await;
    database.drop_slot().await;
    insert(&database, 20, "last", 0).await;
    let relay = Relay::start(&database, &emulator);
    wait_until_stored(&emulator, 170).await;
    database.wait_until_recorded().await;
    relay.stop().await;
    assert_eq!(emulator.journal().counts().stored_messages, 150 + 10 + 20);
    let audited = postrider(&["audit"], &environment).output().unwrap();
    assert!(audited.status.success(), "{audited:?}");
}

/// The partition is for an old day, but one of its rows has not been published yet. So the partition must
/// stay.
#[tokio::test(flavor = "multi_thread")]
async fn a_day_with_one_row_that_waits_stays_and_its_other_rows_go() {
    let database = daily_database().await;
    let emulator = harness::emulator().await;
    let old = add_past_day(&database, -20).await;
    let relay = Relay::start(&database, &emulator);
    insert(&database, 100, "o", -20).await;
    wait_until_stored(&emulator, 100).await;
    database.wait_until_recorded().await;
    database.wait_until_confirmed().await;
    relay.stop().await;
    let relay = Relay::start(&database, &emulator);
    wait_until_settled(&database).await;
    age_records(&database).await;
    relay.stop().await;
    insert(&database, 1, "waits", -20).await;
    let (_, json) = prune(&database, "--yes");
    assert_eq!(json["tables"][0]["rows"], 100, "{json:#}");
    assert_eq!(json["tables"][0]["kept"]["waiting"], 1, "{json:#}");
    assert!(dropped(&json).is_empty(), "{json:#}");
    assert_eq!(rows(&database, &old).await, 1);
    let relay = Relay::start(&database, &emulator);
    wait_until_stored(&emulator, 101).await;
    relay.stop().await;
    let messages = emulator.journal().counts().stored_messages;
    assert_eq!(messages, 101, "nothing is sent again");
}

#[tokio::test(flavor = "multi_thread")]
async fn days_are_added_ahead_and_a_day_with_rows_in_the_default_partition_is_a_note() {
    let database = daily_database().await;
    let ahead = "SELECT count(*) FROM outbox.days() WHERE day >= (now() at time zone 'UTC')::date";
    assert_eq!(database.number(ahead).await, 8);
    // Drop the partitions of five coming days, as if no relay had added them. An event of one of these
    // days goes to the default partition.
    for days in 3..8 {
        let (name, _) = day(&database, days).await;
        database.execute(&format!("DROP TABLE {name}")).await;
    }
    insert(&database, 1, "early", 5).await;
    assert_eq!(rows(&database, "outbox.events_default").await, 1);
    let environment = [
        ("DATABASE_URL", database.url.as_str()),
        ("PUBSUB_PROJECT_ID", "demo"),
    ];
    let checked = postrider(&["check", "--json"], &environment)
        .output()
        .unwrap();
    let checked = String::from_utf8_lossy(&checked.stdout).into_owned();
    assert!(checked.contains("\"day-missing\""), "{checked}");

    let emulator = harness::emulator().await;
    let relay = Relay::start(&database, &emulator);
    wait_until_stored(&emulator, 1).await;
    let (_, json) = prune(&database, "--yes");
    let table = &json["tables"][0];
    assert_eq!(table["days_added"].as_array().unwrap().len(), 4, "{json:#}");
    let notes = table["notes"].as_array().unwrap();
    assert_eq!(notes.len(), 1, "{json:#}");
    let note = notes[0].as_str().unwrap();
    assert!(
        note.contains("the default partition has rows of that day"),
        "{note}"
    );
    assert_eq!(database.number(ahead).await, 7);
    assert_eq!(rows(&database, "outbox.events_default").await, 1);
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_role_that_may_not_drop_days_gets_one_note_with_the_grant() {
    let database = daily_database().await;
    let emulator = harness::emulator().await;
    let url = login_role(&database).await;
    let relay = Relay::start(&database, &emulator);
    insert(&database, 1, "o", 0).await;
    wait_until_stored(&emulator, 1).await;
    let mut past = Vec::new();
    for days in [-20, -19, -18] {
        past.push(add_past_day(&database, days).await);
    }
    database
        .execute("REVOKE EXECUTE ON FUNCTION outbox.lock_day(oid, date) FROM postrider_relay")
        .await;
    let (code, json) = prune_as(&url, database.slot(), "--yes");
    assert_eq!(code, Some(0), "{json:#}");
    let notes = json["tables"][0]["notes"].as_array().unwrap();
    assert_eq!(notes.len(), 1, "{json:#}");
    let note = notes[0].as_str().unwrap();
    let grant = "GRANT EXECUTE ON FUNCTION outbox.lock_day(oid, date) TO shop_relay";
    assert!(note.ends_with(grant), "{note}");
    let check = || {
        let environment = [
            ("DATABASE_URL", url.as_str()),
            ("POSTRIDER_PRUNE_AFTER", "30d"),
        ];
        let checked = postrider(&["check", "--json"], &environment).output();
        String::from_utf8(checked.unwrap().stdout).unwrap()
    };
    let checked = check();
    assert!(checked.contains(grant), "{checked}");

    database.execute(grant).await;
    let checked = check();
    assert!(!checked.contains("GRANT EXECUTE"), "{checked}");
    let (_, json) = prune_as(&url, database.slot(), "--yes");
    assert_eq!(dropped(&json), [0, 0, 0], "{json:#}");
    assert!(!exists(&database, &past[0]).await);
    relay.stop().await;
}
