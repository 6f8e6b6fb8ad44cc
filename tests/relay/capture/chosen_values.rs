//! Tests with writers that fill the columns `inserted_xid` and `seq` themselves, like an ORM that writes
//! every column. The relay publishes each row regardless of these values, and the values do not affect
//! other rows.

use super::World;
use super::table::Kind;
use crate::harness;

/// Inserts `rows` rows, one transaction per row. `inserted_xid` and `seq` are SQL expressions for
/// the columns of these names.
async fn insert_with(world: &mut World, key: &str, inserted_xid: &str, seq: &str, rows: u32) {
    for _ in 0..rows {
        let sql = format!(
            "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, payload, inserted_xid, \
                 seq) OVERRIDING SYSTEM VALUE \
             VALUES ('order', '{key}', 'New', '{{\"n\": {}}}', {inserted_xid}, {seq})",
            world.next
        );
        world.next += 1;
        world.execute(&sql).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_with_zeros_in_inserted_xid_and_seq_are_published() {
    for loses_slot in [false, true] {
        let (mut world, relay) = World::served(Kind::Events, 20).await;
        if loses_slot {
            relay.stop().await;
            insert_with(&mut world, "zero", "'0'", "0", 10).await;
            world.database.drop_slot().await;
            let relay = world.relay();
            world.assert_published_once(relay).await;
        } else {
            insert_with(&mut world, "zero", "'0'", "0", 10).await;
            world.insert("a", 20).await;
            world.assert_published_once(relay).await;
        }
    }
}

/// `inserted_xid` is the id of a transaction that does not exist yet, as in a restored dump from a
/// server with higher transaction ids.
#[tokio::test(flavor = "multi_thread")]
async fn rows_of_a_future_transaction_are_published_from_the_table_too() {
    let (mut world, relay) = World::served(Kind::Events, 20).await;
    relay.stop().await;
    insert_with(&mut world, "future", "'1000000000000'", "DEFAULT", 10).await;
    world.insert("a", 20).await;
    world.database.drop_slot().await;
    let relay = world.relay();
    world.assert_published_once(relay).await;
}

/// The old rows were restored from a server with higher transaction ids. The relay must still treat them as
/// old when the new server reaches these ids.
#[tokio::test(flavor = "multi_thread")]
async fn old_rows_of_a_restored_table_stay_old_when_the_server_reaches_their_transaction_ids() {
    for dispatch in ["full", "exceptions"] {
        let mut world = World::new(Kind::Events, 0).await.without_slot().await;
        world.more = vec![("POSTRIDER_DISPATCH", dispatch.to_owned())];
        let restore = "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, payload, inserted_xid) \
             SELECT 'order', 'old', 'Old', '{}', \
                 (pg_current_xact_id()::text::bigint + 100 + n)::text::xid8 \
             FROM generate_series(1, 20) n";
        world.execute(restore).await;
        // After a savepoint, the `xmin` of new rows is a subtransaction, not the transaction itself.
        let in_a_savepoint =
            format!("BEGIN; SELECT pg_current_xact_id(); SAVEPOINT s; {restore}; COMMIT");
        world.execute(&in_a_savepoint).await;
        let (mut world, relay) = world.serve(5).await;
        relay.stop().await;
        world.insert("later", 200).await;
        let reached = "SELECT bool_and(inserted_xid < pg_current_xact_id())::int::bigint \
                       FROM outbox.events WHERE event_type = 'Old'";
        assert_eq!(world.database.number(reached).await, 1);
        world.database.drop_slot().await;
        let relay = world.relay();
        relay.wait_for_log("recovered").await;
        if dispatch == "full" {
            world.assert_published_once(relay).await;
        } else {
            world.assert_published(relay).await;
        }
    }
}

/// The `inserted_xid` of a row is 50 ids ahead of the server. The server reaches this id while the row
/// waits in a recovery. Another relay then continues the recovery, and must publish the row before the
/// later rows of its key.
#[tokio::test(flavor = "multi_thread")]
async fn a_row_of_a_near_future_transaction_keeps_its_place_in_a_continued_recovery() {
    const AHEAD: &str = "(pg_current_xact_id()::text::bigint + 50)::text::xid8";
    let (mut world, relay) = World::served(Kind::Events, 20).await;
    relay.stop().await;
    insert_with(&mut world, "ahead", AHEAD, "DEFAULT", 1).await;
    world.database.drop_slot().await;
    world.emulator.faults().refuse_connections(true);
    let relay = world.relay();
    relay.wait_for_log("finished reading the table").await;
    insert_with(&mut world, "ahead", "DEFAULT", "DEFAULT", 60).await;
    relay.kill_9();
    harness::wait_until_killed_relays_are_gone(&world.database, &world.emulator).await;
    let relay = world.relay();
    relay.wait_for_log("continuing a recovery").await;
    world.emulator.faults().refuse_connections(false);
    world.assert_published_once(relay).await;
}

/// One row with a very high `seq` must not make a recovery miss rows with an ordinary `seq`.
#[tokio::test(flavor = "multi_thread")]
async fn a_very_high_seq_does_not_change_the_order_of_a_recovery() {
    let (mut world, relay) = World::served(Kind::Events, 20).await;
    insert_with(&mut world, "ahead", "DEFAULT", "9223372036854775806", 1).await;
    world.insert("a", 20).await;
    world.note().await;
    world.wait_until_published(&relay).await;
    // Restart the relay twice, so that the floor rises past the row with the high `seq`.
    relay.stop().await;
    let relay = world.streaming().await;
    world.insert("b", 5).await;
    world.note().await;
    world.wait_until_published(&relay).await;
    world.wait_until_compared(&relay).await;
    relay.stop().await;
    let relay = world.streaming().await;
    world.wait_until_compared(&relay).await;
    relay.stop().await;
    world.insert("c", 50).await;
    world.database.drop_slot().await;
    let relay = world.relay();
    world.insert("c", 100).await;
    world.assert_published_once(relay).await;
}

/// With `inserted_xid` = 0, only `xmin` identifies the transaction of a row. Here `xmin` is the id of a
/// subtransaction, and `pg_current_snapshot()` lists no subtransactions. So the relay could mistake the row
/// for a row that was committed before the first start.
#[tokio::test(flavor = "multi_thread")]
async fn a_row_with_inserted_xid_0_from_a_savepoint_open_at_the_first_start_is_published() {
    let mut world = World::new(Kind::Events, 20).await;
    // Keep the slot but delete the capture record, so that the relay begins to capture the table at
    // its first start.
    world.database.execute("DELETE FROM outbox.capture").await;
    let slow = harness::connect(&world.database.url).await;
    let insert = "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, payload, \
                      inserted_xid) VALUES ('order', 'zero', 'New', '{\"n\": 1}', '0')";
    let begin = "BEGIN; CREATE TABLE public.unrelated (id int); SAVEPOINT s";
    slow.batch_execute(&format!("{begin}; {insert}; RELEASE s"))
        .await
        .unwrap();
    world.next = 2;
    // Use up higher ids. The `xmax` of the snapshot of the first start is then above the id of the
    // subtransaction, so the subtransaction looks finished in this snapshot.
    world
        .execute(
            "DO $$ BEGIN FOR i IN 1..5 LOOP PERFORM pg_current_xact_id(); COMMIT; END LOOP; END $$",
        )
        .await;
    let relay = world.streaming().await;
    world.wait_until_compared(&relay).await;
    relay.stop().await;
    world.database.drop_slot().await;
    let relay = world.relay();
    relay.wait_for_log("recovering").await;
    slow.batch_execute("COMMIT").await.unwrap();
    world.insert("a", 20).await;
    world.assert_published_once(relay).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_with_inserted_xid_0_in_a_partition_survive_a_lost_slot() {
    let (mut world, relay) = World::served(Kind::Partitioned, 20).await;
    relay.stop().await;
    let insert = "INSERT INTO public.parts (aggregatetype, aggregateid, event_type, payload, day, \
                      inserted_xid) \
                  SELECT 'order', 'zero', 'New', jsonb_build_object('n', 1000 + i), '2021-05-05', '0' \
                  FROM generate_series(1, 5) i";
    world.execute(insert).await;
    world.database.drop_slot().await;
    let relay = world.relay();
    world.assert_published_once(relay).await;
}
