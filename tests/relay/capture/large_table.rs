//! The commands count the waiting events of a large table without reading the table.

use super::World;
use super::table::Kind;

/// More rows than the number up to which waiting events are counted.
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
    // A table of up to 128 MiB is read without an index.
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
    assert_eq!(pending(&world), None, "{kind:?}: too many to count");
}

fn pending(world: &World) -> Option<u64> {
    let shown = world.run(&["slot", "show", "--json"], &[]);
    let shown: serde_json::Value = serde_json::from_slice(&shown.stdout).unwrap();
    shown["pending_events"].as_u64()
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
