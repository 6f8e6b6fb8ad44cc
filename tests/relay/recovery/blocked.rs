//! Tests of keys that are blocked by an event in quarantine when the relay crashes and the slot is lost.

use super::*;

/// Inserts an event of the key `k`. An event of the type `Bad` cannot become a message, because its type is too
/// long for an attribute.
async fn insert_one(database: &Database, version: u32, event_type: &str) {
    // Pub/Sub allows at most 1,024 bytes for the value of an attribute.
    let padding = if event_type == "Bad" { 2_000 } else { 0 };
    database
        .execute(&format!(
            "INSERT INTO outbox.events \
                 (aggregatetype, aggregateid, event_type, version, payload, occurred_at) \
             VALUES ('order', 'k', '{event_type}' || repeat('x', {padding}), {version}, \
                 jsonb_build_object('n', {version}), clock_timestamp())"
        ))
        .await;
}

/// Returns the versions of the events in `state`, in the order of their positions.
async fn versions(database: &Database, state: &str) -> String {
    database
        .text(&format!(
            "SELECT coalesce(string_agg(e.version::text, ' ' ORDER BY d.commit_lsn, d.ordinal), '') \
             FROM outbox.dispatch d JOIN outbox.events e ON e.id = d.event_id \
             WHERE d.state = '{state}'"
        ))
        .await
}

/// Returns the versions of the stored events, in the order of their requests. If an event was stored twice, because
/// it was in flight at the crash, its last request counts.
async fn stored_versions(database: &Database, emulator: &RunningEmulator) -> Vec<i64> {
    let mut versions = Vec::new();
    for attempt in emulator.journal().attempts() {
        if !attempt.is_stored() {
            continue;
        }
        for id in attempt.event_ids.iter().flatten() {
            let version = format!("SELECT version FROM outbox.events WHERE id = '{id}'");
            let version = database.number(&version).await;
            versions.retain(|stored| *stored != version);
            versions.push(version);
        }
    }
    versions
}

/// Kills a relay and drops its slot. At the kill, the events 2 and 3 of a key are in flight, and its events 4 to 6
/// are in quarantine.
async fn lose_slot_with_a_blocked_key(database: &Database) -> RunningEmulator {
    let emulator = harness::emulator().await;
    let relay = Relay::start(database, &emulator);
    insert_one(database, 1, "Good").await;
    database.wait_until_recorded().await;
    let slow = Action::Delay(Duration::from_secs(600));
    emulator.faults().inject(Fault::new(slow));
    for (version, event_type) in [
        (2, "Good"),
        (3, "Good"),
        (4, "Bad"),
        (5, "Bad"),
        (6, "Good"),
    ] {
        insert_one(database, version, event_type).await;
    }
    eventually("the key is blocked", || async {
        (versions(database, "quarantined").await == "4 5 6").then_some(())
    })
    .await;
    relay.kill_9();
    assert_eq!(versions(database, "published").await, "1");
    harness::wait_until_killed_relays_are_gone(database, &emulator).await;
    database.drop_slot().await;
    insert_one(database, 7, "Good").await;
    emulator
}

/// Discards the bad events, and releases the others.
async fn release(database: &Database) {
    let url = [("DATABASE_URL", database.url.as_str())];
    let run = |args: &[&str]| {
        let ran = harness::postrider(args, &url).output().unwrap();
        assert!(ran.status.success(), "{ran:?}");
    };
    for version in [4, 5] {
        let id = format!("SELECT id::text FROM outbox.events WHERE version = {version}");
        let id = database.text(&id).await;
        run(&["quarantine", "discard", &id, "--yes"]);
    }
    run(&["quarantine", "release", "--all"]);
}

async fn assert_all_good_events_are_in_order(
    database: &Database,
    emulator: &RunningEmulator,
    relay: &Relay,
) {
    eventually("all good events are published", || async {
        (versions(database, "published").await == "1 2 3 6 7 8").then_some(())
    })
    .await;
    assert_eq!(
        stored_versions(database, emulator).await,
        [1, 2, 3, 6, 7, 8],
        "{}",
        relay.log()
    );
}

async fn recover_with_a_blocked_key(database: Database) {
    let emulator = lose_slot_with_a_blocked_key(&database).await;
    emulator.faults().lift_all();
    let relay = Relay::start(&database, &emulator);
    database.wait_until_recorded().await;
    wait_until_recovered(&database).await;
    insert_one(&database, 8, "Good").await;
    database.wait_until_recorded().await;
    assert_eq!(
        versions(&database, "published").await,
        "1 2 3",
        "{}",
        relay.log()
    );
    assert_eq!(versions(&database, "quarantined").await, "4 5 6 7 8");
    release(&database).await;
    assert_all_good_events_are_in_order(&database, &emulator, &relay).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn events_in_flight_come_before_events_that_were_released_while_no_relay_ran() {
    let database = Database::start().await;
    let emulator = lose_slot_with_a_blocked_key(&database).await;
    release(&database).await;
    emulator.faults().lift_all();
    let relay = Relay::start(&database, &emulator);
    insert_one(&database, 8, "Good").await;
    assert_all_good_events_are_in_order(&database, &emulator, &relay).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn kill_9_during_a_recovery_keeps_events_in_flight_before_the_blocked_event() {
    let database = Database::start().await;
    let emulator = lose_slot_with_a_blocked_key(&database).await;
    let relay = Relay::start(&database, &emulator);
    relay.wait_for_log("finished reading the table").await;
    eventually("event 7 is in quarantine", || async {
        (versions(&database, "quarantined").await == "4 5 6 7").then_some(())
    })
    .await;
    relay.kill_9();
    emulator.faults().lift_all();
    harness::wait_until_killed_relays_are_gone(&database, &emulator).await;
    let relay = Relay::start(&database, &emulator);
    insert_one(&database, 8, "Good").await;
    wait_until_recovered(&database).await;
    eventually("event 8 is in quarantine", || async {
        (versions(&database, "quarantined").await == "4 5 6 7 8").then_some(())
    })
    .await;
    assert_eq!(versions(&database, "published").await, "1 2 3");
    release(&database).await;
    assert_all_good_events_are_in_order(&database, &emulator, &relay).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn events_in_flight_before_a_blocked_event_are_published_before_it_when_the_slot_is_lost() {
    recover_with_a_blocked_key(Database::start().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_an_index_on_the_ids_a_recovery_finds_the_blocked_event_in_the_table() {
    let database = Database::start().await;
    database
        .execute("ALTER TABLE outbox.events DROP CONSTRAINT events_pkey")
        .await;
    recover_with_a_blocked_key(database).await;
}

/// Without the column `seq`, the recovery sorts the rows by version and transaction.
#[tokio::test(flavor = "multi_thread")]
async fn without_a_seq_a_recovery_publishes_events_before_a_blocked_event_too() {
    let database = Database::start().await;
    database
        .execute("ALTER TABLE outbox.events DROP COLUMN seq")
        .await;
    recover_with_a_blocked_key(database).await;
}
