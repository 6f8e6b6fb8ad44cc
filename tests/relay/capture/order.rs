//! Tests that a recovery publishes the rows of each key in insertion order, regardless of their `version`
//! and of the order in which their transactions began.

use super::World;
use super::table::Kind;

const VERSIONS: [&str; 3] = ["i::text", "NULL", "CASE WHEN i % 3 = 0 THEN i::text END"];

/// Inserts 40 rows of one key, one transaction per row, and loses the slot. Checks that the rows are
/// published in insertion order. `version` is the SQL expression for the column `version` of row `i`.
async fn in_order_of_insertion(kind: Kind, version_type: &str, version: &str) {
    let world = World::new(kind, 20).await;
    if kind != Kind::Events {
        let add = format!("ALTER TABLE TABLE_NAME ADD COLUMN version {version_type}");
        world.execute(&add).await;
    }
    let (mut world, relay) = world.serve(20).await;
    relay.stop().await;
    let (column, value) = match kind {
        Kind::Partitioned => (", day", ", date '2020-01-01' + i % 4 * 366"),
        Kind::Events | Kind::Numbered | Kind::Timed | Kind::Uuid | Kind::Identity => ("", ""),
    };
    let sql = format!(
        "DO $$ BEGIN FOR i IN 1..40 LOOP \
         INSERT INTO {table} (aggregatetype, aggregateid, event_type, payload, version{column}) \
         SELECT 'order', 'key', 'New', jsonb_build_object('n', 1000 + i), ({version})::{version_type}{value}; \
         COMMIT; END LOOP; END $$",
        table = world.table
    );
    world.execute(&sql).await;
    world.database.drop_slot().await;
    let relay = world.relay();
    world.assert_published_once(relay).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_text_version_does_not_change_the_order() {
    for kind in [Kind::Numbered, Kind::Uuid, Kind::Partitioned] {
        in_order_of_insertion(kind, "text", VERSIONS[0]).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_null_version_does_not_change_the_order() {
    for kind in [Kind::Numbered, Kind::Uuid, Kind::Partitioned, Kind::Events] {
        in_order_of_insertion(kind, "bigint", VERSIONS[1]).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_partly_null_version_does_not_change_the_order() {
    for kind in [Kind::Numbered, Kind::Uuid, Kind::Events] {
        in_order_of_insertion(kind, "bigint", VERSIONS[2]).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_version_that_counts_down_does_not_change_the_order() {
    for kind in [Kind::Numbered, Kind::Events] {
        in_order_of_insertion(kind, "bigint", "100 - i").await;
    }
}

/// Checks the order of a key when the transaction that began first inserts its row last.
async fn overlapping_transactions_keep_the_order(kind: Kind) {
    let (mut world, relay) = World::served(kind, 20).await;
    relay.stop().await;
    let first = crate::harness::connect(&world.database.url).await;
    for round in 0..5 {
        let early = format!("BEGIN; {}", world.row_sql(&format!("other-{round}")));
        first.batch_execute(&early).await.unwrap();
        let row = world.row_sql("shared");
        world.execute(&row).await;
        let late = format!("{}; COMMIT", world.row_sql("shared"));
        first.batch_execute(&late).await.unwrap();
    }
    world.database.drop_slot().await;
    let relay = world.relay();
    world.assert_published_once(relay).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn overlapping_transactions_keep_the_order_of_a_key() {
    for kind in [Kind::Events, Kind::Numbered, Kind::Uuid, Kind::Partitioned] {
        overlapping_transactions_keep_the_order(kind).await;
    }
}
