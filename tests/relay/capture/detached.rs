//! Tests of detached partitions. As long as such a table exists, the relay publishes its rows, even if
//! the slot is lost.

mod another_parent;
mod during_recovery;
mod noted;

use super::World;
use super::table::Kind;
use crate::harness::{Relay, connect, eventually};
use crate::privileges::login_role;

const DETACH: &str = "ALTER TABLE public.parts DETACH PARTITION public.parts_2";

/// Commits new rows, one transaction per row. The rows of each key are in one partition. Otherwise
/// the order of a key could change, because the relay publishes the rows of a detached partition
/// before all other rows.
async fn insert(world: &mut World, prefix: &str, rows: u32) {
    let (first, last) = (world.next, world.next + rows - 1);
    world.next += rows;
    let insert = format!(
        "DO $$ BEGIN FOR i IN {first}..{last} LOOP \
             INSERT INTO public.parts (aggregatetype, aggregateid, event_type, payload, day) \
             SELECT 'order', '{prefix}-' || i % 4, 'New', jsonb_build_object('n', i), \
                 date '2020-01-01' + i % 4 * 366; \
             COMMIT; END LOOP; END $$"
    );
    world.execute(&insert).await;
}

/// Stops the relay, inserts rows, runs the statements in `detach`, and drops the slot, so that only
/// a recovery can publish the rows. Does not start another relay.
async fn detached_and_lost(mut world: World, relay: Relay, detach: &str) -> World {
    relay.stop().await;
    insert(&mut world, "a", 40).await;
    world.note().await;
    for sql in detach.split(';') {
        world.execute(sql).await;
    }
    world.database.drop_slot().await;
    world.insert_into_first_partition("b", 20).await;
    world
}

/// Waits until the floor is above every row, so that a recovery repeats none of the earlier rows.
/// (Without records, a recovery repeats all rows from the floor on, beginning with the rows of the
/// detached partition.)
async fn wait_until_below_the_floor(world: &World) {
    let above = format!(
        "SELECT count(*) FROM {} e WHERE e.inserted_xid >= (SELECT floor FROM outbox.capture)",
        world.table
    );
    eventually("the floor is above every row", || async {
        (world.database.number(&above).await == 0).then_some(())
    })
    .await;
}

/// The exit code and the output of `postrider audit`.
fn audit(world: &World) -> (Option<i32>, String) {
    let done = world.run(&["audit"], &[("GOOGLE_CLOUD_PROJECT", "demo")]);
    let said = String::from_utf8_lossy(&done.stdout).into_owned();
    let error = String::from_utf8_lossy(&done.stderr);
    (done.status.code(), format!("{said}{error}"))
}

/// Waits until the capture record no longer names a detached partition.
async fn wait_until_forgotten(world: &World) {
    let kept = "SELECT coalesce(sum(cardinality(detached)), 0) FROM outbox.capture";
    eventually("no detached partition is left", || async {
        (world.database.number(kept).await == 0).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_of_a_detached_partition_are_published_after_a_lost_slot() {
    for detach in [
        DETACH,
        "ALTER TABLE public.parts DETACH PARTITION public.parts_2 CONCURRENTLY",
        "ALTER TABLE public.parts DETACH PARTITION public.parts_2; CREATE SCHEMA old; \
         ALTER TABLE public.parts_2 SET SCHEMA old; ALTER TABLE old.parts_2 RENAME TO kept",
    ] {
        let (world, relay) = World::served(Kind::Partitioned, 50).await;
        let mut world = detached_and_lost(world, relay, detach).await;
        let (code, said) = audit(&world);
        assert_eq!(code, Some(1), "{said}");
        let relay = world.relay();
        world.assert_published_once(relay).await;
        let relay = world.streaming().await;
        wait_until_forgotten(&world).await;
        world.wait_until_compared(&relay).await;
        let (code, said) = audit(&world);
        assert_eq!(code, Some(0), "{said}");
        relay.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_of_a_detached_partition_of_a_partition_are_published_after_a_lost_slot() {
    for detach in [
        "ALTER TABLE public.tree DETACH PARTITION public.tree_1",
        "ALTER TABLE public.parts DETACH PARTITION public.tree",
    ] {
        let world = World::new(Kind::Partitioned, 20).await;
        world
            .execute(
                "CREATE TABLE public.tree (LIKE public.parts INCLUDING ALL) \
                     PARTITION BY RANGE (day); \
                 CREATE TABLE public.tree_1 PARTITION OF public.tree \
                     FOR VALUES FROM ('2030-01-01') TO ('2030-07-01'); \
                 ALTER TABLE public.parts ATTACH PARTITION public.tree \
                     FOR VALUES FROM ('2030-01-01') TO ('2031-01-01')",
            )
            .await;
        let (mut world, relay) = world.serve(50).await;
        relay.stop().await;
        let insert = "INSERT INTO public.parts (aggregatetype, aggregateid, event_type, payload, day) \
                      SELECT 'order', 'tree', 'New', jsonb_build_object('n', i), '2030-03-03' \
                      FROM generate_series(1001, 1030) i";
        world.execute(insert).await;
        let world = detached_and_lost_now(&mut world, detach).await;
        let relay = world.relay();
        world.assert_published_once(relay).await;
    }
}

async fn detached_and_lost_now<'w>(world: &'w mut World, detach: &str) -> &'w mut World {
    world.note().await;
    world.execute(detach).await;
    world.database.drop_slot().await;
    world
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_of_a_detached_partition_are_published_once_the_relay_may_read_it() {
    let mut world = World::new(Kind::Partitioned, 20).await;
    let url = login_role(&world.database).await;
    world.more.push(("DATABASE_URL", url.clone()));
    let (world, relay) = world.serve(50).await;
    let mut world = detached_and_lost(world, relay, DETACH).await;
    let relay = world.relay();
    relay
        .wait_for_log("GRANT SELECT ON public.parts_2 TO shop_relay")
        .await;
    world.wait_until_compared(&relay).await;
    relay.stop().await;
    let relay = world.streaming().await;
    world.wait_until_compared(&relay).await;
    assert!(world.missing() > 0);
    let more = [
        ("GOOGLE_CLOUD_PROJECT", "demo"),
        ("DATABASE_URL", url.as_str()),
    ];
    let done = world.run(&["audit"], &more);
    let said = String::from_utf8_lossy(&done.stdout);
    assert_eq!(done.status.code(), Some(1), "{said}");
    assert!(
        said.contains("GRANT SELECT ON public.parts_2 TO shop_relay"),
        "{said}"
    );
    relay.stop().await;
    world
        .execute("GRANT SELECT ON public.parts_2 TO shop_relay")
        .await;
    let relay = world.relay();
    world.assert_published_once(relay).await;
    let relay = world.streaming().await;
    wait_until_forgotten(&world).await;
    relay.stop().await;
}

/// The stream contains all rows of the partition. So the relay needs no right to read the partition, and
/// forgets it.
#[tokio::test(flavor = "multi_thread")]
async fn a_detached_partition_is_forgotten_once_the_stream_has_delivered_its_rows() {
    let mut world = World::new(Kind::Partitioned, 20).await;
    let url = login_role(&world.database).await;
    world.more.push(("DATABASE_URL", url));
    let (mut world, relay) = world.serve(50).await;
    world.insert("a", 20).await;
    world.note().await;
    world.execute(DETACH).await;
    world.insert_into_first_partition("b", 20).await;
    relay.stop().await;
    let relay = world.relay();
    world.assert_published_once(relay).await;
    let relay = world.streaming().await;
    world.wait_until_compared(&relay).await;
    wait_until_forgotten(&world).await;
    assert!(!relay.log().contains("GRANT SELECT"), "{}", relay.log());
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_of_a_gap_in_a_partition_that_is_then_detached_are_published() {
    let (mut world, relay) = World::served(Kind::Partitioned, 50).await;
    world
        .execute(
            "CREATE TABLE public.another (id int); \
             ALTER PUBLICATION postrider ADD TABLE public.another; \
             ALTER PUBLICATION postrider DROP TABLE public.parts",
        )
        .await;
    relay.wait_for_log("publication-drift").await;
    insert(&mut world, "gap", 40).await;
    world.note().await;
    world.execute(DETACH).await;
    world
        .execute("ALTER PUBLICATION postrider ADD TABLE public.parts")
        .await;
    world.insert_into_first_partition("b", 20).await;
    world.assert_published_once(relay).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_partition_is_forgotten() {
    let (world, relay) = World::served(Kind::Partitioned, 50).await;
    relay.stop().await;
    world.execute(DETACH).await;
    world.execute("DROP TABLE public.parts_2").await;
    world.database.drop_slot().await;
    let relay = world.streaming().await;
    world.wait_until_compared(&relay).await;
    wait_until_forgotten(&world).await;
    assert!(!relay.log().contains("GRANT"), "{}", relay.log());
    relay.stop().await;
}

/// The old table was renamed and still has undelivered rows. A new table has the former name of the old
/// table. The relay must publish the rows of both tables.
#[tokio::test(flavor = "multi_thread")]
async fn rows_of_a_table_that_was_renamed_and_replaced_are_published_after_a_lost_slot() {
    for kind in [Kind::Numbered, Kind::Uuid] {
        let (world, relay) = World::served(kind, 50).await;
        relay.stop().await;
        let mut world = world;
        world.insert("a", 40).await;
        world.note().await;
        let replace = "ALTER TABLE TABLE_NAME RENAME TO before; \
                       CREATE TABLE TABLE_NAME (LIKE public.before INCLUDING ALL); \
                       ALTER PUBLICATION postrider SET TABLE TABLE_NAME";
        world.execute(replace).await;
        world.database.drop_slot().await;
        world.insert("b", 20).await;
        let relay = world.relay();
        world.assert_published_once(relay).await;
    }
}

/// The supervisor notices the partition and wakes the auditor, which publishes the rows.
#[tokio::test(flavor = "multi_thread")]
async fn rows_of_an_attached_partition_are_published_without_a_restart() {
    let (mut world, relay) = World::served(Kind::Partitioned, 50).await;
    world.attach_filled_partition(30).await;
    world.assert_published_once(relay).await;
}

/// Published events have no record, so the recovery repeats rows.
#[tokio::test(flavor = "multi_thread")]
async fn rows_of_a_detached_partition_are_published_after_a_lost_slot_without_records() {
    let mut world = World::new(Kind::Partitioned, 20).await;
    let exceptions = ("POSTRIDER_DISPATCH", "exceptions".to_owned());
    world.more.push(exceptions);
    let (world, relay) = world.serve(50).await;
    wait_until_below_the_floor(&world).await;
    let mut world = detached_and_lost(world, relay, DETACH).await;
    let relay = world.relay();
    world.assert_published(relay).await;
    let relay = world.streaming().await;
    wait_until_forgotten(&world).await;
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_of_a_detached_partition_are_published_without_records_once_the_relay_may_read_it() {
    let mut world = World::new(Kind::Partitioned, 20).await;
    let url = login_role(&world.database).await;
    world.more.push(("DATABASE_URL", url));
    world
        .more
        .push(("POSTRIDER_DISPATCH", "exceptions".to_owned()));
    let (world, relay) = world.serve(50).await;
    wait_until_below_the_floor(&world).await;
    let mut world = detached_and_lost(world, relay, DETACH).await;
    let relay = world.relay();
    let grant = "GRANT SELECT ON public.parts_2 TO shop_relay";
    relay.wait_for_log(grant).await;
    relay.wait_for_log("recovered").await;
    world.execute(grant).await;
    world.assert_published(relay).await;
    let relay = world.streaming().await;
    wait_until_forgotten(&world).await;
    relay.stop().await;
}

/// The partition becomes a captured table itself. Its undelivered rows were inserted before this
/// capture began, so the relay must publish them as rows of a detached partition.
#[tokio::test(flavor = "multi_thread")]
async fn rows_of_a_partition_that_becomes_a_captured_table_are_published_once() {
    let (world, relay) = World::served(Kind::Partitioned, 50).await;
    let mut world = detached_and_lost(world, relay, DETACH).await;
    world
        .execute("ALTER PUBLICATION postrider ADD TABLE public.parts_2")
        .await;
    let settings = "[[tables]]\ntable = \"public.parts\"\n[[tables]]\ntable = \"public.parts_2\"\n";
    std::fs::write(world.settings.path(), settings).unwrap();
    let relay = world.relay();
    world.assert_published_once(relay).await;
}

/// A transaction that begins first may insert its row last, so transaction ids do not show the
/// insertion order. The identity column does.
#[tokio::test(flavor = "multi_thread")]
async fn rows_of_a_detached_partition_keep_the_order_of_an_identity_column() {
    let (mut world, relay) = World::served(Kind::Identity, 20).await;
    relay.stop().await;
    let early = connect(&world.database.url).await;
    for _ in 0..3 {
        let begin = "BEGIN; SELECT pg_current_xact_id()";
        early.batch_execute(begin).await.unwrap();
        let first = world.row_sql("a");
        world.execute(&first).await;
        let second = world.row_sql("a");
        early.batch_execute(&second).await.unwrap();
        early.batch_execute("COMMIT").await.unwrap();
    }
    world.note().await;
    let detach = "ALTER TABLE public.ident DETACH PARTITION public.ident_1";
    world.execute(detach).await;
    world.database.drop_slot().await;
    let relay = world.relay();
    world.assert_published_once(relay).await;
}

/// One row cannot be delivered, because its topic is missing. All other rows are delivered, and
/// rows that were copied back into the table are published once.
#[tokio::test(flavor = "multi_thread")]
async fn an_undeliverable_row_of_a_detached_partition_holds_up_no_other_key() {
    let (mut world, relay) = World::served(Kind::Partitioned, 50).await;
    relay.stop().await;
    insert(&mut world, "a", 40).await;
    world.note().await;
    let gone = "projects/demo/topics/gone.events";
    world.emulator.faults().remove_topic(gone);
    world
        .execute(
            "INSERT INTO public.parts (aggregatetype, aggregateid, event_type, payload, day) \
                 VALUES ('gone', 'g', 'Gone', '{}', '2022-03-03'); \
             ALTER TABLE public.parts DETACH PARTITION public.parts_2; \
             CREATE TABLE public.again PARTITION OF public.parts \
                 FOR VALUES FROM ('2022-01-01') TO ('2023-01-01'); \
             INSERT INTO public.again SELECT * FROM public.parts_2",
        )
        .await;
    world.database.drop_slot().await;
    let relay = world.relay();
    world.wait_until_published(&relay).await;
    world.insert_into_first_partition("b", 20).await;
    world.note().await;
    world.wait_until_published(&relay).await;
    let report = world.report();
    assert!(
        report.is_clean() && report.duplicates.is_empty(),
        "{report}\n{}",
        relay.log()
    );
    relay.stop().await;
}
