//! The commands count the waiting events of a large table without reading the table.

use super::World;
use super::table::Kind;

/// More than the size up to which a table is read without an index (128 MiB).
const LARGE: &str = "\
    INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, payload) \
    SELECT 'order', 'old', 'OrderPlaced', to_jsonb(repeat('x', 1800)) FROM generate_series(1, 80000)";

#[tokio::test(flavor = "multi_thread")]
async fn waiting_events_of_a_large_table_are_counted() {
    let mut world = World::new(Kind::Events, 0).await.without_slot().await;
    world.execute(LARGE).await;
    let bytes = "SELECT pg_relation_size('outbox.events')";
    assert!(world.database.number(bytes).await > 128 << 20);
    world.streaming().await.stop().await;
    world.insert("new", 40).await;
    let shown = world.run(&["slot", "show", "--json"], &[]);
    let shown: serde_json::Value = serde_json::from_slice(&shown.stdout).unwrap();
    assert_eq!(shown["pending_events"], 40, "{shown:#}");
    // Reading that many rows would take long.
    world.insert_at_once("new", 200_000).await;
    let shown = world.run(&["slot", "show", "--json"], &[]);
    let shown: serde_json::Value = serde_json::from_slice(&shown.stdout).unwrap();
    assert!(shown["pending_events"].is_null(), "{shown:#}");
}
