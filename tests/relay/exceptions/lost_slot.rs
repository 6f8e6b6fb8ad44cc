//! Tests in which the slot is lost or recreated. The relay then publishes events from the tables, even events that were
//! published before. It repeats no event for which it has *vouched*: the event is resolved, and the relay has raised
//! the floor of the table above it.

use super::{
    after_some_events, assert_once_and_in_order, assert_whole_and_in_order, insert, make_slot,
    start, stored, wait_until_delivered, wait_until_vouched,
};
use crate::harness::{self, Database, eventually};

#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_slot_only_repeats_events_since_the_last_vouch() {
    let (database, emulator, relay) = after_some_events(500).await;
    wait_until_vouched(&database).await;
    relay.stop().await;
    insert(&database, 501, 300).await;
    database.drop_slot().await;
    insert(&database, 801, 300).await;
    let relay = start(&database, &emulator);
    relay.wait_for_log("recovered").await;
    insert(&database, 1_101, 300).await;
    wait_until_delivered(&database, &emulator, &relay).await;
    assert_once_and_in_order(&database, &emulator, &relay).await;
    assert!(relay.log().contains("slot-missing"), "{}", relay.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slot_dropped_and_recreated_after_a_crash_loses_nothing() {
    let (database, emulator, relay) = after_some_events(300).await;
    relay.kill_9();
    database.drop_slot().await;
    insert(&database, 301, 300).await;
    make_slot(&database).await;
    insert(&database, 601, 300).await;
    let relay = start(&database, &emulator);
    wait_until_delivered(&database, &emulator, &relay).await;
    assert_whole_and_in_order(&database, &emulator, &relay).await;
    assert!(relay.log().contains("slot-unproven"), "{}", relay.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_of_a_transaction_older_than_a_vouch_are_delivered_after_a_lost_slot() {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    let relay = start(&database, &emulator);
    insert(&database, 1, 50).await;
    wait_until_delivered(&database, &emulator, &relay).await;
    wait_until_vouched(&database).await;
    // Insert one more batch, so that the next vouch raises the floor.
    insert(&database, 51, 50).await;
    let slow = harness::connect(&database.url).await;
    let row = |key: &str| {
        format!(
            "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, version, \
             occurred_at) VALUES ('order', '{key}', 'OrderPlaced', 1, clock_timestamp());"
        )
    };
    // Rows under savepoints have the id of a subtransaction as their `xmin`. The relay must find these
    // rows too.
    let begun = format!(
        "BEGIN; {} SAVEPOINT a; {} RELEASE a; SAVEPOINT b; {}",
        row("slow-0"),
        row("slow-1"),
        row("slow-2")
    );
    slow.batch_execute(&begun).await.unwrap();
    let resolved = || async {
        let sql = "SELECT max(floor::text::bigint) FROM outbox.capture";
        database.number(sql).await
    };
    let before = resolved().await;
    insert(&database, 101, 100).await;
    let stored_all = || async { (stored(&emulator).len() >= 200).then_some(()) };
    eventually("the other events are delivered", stored_all).await;
    eventually("the relay has vouched once more", || async {
        (resolved().await > before).then_some(())
    })
    .await;
    relay.kill_9();
    slow.batch_execute("COMMIT").await.unwrap();
    database.drop_slot().await;
    let relay = start(&database, &emulator);
    wait_until_delivered(&database, &emulator, &relay).await;
    assert_whole_and_in_order(&database, &emulator, &relay).await;
}
