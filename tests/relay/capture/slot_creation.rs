//! Tests of a first start that creates the slot. Capturing begins exactly where the slot begins: rows
//! that are committed while PostgreSQL creates the slot are not published, and all later rows are
//! published, even after a crash at any point of the first start.

use scratch_postgres::ScratchPostgres;
use tokio_postgres::Client;

use super::World;
use super::table::Kind;
use crate::harness::{self, Relay, eventually};
use crate::http::{free_addr, metric};
use crate::new_snapshot::{begin, wait_until_waited_for};
use crate::recovery::lost_slot::{impatient_server, invalidate_slot};

const KINDS: [Kind; 4] = [Kind::Events, Kind::Numbered, Kind::Uuid, Kind::Partitioned];

impl World {
    /// Inserts rows that must not be published.
    async fn insert_old(&self, rows: u32) {
        self.execute(&self.kind.insert_old(&self.table, rows)).await;
    }

    /// Kills the relay and drops its slot.
    async fn kill_and_drop_slot(&self, relay: Relay) {
        relay.kill_9();
        harness::wait_until_killed_relays_are_gone(&self.database, &self.emulator).await;
        self.database.drop_slot().await;
    }
}

/// Waits until the creation of the slot has taken a second, and then checks that no SQL session of the relay
/// has a transaction open. Such a transaction would hold up vacuum and other slots.
async fn assert_holds_no_transaction(world: &World) {
    let sessions = |condition: &str| {
        format!(
            "SELECT count(*) FROM pg_stat_activity \
             WHERE application_name LIKE 'postrider%' AND {condition}"
        )
    };
    let creating = sessions(
        "query LIKE 'CREATE_REPLICATION_SLOT%' \
         AND query_start < clock_timestamp() - interval '1 s'",
    );
    eventually("the slot has waited for a second", || async {
        (world.database.number(&creating).await == 1).then_some(())
    })
    .await;
    let open =
        sessions("xact_start < clock_timestamp() - interval '1 s' AND backend_type <> 'walsender'");
    assert_eq!(world.database.number(&open).await, 0);
    let held = sessions(
        "state_change < clock_timestamp() - interval '1 s' \
         AND (backend_xid IS NOT NULL OR state LIKE 'idle in%')",
    );
    assert_eq!(world.database.number(&held).await, 0);
}

/// PostgreSQL creates a slot only when all open transactions have ended, so rows can be committed while
/// PostgreSQL waits.
#[tokio::test(flavor = "multi_thread")]
async fn rows_committed_while_the_first_slot_is_made_are_never_published() {
    for kind in KINDS {
        let mut world = World::new(kind, 100).await.without_slot().await;
        let (slow, xid) = begin(&world.database).await;
        let row = kind.insert_old(&world.table, 1);
        slow.batch_execute(&row).await.unwrap();
        let relay = world.relay();
        wait_until_waited_for(&world.database, &xid).await;
        if kind == Kind::Events {
            assert_holds_no_transaction(&world).await;
        }
        world.insert_old(100).await;
        slow.batch_execute("COMMIT").await.unwrap();
        relay.wait_for_log("streaming").await;
        assert!(
            relay
                .log()
                .contains("including rows committed while the slot waits for open transactions")
        );
        world.insert("k", 100).await;
        world.note().await;
        world.wait_until_published(&relay).await;
        world.wait_until_compared(&relay).await;
        relay.stop().await;
        world.database.drop_slot().await;
        world.insert("k", 50).await;
        let relay = world.relay();
        world.assert_published_once(relay).await;
    }
}

/// Starts a relay without a slot, and waits until it streams. PostgreSQL waits for two transactions while
/// it creates the slot. Both of them insert old rows. Returns the relay, and a third transaction, which is
/// still open and was already open at the point where the slot begins.
async fn with_a_transaction_across_the_beginning(world: &mut World) -> (Relay, Client) {
    let (first, xid) = begin(&world.database).await;
    let old = world.kind.insert_old(&world.table, 5);
    first.batch_execute(&old).await.unwrap();
    let relay = world.relay();
    wait_until_waited_for(&world.database, &xid).await;
    let (second, xid) = begin(&world.database).await;
    second.batch_execute(&old).await.unwrap();
    first.batch_execute("COMMIT").await.unwrap();
    wait_until_waited_for(&world.database, &xid).await;
    let (open, _) = begin(&world.database).await;
    let (one, two) = (world.row_sql("open"), world.row_sql("open"));
    let insert = format!("{one}; SAVEPOINT s; {two}; RELEASE s");
    open.batch_execute(&insert).await.unwrap();
    // This transaction gets the highest id but ends before the slot begins, so its rows are old.
    world.insert_old(5).await;
    second.batch_execute("COMMIT").await.unwrap();
    relay.wait_for_log("streaming").await;
    (relay, open)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_that_ends_after_the_slot_has_begun_is_published() {
    for (kind, is_lost) in KINDS.into_iter().zip([true, false].into_iter().cycle()) {
        let mut world = World::new(kind, 100).await.without_slot().await;
        let (relay, open) = with_a_transaction_across_the_beginning(&mut world).await;
        let relay = if is_lost {
            world.kill_and_drop_slot(relay).await;
            open.batch_execute("COMMIT").await.unwrap();
            world.relay()
        } else {
            open.batch_execute("COMMIT").await.unwrap();
            relay
        };
        world.insert("a", 20).await;
        world.assert_published_once(relay).await;
    }
}

/// The relay is killed as soon as it streams, so it has not delivered anything.
#[tokio::test(flavor = "multi_thread")]
async fn a_slot_lost_right_after_the_first_start_loses_no_row_and_publishes_no_old_row() {
    for (kind, dispatch) in [
        (Kind::Events, "full"),
        (Kind::Numbered, "exceptions"),
        (Kind::Partitioned, "full"),
    ] {
        let mut world = World::new(kind, 100).await.without_slot().await;
        world.more.push(("POSTRIDER_DISPATCH", dispatch.to_owned()));
        let (relay, open) = with_a_transaction_across_the_beginning(&mut world).await;
        relay.signal("STOP");
        world.insert("a", 20).await;
        open.batch_execute("COMMIT").await.unwrap();
        world.kill_and_drop_slot(relay).await;
        world.insert("a", 20).await;
        let relay = world.relay();
        if dispatch == "full" {
            world.assert_published_once(relay).await;
        } else {
            world.assert_published(relay).await;
        }
    }
}

/// Takes a lock that stops the relay before it writes to the table. The lock does not hold up the
/// creation of slots, because its transaction has no id.
async fn stop_writes(world: &World, table: &str) -> Client {
    let client = harness::connect(&world.database.url).await;
    let lock = format!("BEGIN; LOCK TABLE {table} IN EXCLUSIVE MODE");
    client.batch_execute(&lock).await.unwrap();
    client
}

async fn wait_until_a_write_waits(world: &World, table: &str) {
    let waiting = format!(
        "SELECT count(*) FROM pg_locks WHERE relation = '{table}'::regclass \
         AND mode = 'RowExclusiveLock' AND NOT granted"
    );
    eventually(&format!("the relay writes to {table}"), || async {
        (world.database.number(&waiting).await > 0).then_some(())
    })
    .await;
}

/// Kills the relay and ends its sessions. A session that waits for a lock does not notice that its
/// client is gone.
async fn kill_while_it_waits(world: &World, relay: Relay) {
    relay.kill_9();
    world
        .execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
             WHERE application_name LIKE 'postrider%'",
        )
        .await;
    harness::wait_until_killed_relays_are_gone(&world.database, &world.emulator).await;
}

/// Starts a relay, and stops it with a lock when it has created its slot and is about to write its capture
/// record. Returns the relay, and the session that holds the lock.
async fn stopped_before_its_capture_record(world: &World) -> (Relay, Client) {
    let lock = stop_writes(world, "outbox.capture").await;
    let relay = world.relay();
    wait_until_a_write_waits(world, "outbox.capture").await;
    (relay, lock)
}

/// Lets the relay write its capture record, and stops it before it records the position of its slot. Returns the
/// session whose lock stops it.
async fn stop_after_the_capture_record(world: &World, lock: Client) -> Client {
    let row = stop_writes(world, "outbox.relay").await;
    lock.batch_execute("ROLLBACK").await.unwrap();
    wait_until_a_write_waits(world, "outbox.relay").await;
    let captured = "SELECT count(*) FROM outbox.capture";
    assert_eq!(world.database.number(captured).await, 1);
    row
}

/// The slot exists, but there is no capture record yet. So the next relay must repeat the first start
/// with another slot.
#[tokio::test(flavor = "multi_thread")]
async fn a_crash_between_the_slot_and_the_capture_record_publishes_no_old_row() {
    for kind in KINDS {
        let mut world = World::new(kind, 100).await.without_slot().await;
        let (relay, lock) = stopped_before_its_capture_record(&world).await;
        kill_while_it_waits(&world, relay).await;
        lock.batch_execute("ROLLBACK").await.unwrap();
        let captured = "SELECT count(*) FROM outbox.capture";
        assert_eq!(world.database.number(captured).await, 0);
        world.insert_old(50).await;
        let relay = world.streaming().await;
        world.insert("a", 50).await;
        world.assert_published_once(relay).await;
    }
}

/// PostgreSQL invalidates the new slot during the first start: before the capture record is durable, or
/// before the position of the slot is recorded. The relay must publish every row that is committed after
/// the capture record.
#[tokio::test(flavor = "multi_thread")]
async fn a_slot_that_is_invalidated_during_the_first_start_costs_no_row() {
    for (kind, has_record) in [
        (Kind::Events, false),
        (Kind::Numbered, true),
        (Kind::Partitioned, true),
    ] {
        let emulator = harness::emulator().await;
        let world = World::on(impatient_server(), kind, 2_000, emulator).await;
        let mut world = world.without_slot().await;
        let (relay, mut lock) = stopped_before_its_capture_record(&world).await;
        if has_record {
            lock = stop_after_the_capture_record(&world, lock).await;
            world.insert("a", 30).await;
        }
        invalidate_slot(&world.database).await;
        lock.batch_execute("ROLLBACK").await.unwrap();
        relay.wait_for_log("streaming").await;
        world.insert("b", 30).await;
        eventually("the new rows are published", || async {
            (world.emulator.journal().counts().stored_messages >= 30).then_some(())
        })
        .await;
        // Start another relay, because `assert_published_once` accepts no error in the log, and
        // this log has the error of the lost slot.
        relay.stop().await;
        let relay = world.streaming().await;
        world.assert_published_once(relay).await;
    }
}

/// The capture record is durable, but the position of the slot is not recorded yet. Every row that
/// is committed after the capture record must be published.
#[tokio::test(flavor = "multi_thread")]
async fn a_crash_after_the_capture_record_loses_no_row() {
    for (kind, dispatch) in [
        (Kind::Events, "full"),
        (Kind::Numbered, "exceptions"),
        (Kind::Partitioned, "full"),
    ] {
        let mut world = World::new(kind, 100).await.without_slot().await;
        world.more.push(("POSTRIDER_DISPATCH", dispatch.to_owned()));
        let (relay, lock) = stopped_before_its_capture_record(&world).await;
        let row = stop_after_the_capture_record(&world, lock).await;
        world.insert("a", 50).await;
        kill_while_it_waits(&world, relay).await;
        row.batch_execute("ROLLBACK").await.unwrap();
        world.insert("a", 50).await;
        let relay = world.relay();
        world.assert_published_once(relay).await;
    }
}

/// Two relays with different slots start at the same time. The refused relay must drop its slot,
/// because a slot that no relay reads retains WAL.
#[tokio::test(flavor = "multi_thread")]
async fn of_two_first_starts_on_one_table_the_refused_one_drops_its_slot() {
    let mut world = World::new(Kind::Events, 100).await.without_slot().await;
    let (slow, xid) = begin(&world.database).await;
    let first = world.relay();
    wait_until_waited_for(&world.database, &xid).await;
    world.more.push(("POSTRIDER_SLOT", "second".to_owned()));
    let second = world.relay();
    let waiting = "SELECT count(*) FROM pg_replication_slots WHERE active";
    eventually("both relays create their slots", || async {
        (world.database.number(waiting).await == 2).then_some(())
    })
    .await;
    slow.batch_execute("COMMIT").await.unwrap();
    let is_refused = |relay: &Relay| relay.log().contains("error[table-captured]");
    eventually("one relay is refused", || async {
        (is_refused(&first) || is_refused(&second)).then_some(())
    })
    .await;
    let (winner, loser) = if is_refused(&first) {
        (second, first)
    } else {
        (first, second)
    };
    assert!(!loser.wait().await.success());
    winner.wait_for_log("streaming").await;
    let slots = "SELECT count(*) FROM pg_replication_slots";
    assert_eq!(world.database.number(slots).await, 1, "{}", winner.log());
    world.insert("a", 20).await;
    world.note().await;
    world.wait_until_published(&winner).await;
    winner.stop().await;
    let messages = world.emulator.journal().counts().stored_messages;
    assert_eq!(messages, 20, "no old row");
}

/// A first start publishes nothing from the tables, so it is not a recovery. The relay must not report it
/// as a recovery, no matter how often the relay tries again.
#[tokio::test(flavor = "multi_thread")]
async fn a_first_start_that_finds_no_free_slot_is_not_reported_as_a_recovery() {
    let server = ScratchPostgres::builder()
        .setting("wal_level", "logical")
        .setting("max_replication_slots", "1")
        .start()
        .unwrap();
    let emulator = harness::emulator().await;
    let world = World::on(server, Kind::Numbered, 20, emulator).await;
    let mut world = world.without_slot().await;
    let taken = "SELECT pg_create_physical_replication_slot('taken')";
    world.execute(taken).await;
    let addr = free_addr();
    world.more.push(("POSTRIDER_HTTP_ADDR", addr.clone()));
    let relay = world.relay();
    eventually("the relay has tried twice", || async {
        let tries = relay.log().matches("creating the slot").count();
        (tries >= 2).then_some(())
    })
    .await;
    world
        .execute("SELECT pg_drop_replication_slot('taken')")
        .await;
    relay.wait_for_log("streaming").await;
    let log = relay.log();
    assert!(!log.contains("without a record"), "{log}");
    assert_eq!(metric(&addr, "postrider_recoveries_total").await, None);
    world.insert("a", 20).await;
    world.assert_published_once(relay).await;
}
