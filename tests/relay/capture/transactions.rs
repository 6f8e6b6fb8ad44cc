//! Tests of events whose transactions run long, are prepared, or have savepoints.

use super::World;
use super::table::Kind;
use crate::harness;

const OUT: &str = "ALTER PUBLICATION postrider DROP TABLE TABLE_NAME";
const IN: &str = "ALTER PUBLICATION postrider ADD TABLE TABLE_NAME";
const ANOTHER: &str = "CREATE TABLE public.another (id int); \
                       ALTER PUBLICATION postrider ADD TABLE public.another";

#[tokio::test(flavor = "multi_thread")]
async fn prepared_transactions_are_delivered_when_they_are_committed() {
    for kind in [Kind::Events, Kind::Numbered] {
        let (mut world, relay) = World::served(kind, 20).await;
        for name in ["kept", "gone", "later"] {
            let row = world.row_sql(name);
            let sql = format!("BEGIN; {row}; PREPARE TRANSACTION '{name}'");
            world.execute(&sql).await;
        }
        world.insert("a", 20).await;
        world.execute("COMMIT PREPARED 'kept'").await;
        world.execute("ROLLBACK PREPARED 'gone'").await;
        world.note().await;
        world.wait_until_published(&relay).await;
        relay.stop().await;
        world.insert("b", 20).await;
        world.execute("COMMIT PREPARED 'later'").await;
        let relay = world.relay();
        world.assert_published_once(relay).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prepared_transaction_that_outlives_audits_and_the_slot_is_delivered() {
    let (mut world, relay) = World::served(Kind::Numbered, 20).await;
    let row = world.row_sql("prepared");
    world
        .execute(&format!("BEGIN; {row}; PREPARE TRANSACTION 'p'"))
        .await;
    relay.stop().await;
    for round in 0..2 {
        world.insert(&format!("a{round}"), 20).await;
        let relay = world.relay();
        world.note().await;
        world.wait_until_published(&relay).await;
        relay.stop().await;
    }
    world.database.drop_slot().await;
    world.execute("COMMIT PREPARED 'p'").await;
    world.insert("b", 20).await;
    let relay = world.relay();
    world.assert_published_once(relay).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_that_its_own_transaction_deletes_is_published_from_the_stream() {
    for kind in [Kind::Events, Kind::Numbered] {
        let (mut world, relay) = World::served(kind, 20).await;
        for round in 0..3 {
            let row = world.row_sql("short-lived");
            world.execute(&format!("BEGIN; {row}")).await;
            world.note().await;
            let delete = "DELETE FROM TABLE_NAME WHERE aggregateid = 'short-lived'";
            world.execute(&format!("{delete}; COMMIT")).await;
            world.insert(&format!("a{round}"), 5).await;
        }
        world.assert_published_once(relay).await;
    }
}

/// Checks that rows inserted under a savepoint are published with the rest of their transaction,
/// unless they are rolled back to the savepoint.
async fn savepoints(kind: Kind, loses_slot: bool) {
    let (mut world, relay) = World::served(kind, 20).await;
    relay.stop().await;
    let mut sql = String::from("BEGIN;");
    for (n, end) in ["RELEASE s", "ROLLBACK TO s", "RELEASE s", "SAVEPOINT t"]
        .iter()
        .enumerate()
    {
        let key = format!("save-{n}");
        sql += &format!("SAVEPOINT s; {}; {end};", world.row_sql(&key));
        sql += &format!("{};", world.row_sql(&key));
    }
    sql += "COMMIT";
    world.execute(&sql).await;
    if loses_slot {
        world.database.drop_slot().await;
    }
    let relay = world.relay();
    world.assert_published_once(relay).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_under_savepoints_are_delivered_unless_rolled_back() {
    for kind in [Kind::Events, Kind::Numbered, Kind::Uuid, Kind::Partitioned] {
        savepoints(kind, false).await;
        savepoints(kind, true).await;
    }
}

/// What the test does before it commits the transaction that was open at the relay's first start.
#[derive(Clone, Copy, Debug, PartialEq)]
enum EndsAfter {
    /// Lets the relay stream.
    Streaming,
    /// Lets the relay stream. The transaction inserted its row while the publication did not contain the table.
    Gap,
    /// Drops the slot, and waits until the relay recovers.
    LostSlot,
}

async fn open_at_the_first_start(kind: Kind, ends_after: EndsAfter) {
    let mut world = World::new(kind, 100).await;
    // Keep the slot but delete the capture record, so that the relay begins to capture the table at
    // its first start.
    world.database.execute("DELETE FROM outbox.capture").await;
    if ends_after == EndsAfter::Gap {
        world.execute(ANOTHER).await;
        world.execute(OUT).await;
    }
    let slow = harness::connect(&world.database.url).await;
    let row = world.row_sql("slow");
    slow.batch_execute(&format!("BEGIN; {row}")).await.unwrap();
    let gone = harness::connect(&world.database.url).await;
    let row = world.row_sql("gone");
    gone.batch_execute(&format!("BEGIN; {row}")).await.unwrap();
    if ends_after == EndsAfter::Gap {
        world.execute(IN).await;
    }
    let relay = world.streaming().await;
    world.insert("a", 30).await;
    world.note().await;
    world.wait_until_published(&relay).await;
    gone.batch_execute("ROLLBACK").await.unwrap();
    let relay = match ends_after {
        EndsAfter::Streaming | EndsAfter::Gap => {
            slow.batch_execute("COMMIT").await.unwrap();
            relay
        }
        EndsAfter::LostSlot => {
            relay.stop().await;
            world.database.drop_slot().await;
            let relay = world.relay();
            relay.wait_for_log("recovering").await;
            slow.batch_execute("COMMIT").await.unwrap();
            relay
        }
    };
    world.assert_published_once(relay).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_open_at_the_first_start_is_delivered_by_the_stream() {
    open_at_the_first_start(Kind::Events, EndsAfter::Streaming).await;
    open_at_the_first_start(Kind::Numbered, EndsAfter::Streaming).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_open_at_the_first_start_is_delivered_by_the_audit() {
    open_at_the_first_start(Kind::Events, EndsAfter::Gap).await;
    open_at_the_first_start(Kind::Uuid, EndsAfter::Gap).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_open_at_the_first_start_is_delivered_by_a_recovery() {
    open_at_the_first_start(Kind::Events, EndsAfter::LostSlot).await;
    open_at_the_first_start(Kind::Partitioned, EndsAfter::LostSlot).await;
}

/// Several audits run while the transaction is open. They must not raise the floor above this
/// transaction.
#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_that_outlives_several_audits_is_delivered_after_a_crash_and_a_lost_slot() {
    for kind in [Kind::Events, Kind::Numbered, Kind::Uuid] {
        let (mut world, relay) = World::served(kind, 20).await;
        relay.stop().await;
        let slow = harness::connect(&world.database.url).await;
        let row = world.row_sql("slow");
        let save = world.row_sql("saved");
        let sql = format!("BEGIN; {row}; SAVEPOINT s; {save}");
        slow.batch_execute(&sql).await.unwrap();
        for round in 0..2 {
            world.insert(&format!("a{round}"), 20).await;
            let relay = world.streaming().await;
            world.note().await;
            world.wait_until_published(&relay).await;
            world.wait_until_compared(&relay).await;
            if round == 0 {
                // Stop the first relay cleanly, so that the audit of the next relay can end while the
                // transaction is open. After a crash, that audit would compare whole tables, and would end
                // only after the transaction.
                relay.stop().await;
                continue;
            }
            relay.kill_9();
            harness::wait_until_killed_relays_are_gone(&world.database, &world.emulator).await;
        }
        world.database.drop_slot().await;
        slow.batch_execute("COMMIT").await.unwrap();
        let relay = world.relay();
        world.assert_published(relay).await;
    }
}
