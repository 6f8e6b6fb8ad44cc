//! Tests of a first start on a slot that `init` has created. The relay must deliver all rows that are
//! committed after the creation of the slot.

use crate::harness::{self, Database, Relay};

/// Inserts rows whose keys begin with `prefix`. The relay publishes rows of a gap later than streamed
/// rows, so both kinds of rows need different keys.
async fn insert(database: &Database, prefix: &str, rows: u32) {
    database
        .execute(&format!(
            "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, version) \
             SELECT 'order', '{prefix}-' || n % 3, 'OrderPlaced', n \
             FROM generate_series(1, {rows}) n"
        ))
        .await;
}

/// From PostgreSQL 18 on, the stream silently skips rows that were inserted while the publication did
/// not exist. On older versions, the stream ends with an error at such a row, in each session.
#[tokio::test(flavor = "multi_thread")]
async fn rows_between_the_slot_and_its_publication_are_delivered_at_a_first_start() {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    database.execute("DROP PUBLICATION postrider").await;
    insert(&database, "gap", 50).await;
    database
        .execute(
            "CREATE PUBLICATION postrider FOR TABLE outbox.events \
             WITH (publish = 'insert', publish_via_partition_root = true)",
        )
        .await;
    insert(&database, "o", 20).await;
    assert_first_start_delivers(&database, &emulator).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_the_publication_left_out_before_a_first_start_are_delivered() {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    for (change, prefix, rows) in [("DROP", "gap", 50), ("ADD", "o", 20)] {
        let sql = format!("ALTER PUBLICATION postrider {change} TABLE outbox.events");
        database.execute(&sql).await;
        insert(&database, prefix, rows).await;
    }
    assert_first_start_delivers(&database, &emulator).await;
}

async fn assert_first_start_delivers(
    database: &Database,
    emulator: &pubsub_emulator::RunningEmulator,
) {
    let relay = Relay::start(database, emulator);
    database.wait_until_recorded().await;
    let states = "SELECT string_agg(DISTINCT state, ' ') FROM outbox.dispatch";
    assert_eq!(database.text(states).await, "published", "{}", relay.log());
    let report = harness::check(database, emulator).await;
    assert!(report.is_clean(), "{report}\n{}", relay.log());
    assert_eq!(report.expected_events, 70);
    relay.stop().await;
}
