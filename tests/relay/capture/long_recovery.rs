//! Tests that a recovery of many rows blocks neither vacuum nor schema changes, and can be interrupted at
//! any time.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use pubsub_emulator::{Action, Fault};
use tonic::Code;

use super::World;
use super::table::Kind;
use crate::harness::{self, Relay, eventually};

const ROWS: u32 = 100_000;

/// Inserts `ROWS` rows while no relay runs, and drops the slot, so that only a recovery can deliver
/// the rows.
async fn with_a_backlog(kind: Kind) -> World {
    let (mut world, relay) = World::served(kind, 20).await;
    relay.stop().await;
    world.insert_at_once("a", ROWS).await;
    world.database.drop_slot().await;
    world
}

/// Checks that no session of the relay keeps a transaction or a snapshot open for long. Otherwise
/// vacuum or a schema change would have to wait.
async fn assert_nothing_is_held(world: &World) {
    const WATCHES_FOR: Duration = Duration::from_secs(3);
    let old = "SELECT count(*) FROM pg_stat_activity \
               WHERE application_name LIKE 'postrider%' AND pid <> pg_backend_pid() \
                 AND xact_start < clock_timestamp() - interval '2 s'";
    let began = Instant::now();
    while began.elapsed() < WATCHES_FOR {
        assert_eq!(world.database.number(old).await, 0, "an old transaction");
        // Use up a transaction id, so that the snapshots of other sessions age.
        world.execute("SELECT pg_current_xact_id()").await;
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let kept = "SELECT count(*) FROM pg_stat_activity \
                WHERE application_name LIKE 'postrider%' AND age(backend_xmin) > 20";
    assert_eq!(world.database.number(kept).await, 0, "an old snapshot");
}

async fn a_table_may_be_altered_while_its_recovery_waits(kind: Kind) {
    let mut world = with_a_backlog(kind).await;
    let faults = world.emulator.faults();
    let stalled = faults.inject(Fault::new(Action::Fail(Code::Unavailable)));
    let relay = world.relay();
    relay.wait_for_log("recovering").await;
    eventually("the recovery waits for Pub/Sub", || async {
        (world.emulator.journal().counts().attempts > 5).then_some(())
    })
    .await;
    assert_nothing_is_held(&world).await;
    let alter = "SET lock_timeout = '3s'; ALTER TABLE TABLE_NAME ADD COLUMN extra text";
    world.execute(alter).await;
    world.insert("b", 50).await;
    faults.lift(stalled);
    world.assert_published_once(relay).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn events_can_be_altered_while_their_recovery_waits() {
    a_table_may_be_altered_while_its_recovery_waits(Kind::Events).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_partitioned_table_can_be_altered_while_its_recovery_waits() {
    a_table_may_be_altered_while_its_recovery_waits(Kind::Partitioned).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_without_numbered_ids_can_be_altered_while_its_recovery_waits() {
    a_table_may_be_altered_while_its_recovery_waits(Kind::Uuid).await;
}

async fn recorded(world: &World) -> HashSet<String> {
    let sql = "SELECT event_id::text FROM outbox.dispatch";
    let rows = world.database.client.query(sql, &[]).await.unwrap();
    rows.iter().map(|row| row.get(0)).collect()
}

/// Kills the relay once more than `records` events are recorded. Returns the recorded event ids.
async fn killed_after(world: &World, relay: Relay, records: i64) -> HashSet<String> {
    eventually("some rows are recorded", || async {
        let count = "SELECT count(*) FROM outbox.dispatch";
        (world.database.number(count).await > records).then_some(())
    })
    .await;
    relay.kill_9();
    harness::wait_until_killed_relays_are_gone(&world.database, &world.emulator).await;
    recorded(world).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_recovery_that_is_killed_twice_resends_only_unrecorded_rows() {
    let mut world = with_a_backlog(Kind::Numbered).await;
    let slow = Action::Delay(Duration::from_millis(20));
    let faults = world.emulator.faults();
    let slow = faults.inject(Fault::new(slow));
    let first = killed_after(&world, world.relay(), 10_000).await;
    let second = killed_after(&world, world.relay(), 40_000).await;
    assert!(
        second.len() < ROWS as usize,
        "the relay was killed too late"
    );
    faults.lift(slow);
    world.insert("b", 50).await;
    let relay = world.relay();
    let relay = world.published_all(relay).await;
    let report = world.report();
    assert!(report.is_clean(), "{report}\n{}", relay.log());
    let copies = super::stored(&world.emulator);
    let is_repeated = |id: &&String| copies.get(*id).copied() > Some(1);
    let allowed: usize = report.duplicates.len();
    // A relay repeats at most the rows that were in flight when the previous relay was killed.
    assert!(allowed < 30_000, "{allowed} repeats");
    let sent_again = |killed: &HashSet<String>, before: &HashSet<String>| {
        let fresh = killed.iter().filter(|id| !before.contains(*id));
        fresh.filter(is_repeated).count()
    };
    assert_eq!(
        sent_again(&first, &HashSet::new()),
        0,
        "recorded before the first kill"
    );
    relay.stop().await;
}
