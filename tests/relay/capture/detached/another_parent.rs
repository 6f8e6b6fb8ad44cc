//! Tests of a partition with undelivered rows that is detached from the captured table, and attached to another table.

use super::super::World;
use super::super::table::Kind;
use super::detached_and_lost;
use crate::harness::Relay;

const MOVE: &str = "ALTER TABLE public.parts DETACH PARTITION public.parts_2; \
                    ALTER TABLE public.archive ATTACH PARTITION public.parts_2 \
                        FOR VALUES FROM ('2022-01-01') TO ('2023-01-01')";

/// Starts a relay that captures `public.parts` and `public.archive`.
async fn serving_both() -> (World, Relay) {
    let mut world = World::new(Kind::Partitioned, 20).await;
    world
        .execute(
            "CREATE TABLE public.archive (LIKE public.parts INCLUDING ALL) PARTITION BY RANGE (day); \
             ALTER PUBLICATION postrider ADD TABLE public.archive",
        )
        .await;
    let settings = "[[tables]]\ntable = \"public.archive\"\n[[tables]]\ntable = \"public.parts\"\n";
    std::fs::write(world.settings.path(), settings).unwrap();
    // Remove the slot that `init` has created for one table, so that the relay creates it again and
    // captures both tables.
    world = world.without_slot().await;
    world.serve(50).await
}

/// The relay publishes the partition's rows as rows of the other table.
#[tokio::test(flavor = "multi_thread")]
async fn a_partition_that_moves_to_another_captured_table_is_published_once() {
    let (world, relay) = serving_both().await;
    let mut world = detached_and_lost(world, relay, MOVE).await;
    let relay = world.relay();
    world.assert_published_once(relay).await;
}

/// The other table still has its capture record, but the settings no longer name it, so nobody reads its rows. The
/// relay must publish the partition's rows as rows of the table from which it was detached.
#[tokio::test(flavor = "multi_thread")]
async fn rows_of_a_partition_that_moves_to_a_table_that_is_no_longer_captured_are_published() {
    let (world, relay) = serving_both().await;
    relay.stop().await;
    let settings = world.kind.settings("public.parts");
    std::fs::write(world.settings.path(), settings).unwrap();
    world
        .execute("ALTER PUBLICATION postrider DROP TABLE public.archive")
        .await;
    let (world, relay) = world.serve(10).await;
    let mut world = detached_and_lost(world, relay, MOVE).await;
    let relay = world.relay();
    world.assert_published_once(relay).await;
}
