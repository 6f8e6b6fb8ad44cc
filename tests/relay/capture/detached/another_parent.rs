//! Tests of a partition with undelivered rows that is detached from the captured table, and attached to another table.

use super::super::World;
use super::super::table::Kind;
use super::detached_and_lost;
use crate::harness::{Relay, eventually};

const MOVE: &str = "ALTER TABLE public.parts DETACH PARTITION public.parts_2; \
                    ALTER TABLE public.archive ATTACH PARTITION public.parts_2 \
                        FOR VALUES FROM ('2022-01-01') TO ('2023-01-01')";

/// As [`MOVE`], but the new parent of the partition is itself a partition of `public.archive`.
const MOVE_BELOW: &str = "ALTER TABLE public.parts DETACH PARTITION public.parts_2; \
    CREATE TABLE public.archive_2022 PARTITION OF public.archive \
        FOR VALUES FROM ('2022-01-01') TO ('2023-01-01') PARTITION BY LIST (aggregatetype); \
    ALTER TABLE public.archive_2022 ATTACH PARTITION public.parts_2 DEFAULT";

/// The settings line of a topic that does not exist.
const MISSING_TOPIC: &str = "topic = \"missing\"\n";

/// Starts a relay that captures `public.parts` and `public.archive`. `archive` has more settings of `public.archive`,
/// and `more` has more settings of the relay.
async fn serving_both(archive: &str, more: &[(&'static str, &str)]) -> (World, Relay) {
    let mut world = World::new(Kind::Partitioned, 20).await;
    for (name, value) in more {
        world.more.push((name, (*value).to_owned()));
    }
    world
        .execute(
            "CREATE TABLE public.archive (LIKE public.parts INCLUDING ALL) PARTITION BY RANGE (day); \
             ALTER PUBLICATION postrider ADD TABLE public.archive",
        )
        .await;
    let settings = format!(
        "[[tables]]\ntable = \"public.archive\"\n{archive}[[tables]]\ntable = \"public.parts\"\n"
    );
    std::fs::write(world.settings.path(), settings).unwrap();
    // Remove the slot that `init` has created for one table, so that the relay creates it again and
    // captures both tables.
    world = world.without_slot().await;
    world.serve(50).await
}

/// The relay publishes the partition's rows as rows of the other table.
#[tokio::test(flavor = "multi_thread")]
async fn a_partition_that_moves_to_another_captured_table_is_published_once() {
    let (world, relay) = serving_both("", &[]).await;
    let mut world = detached_and_lost(world, relay, MOVE).await;
    let relay = world.relay();
    world.assert_published_once(relay).await;
}

/// Moves the partition, and inserts more rows into it through its new parent. All undelivered rows of the partition now
/// belong to the new parent. So the relay must not publish them to the topic of the old parent.
async fn moved_to_a_captured_table(detach: &str) {
    let (world, relay) = serving_both(MISSING_TOPIC, &[]).await;
    let world = detached_and_lost(world, relay, detach).await;
    let insert = "INSERT INTO public.archive (aggregatetype, aggregateid, event_type, payload, day) \
                  SELECT 'order', 'archived', 'New', '{}', '2022-03-03' FROM generate_series(1, 5)";
    world.execute(insert).await;
    let relay = world.relay();
    relay.wait_for_log("topic-missing").await;
    // A recovery reads former partitions first. So it has read them when it has published the rows `b-…`.
    let published = |keys: &str| {
        format!(
            "SELECT count(*) FROM outbox.dispatch WHERE state = 'published' AND ordering_key {keys}"
        )
    };
    eventually(
        "the rows that still belong to the old parent are published",
        || async { (world.database.number(&published("LIKE 'b-%'")).await == 20).then_some(()) },
    )
    .await;
    let moved = published("IN ('a-2', 'archived')");
    assert_eq!(world.database.number(&moved).await, 0, "{}", relay.log());
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn undelivered_rows_of_a_partition_that_moves_to_another_captured_table_get_its_topic() {
    for detach in [MOVE, MOVE_BELOW] {
        moved_to_a_captured_table(detach).await;
    }
}

/// Moves the partition to a table that still has its capture record, but that the settings no longer name, so nobody
/// reads its rows. The relay must publish the partition's rows as rows of the table from which it was detached.
async fn moved_to_a_displaced_table(detach: &str, more: &[(&'static str, &str)]) {
    let (world, relay) = serving_both("", more).await;
    relay.stop().await;
    let settings = world.kind.settings("public.parts");
    std::fs::write(world.settings.path(), settings).unwrap();
    world
        .execute("ALTER PUBLICATION postrider DROP TABLE public.archive")
        .await;
    let (world, relay) = world.serve(10).await;
    let mut world = detached_and_lost(world, relay, detach).await;
    let relay = world.relay();
    if more.is_empty() {
        world.assert_published_once(relay).await;
    } else {
        world.assert_published(relay).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_of_a_partition_that_moves_to_a_table_that_is_no_longer_captured_are_published() {
    for detach in [MOVE, MOVE_BELOW] {
        moved_to_a_displaced_table(detach, &[]).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn without_records_too_rows_of_a_partition_of_a_table_that_is_no_longer_captured_are_published()
 {
    moved_to_a_displaced_table(MOVE, &[("POSTRIDER_DISPATCH", "exceptions")]).await;
}
