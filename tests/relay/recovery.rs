//! The slot is lost, made anew, or was never there, and nothing is lost with it: the rows without
//! a record come from the tables, each key in its order, and then the stream goes on.

use crate::harness::{self, Database, Relay};

/// Inserts events with the versions `first..first + count`, one transaction each, over 7 keys.
/// Versions never repeat: they are what a key is ordered by when it comes from the table.
async fn insert(database: &Database, first: u32, count: u32) {
    database.execute(&insert_sql(first, count)).await;
}

fn insert_sql(first: u32, count: u32) -> String {
    format!(
        "DO $$ BEGIN FOR i IN {first}..{last} LOOP \
         INSERT INTO outbox.events \
             (aggregatetype, aggregateid, event_type, version, payload, occurred_at) \
         VALUES ('order', 'o-' || (i % 7), 'OrderPlaced', i, \
                 jsonb_build_object('n', i), clock_timestamp()); \
         COMMIT; END LOOP; END $$",
        last = first + count - 1
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slot_that_was_dropped_while_the_relay_was_down_costs_nothing() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let relay = Relay::start(&database, &emulator);
    insert(&database, 1, 200).await;
    database.wait_until_recorded().await;
    relay.stop().await;
    insert(&database, 201, 500).await;
    database.drop_slot().await;
    insert(&database, 701, 500).await;
    let relay = Relay::start(&database, &emulator);
    database.wait_until_recorded().await;
    relay.wait_for_log("recovered").await;
    insert(&database, 1201, 300).await;
    database.wait_until_recorded().await;
    database.wait_until_confirmed().await;
    assert!(relay.log().contains("slot-missing"), "{}", relay.log());
    let report = harness::check(&database, &emulator).await;
    assert!(
        report.is_clean() && report.duplicates.is_empty(),
        "{report}\n{}",
        relay.log()
    );
}
