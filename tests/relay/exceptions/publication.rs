//! The publication leaves rows out for a while, or names a whole schema instead of the table.

use super::{
    after_some_events, assert_whole_and_in_order, insert, insert_sql, rows, start,
    wait_until_delivered,
};
use crate::harness::{self, Database};

const OUT: &str = "ALTER PUBLICATION postrider DROP TABLE outbox.events";
const IN: &str = "ALTER PUBLICATION postrider ADD TABLE outbox.events";

/// The gap may open and close between two checks of the publication.
#[tokio::test(flavor = "multi_thread")]
async fn rows_of_a_publication_gap_are_delivered_by_a_running_relay() {
    let (database, emulator, relay) = after_some_events(300).await;
    for round in 0..2 {
        database.execute(OUT).await;
        let gap = format!("gap{round}");
        database.execute(&insert_sql(&gap, 1, 50)).await;
        database.execute(IN).await;
        insert(&database, 1_000 + round * 300, 300).await;
        wait_until_delivered(&database, &emulator, &relay).await;
        assert_whole_and_in_order(&database, &emulator, &relay).await;
    }
    assert!(relay.log().contains("publication-gap"), "{}", relay.log());
    assert_eq!(rows(&database, "published").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_of_a_gap_made_while_no_relay_ran_are_delivered_in_order() {
    let (database, emulator, relay) = after_some_events(300).await;
    relay.stop().await;
    database.execute(OUT).await;
    insert(&database, 301, 100).await;
    database.execute(IN).await;
    insert(&database, 401, 100).await;
    let relay = start(&database, &emulator);
    wait_until_delivered(&database, &emulator, &relay).await;
    assert_whole_and_in_order(&database, &emulator, &relay).await;
    assert!(
        relay.log().contains("publication-changed"),
        "{}",
        relay.log()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_renamed_for_a_while_loses_nothing() {
    let (database, emulator, relay) = after_some_events(100).await;
    relay.stop().await;
    let row = "INSERT INTO outbox.away (aggregatetype, aggregateid, event_type, version, \
               occurred_at) VALUES ('order', 'o-1', 'OrderPlaced', 201, clock_timestamp())";
    for sql in [
        "ALTER TABLE outbox.events RENAME TO away",
        row,
        "ALTER TABLE outbox.away RENAME TO events",
    ] {
        database.execute(sql).await;
    }
    let relay = start(&database, &emulator);
    wait_until_delivered(&database, &emulator, &relay).await;
    assert_whole_and_in_order(&database, &emulator, &relay).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_publication_for_all_tables_in_a_schema_is_refused() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let version = "SELECT current_setting('server_version_num')::bigint";
    if database.number(version).await < 150_000 {
        return;
    }
    database
        .execute(
            "ALTER PUBLICATION postrider DROP TABLE outbox.events; \
             ALTER PUBLICATION postrider ADD TABLES IN SCHEMA outbox",
        )
        .await;
    let relay = start(&database, &emulator);
    relay.wait_for_error("publication-drift").await;
    assert!(
        relay.log().contains("only through its schema"),
        "{}",
        relay.log()
    );
    assert!(!relay.wait().await.success());
}
