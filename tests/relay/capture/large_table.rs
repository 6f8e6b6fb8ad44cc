//! Tests that the commands count the waiting events of a large table without reading the whole table.

use super::World;
use super::table::Kind;

/// One more than the commands count: they count at most 200,000 waiting events.
const MANY: u32 = 200_001;

async fn waiting_events_are_counted(kind: Kind, old: u32) {
    let mut world = World::new(kind, 0).await.without_slot().await;
    let table = world.table.clone();
    let wide = format!("ALTER TABLE {table} ADD COLUMN filler text DEFAULT repeat('x', 1800)");
    world.execute(&wide).await;
    let old = kind.insert_old(&table, old);
    world.execute(&old).await;
    let narrow = format!("ALTER TABLE {table} ALTER COLUMN filler SET DEFAULT ''");
    world.execute(&narrow).await;
    // The commands read a table of up to 128 MiB without an index, so this test needs a larger
    // table.
    let size = format!(
        "SELECT greatest(pg_relation_size('{table}'), \
             (SELECT max(pg_relation_size(relid)) FROM pg_partition_tree('{table}')))"
    );
    let bytes = world.database.number(&size).await;
    assert!(bytes > 128 << 20, "{kind:?}: {bytes}");
    world.streaming().await.stop().await;
    world.insert("new", 40).await;
    assert_eq!(pending(&world), Some(40), "{kind:?}");
    world.insert_at_once("new", MANY).await;
    assert_eq!(pending(&world), Some(200_000), "{kind:?}: at least");
    assert_eq!(shown(&world)["pending_is_lower_bound"], true, "{kind:?}");
}

fn shown(world: &World) -> serde_json::Value {
    let shown = world.run(&["slot", "show", "--json"], &[]);
    serde_json::from_slice(&shown.stdout).unwrap()
}

fn pending(world: &World) -> Option<u64> {
    shown(world)["pending_events"].as_u64()
}

#[tokio::test(flavor = "multi_thread")]
async fn waiting_events_of_a_large_table_are_counted() {
    waiting_events_are_counted(Kind::Events, 80_000).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn waiting_events_of_a_large_numbered_table_are_counted() {
    waiting_events_are_counted(Kind::Numbered, 80_000).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn waiting_events_of_a_large_partition_are_counted() {
    waiting_events_are_counted(Kind::Partitioned, 300_000).await;
}
