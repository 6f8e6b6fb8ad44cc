//! Tests of `dispatch = exceptions` where one session, slot or mode ends and the next begins. At that
//! point, a faulty relay could treat an unpublished event as published, or repeat events out of order.

use std::time::Duration;

use pubsub_emulator::{Action, Fault, RunningEmulator};
use scratch_postgres::StopMode;
use tempfile::NamedTempFile;

use super::{
    assert_once_and_in_order, assert_whole_and_in_order, insert, insert_bad, poison, release, rows,
    start, start_with, stored, wait_until_compared, wait_until_delivered, wait_until_vouched,
};
use crate::harness::{self, Database, Relay, eventually};

/// How long a test waits for a mistake: long enough for a faulty relay to confirm a position or
/// raise a floor too early.
const TIME_FOR_A_MISTAKE: Duration = Duration::from_secs(2);
/// How long a test waits for the next vouch. Longer than the interval between two vouches, which is
/// ten seconds.
const A_ROUND: Duration = Duration::from_secs(12);

async fn insert_one(database: &Database, id: &str, key: &str, version: u32) {
    database
        .execute(&format!(
            "INSERT INTO outbox.events (id, aggregatetype, aggregateid, event_type, version, \
                 payload, occurred_at) \
             VALUES ('{id}', 'order', '{key}', 'OrderPlaced', {version}, '{{}}', clock_timestamp())"
        ))
        .await;
}

async fn wait_until_stored(emulator: &RunningEmulator, id: &str) {
    eventually("the event is stored", || async {
        stored(emulator).contains(id).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn full_records_resume_only_after_all_older_transactions_have_ended() {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    let relay = start(&database, &emulator);
    insert(&database, 1, 100).await;
    wait_until_delivered(&database, &emulator, &relay).await;
    let slow = harness::connect(&database.url).await;
    slow.batch_execute(
        "BEGIN; INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, version, \
             payload, occurred_at) \
         VALUES ('order', 'slow', 'OrderPlaced', 1, '{}', clock_timestamp())",
    )
    .await
    .unwrap();
    let row = slow.query_one("SELECT pg_current_xact_id()::text::bigint", &[]);
    let slow_xid: i64 = row.await.unwrap().get(0);
    insert(&database, 101, 100).await;
    wait_until_delivered(&database, &emulator, &relay).await;
    relay.stop().await;
    let relay = Relay::start(&database, &emulator);
    insert(&database, 201, 50).await;
    let vouched = format!("SELECT count(*) FROM outbox.capture WHERE floor = '{slow_xid}'");
    eventually("the relay has vouched for the older events", || async {
        (database.number(&vouched).await == 1).then_some(())
    })
    .await;
    const MODE: &str = "SELECT dispatch FROM outbox.relay";
    assert_eq!(database.text(MODE).await, "exceptions");
    slow.batch_execute("COMMIT").await.unwrap();
    wait_until_compared(&database).await;
    wait_until_delivered(&database, &emulator, &relay).await;
    assert_once_and_in_order(&database, &emulator, &relay).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slot_recreated_while_a_session_ends_is_not_vouched_for() {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    let relay = start(&database, &emulator);
    insert(&database, 1, 100).await;
    wait_until_delivered(&database, &emulator, &relay).await;
    wait_until_vouched(&database).await;
    insert(&database, 101, 10).await;
    wait_until_delivered(&database, &emulator, &relay).await;
    let never = Action::Delay(Duration::from_secs(600));
    emulator.faults().inject(Fault::new(never));
    insert(&database, 201, 100).await;
    // Wait until the relay tries to vouch. The relay cannot vouch yet, because the slot has not
    // confirmed these events.
    tokio::time::sleep(A_ROUND).await;
    let slot = database.slot().to_owned();
    database
        .execute(&format!(
            "SELECT pg_terminate_backend(active_pid, 10000) FROM pg_replication_slots \
             WHERE slot_name = '{slot}'; \
             SELECT pg_drop_replication_slot('{slot}'); \
             SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')"
        ))
        .await;
    tokio::time::sleep(TIME_FOR_A_MISTAKE).await;
    emulator.faults().lift_all();
    wait_until_delivered(&database, &emulator, &relay).await;
    assert_whole_and_in_order(&database, &emulator, &relay).await;
}

/// Events wait behind a quarantined event of their ordering key, even if they belong to another aggregate.
#[tokio::test(flavor = "multi_thread")]
async fn events_with_the_ordering_key_of_a_blocked_event_wait_behind_it_after_a_lost_slot() {
    const WAITS: &str = "00000000-0000-4000-8000-00000000af02";
    const LATER: &str = "00000000-0000-4000-8000-00000000af03";
    let one_bucket = [("POSTRIDER_ORDERING", "bucketed(1)")];
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    poison(&emulator);
    let relay = start_with(&database, &emulator, &one_bucket);
    insert(&database, 1, 20).await;
    insert_bad(&database, 21).await;
    // With one bucket, all aggregates share one ordering key. So the events of the aggregate `a` wait behind the bad
    // event of the aggregate `o-1`.
    insert_one(&database, WAITS, "a", 1).await;
    eventually("both events are quarantined", || async {
        (rows(&database, "quarantined").await == 2).then_some(())
    })
    .await;
    relay.kill_9();
    harness::wait_until_killed_relays_are_gone(&database, &emulator).await;
    database.drop_slot().await;
    insert_one(&database, LATER, "a", 2).await;
    let relay = start_with(&database, &emulator, &one_bucket);
    wait_until_delivered(&database, &emulator, &relay).await;
    emulator.faults().lift_all();
    release(&database);
    wait_until_stored(&emulator, LATER).await;
    let attempts = emulator.journal().attempts();
    let position = |id: &str| {
        let ids = attempts.iter().filter(|attempt| attempt.is_stored());
        let mut ids = ids.flat_map(|attempt| attempt.event_ids.iter().flatten());
        ids.position(|found| found.to_string() == id)
    };
    assert!(position(WAITS) < position(LATER), "{}", relay.log());
    assert!(position(WAITS).is_some(), "{}", relay.log());
}

/// A crash of PostgreSQL returns the slot to an older position, so the stream contains delivered events again. The
/// relay must skip those below the floor of their table. Then a second table is added, whose floor is lower. The relay
/// must not apply the floor of the second table to the events of the first table.
#[tokio::test(flavor = "multi_thread")]
async fn a_table_that_is_added_repeats_no_event_of_another_table_out_of_order() {
    let mut database = Database::private().await;
    let emulator = harness::emulator().await;
    let relay = start(&database, &emulator);
    insert(&database, 1, 1).await;
    wait_until_delivered(&database, &emulator, &relay).await;
    let first = database.current_wal().await;
    insert(&database, 2, 20).await;
    wait_until_delivered(&database, &emulator, &relay).await;
    relay.stop().await;
    // Raise the floor above the delivered events. A running relay would do so within ten seconds.
    let floor = "UPDATE outbox.capture SET floor = pg_snapshot_xmin(pg_current_snapshot())";
    database.execute(floor).await;
    insert(&database, 22, 5).await;
    database.server().restart(StopMode::Immediate).unwrap();
    database.reconnect().await;
    assert!(
        database.confirmed().await <= first,
        "the slot returned to an older position"
    );
    let add = "CREATE TABLE public.added (LIKE outbox.events INCLUDING ALL); \
               ALTER PUBLICATION postrider ADD TABLE public.added";
    database.execute(add).await;
    let settings = NamedTempFile::new().unwrap();
    let tables = "[[tables]]\ntable = 'outbox.events'\n[[tables]]\ntable = 'public.added'\n";
    std::fs::write(settings.path(), tables).unwrap();
    let path = settings.path().display().to_string();
    let relay = start_with(&database, &emulator, &[("POSTRIDER_CONFIG", &path)]);
    wait_until_delivered(&database, &emulator, &relay).await;
    assert!(relay.log().contains("keeps the slot"), "{}", relay.log());
    assert_once_and_in_order(&database, &emulator, &relay).await;
    relay.stop().await;
}
