//! `init` adds `inserted_xid` to a captured table that never had the column, or has lost it.

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
async fn a_column_added_by_init_is_known_even_if_the_table_is_rewritten() {
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
async fn a_column_that_was_dropped_and_added_by_init_repeats_nothing() {
    for kind in [Kind::Uuid, Kind::Events] {
        let (world, relay) = World::served(kind, 20).await;
        relay.stop().await;
        for _ in 0..2 {
            world
                .execute("ALTER TABLE TABLE_NAME DROP COLUMN inserted_xid")
                .await;
            // Run a relay while the table has no `inserted_xid`.
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
async fn a_recreated_table_without_the_column_repeats_nothing_after_init() {
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
