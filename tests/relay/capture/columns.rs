//! Tests in which `init` adds `inserted_xid` to a captured table that never had this column, or has lost
//! it.

use super::World;
use super::table::Kind;

/// Runs `init --apply`, which adds missing columns. Checks that `init` reports a complete table.
fn init(world: &World) {
    let done = world.run(&["init", "--apply"], &[]);
    let said = String::from_utf8_lossy(&done.stdout);
    assert!(
        said.contains("has columns that identify"),
        "{said}\n{done:?}"
    );
}

/// Checks that the relay repeats no row when it compares whole tables: after a restart, a change of
/// the publication, and a change of a column.
async fn assert_nothing_repeats(mut world: World) {
    for sql in [
        "SELECT 1",
        "ALTER PUBLICATION postrider SET (publish = 'insert, update')",
        "ALTER TABLE TABLE_NAME ALTER COLUMN event_type TYPE varchar(99)",
    ] {
        world.execute(sql).await;
        let relay = world.streaming().await;
        world.wait_until_compared(&relay).await;
        world.insert("after", 5).await;
        world.note().await;
        world.wait_until_published(&relay).await;
        relay.stop().await;
    }
    let relay = world.streaming().await;
    world.assert_published_once(relay).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rewrite_of_the_table_after_init_has_added_inserted_xid_repeats_nothing() {
    for kind in [Kind::Uuid, Kind::Partitioned] {
        let world = World::new(kind, 20).await;
        world
            .execute("ALTER TABLE TABLE_NAME DROP COLUMN inserted_xid")
            .await;
        let (world, relay) = world.without_slot().await.serve(20).await;
        relay.stop().await;
        init(&world);
        world.execute("VACUUM FULL TABLE_NAME").await;
        assert_nothing_repeats(world).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn dropping_inserted_xid_and_adding_it_again_by_init_repeats_nothing() {
    for kind in [Kind::Uuid, Kind::Events] {
        let (world, relay) = World::served(kind, 20).await;
        relay.stop().await;
        for _ in 0..2 {
            world
                .execute("ALTER TABLE TABLE_NAME DROP COLUMN inserted_xid")
                .await;
            // Run a relay while the table has no `inserted_xid`, so that the relay publishes rows without
            // this column.
            let relay = world.streaming().await;
            world.wait_until_compared(&relay).await;
            relay.stop().await;
            init(&world);
        }
        world.execute("VACUUM FULL TABLE_NAME").await;
        assert_nothing_repeats(world).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_recreated_without_inserted_xid_repeats_nothing_after_init() {
    let (world, relay) = World::served(Kind::Uuid, 20).await;
    relay.stop().await;
    world
        .execute(
            "ALTER TABLE TABLE_NAME RENAME TO before; \
             CREATE TABLE TABLE_NAME (LIKE public.before INCLUDING ALL); \
             ALTER TABLE TABLE_NAME DROP COLUMN inserted_xid; \
             INSERT INTO TABLE_NAME (id, aggregatetype, aggregateid, event_type, payload) \
                 SELECT id, aggregatetype, aggregateid, event_type, payload FROM public.before \
                 WHERE event_type = 'New'; \
             DROP TABLE public.before CASCADE",
        )
        .await;
    init(&world);
    world.execute("VACUUM FULL TABLE_NAME").await;
    assert_nothing_repeats(world).await;
}

/// Rows in the stream need no `seq`. A recovery reads the column from the table.
#[tokio::test(flavor = "multi_thread")]
async fn a_column_list_may_leave_out_seq() {
    let mut world = World::new(Kind::Uuid, 20).await;
    if world.database.server().major_version().unwrap() < 15 {
        eprintln!("SKIPPED: column lists need PostgreSQL 15");
        return;
    }
    let list = "id, aggregatetype, aggregateid, event_type, payload, inserted_xid";
    world
        .execute(&format!(
            "ALTER PUBLICATION postrider SET TABLE TABLE_NAME ({list})"
        ))
        .await;
    let (mut world, relay) = world.serve(30).await;
    relay.stop().await;
    world.insert_at_once("a", 30).await;
    world.database.drop_slot().await;
    world.insert("b", 30).await;
    let relay = world.streaming().await;
    world.insert("c", 30).await;
    world.assert_published_once(relay).await;
}

/// Migrations of a table often update all old rows, and each update changes the `xmin` of the row. If a row
/// is older than the column `inserted_xid`, the relay has only `xmin` to find out when the row was
/// inserted. The updated rows must stay old all the same.
#[tokio::test(flavor = "multi_thread")]
async fn old_rows_that_are_updated_after_init_has_added_the_column_are_not_published() {
    for (kind, dispatch) in [
        (Kind::Uuid, "full"),
        (Kind::Uuid, "exceptions"),
        (Kind::Partitioned, "full"),
        (Kind::Partitioned, "exceptions"),
    ] {
        let mut world = World::new(kind, 20).await;
        world
            .execute("ALTER TABLE TABLE_NAME DROP COLUMN inserted_xid")
            .await;
        world.more = vec![("POSTRIDER_DISPATCH", dispatch.to_owned())];
        let (mut world, relay) = world.without_slot().await.serve(5).await;
        relay.stop().await;
        let done = world.run(&["init", "--apply"], &[]);
        let said = String::from_utf8_lossy(&done.stdout);
        assert!(said.contains("before you update old rows"), "{said}");
        // The floor must rise although nobody inserts rows.
        let relay = world.streaming().await;
        let is_above = "SELECT count(*) FROM outbox.capture WHERE floor > ALL (added_xids) \
                        AND added_xids <> '{}'";
        crate::harness::eventually("the floor is above the new column", || async {
            (world.database.number(is_above).await == 1).then_some(())
        })
        .await;
        world
            .execute("UPDATE TABLE_NAME SET event_type = event_type")
            .await;
        relay.stop().await;
        world.database.drop_slot().await;
        let relay = world.relay();
        relay.wait_for_log("recovered").await;
        world.insert("after", 5).await;
        world.assert_published(relay).await;
    }
}
