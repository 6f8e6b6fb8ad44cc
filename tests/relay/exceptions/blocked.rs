//! Tests of blocked keys with `dispatch = exceptions`. After a crash or a lost slot, the relay repeats
//! events that have no dispatch row, and the events of each key must stay in order.

use std::time::Duration;

use pubsub_emulator::{Action, Fault};

use super::{
    assert_whole_and_in_order, insert, insert_bad, poison, release, rows, start,
    wait_until_delivered, wait_until_vouched,
};
use crate::harness::{self, Database, eventually};

/// The blocked key has events in quarantine, and earlier events that are published but have no dispatch
/// row. The recovery must repeat the earlier events, and keep the order of the key.
#[tokio::test(flavor = "multi_thread")]
async fn events_before_a_blocked_event_are_repeated_before_it_when_the_slot_is_lost() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    poison(&emulator);
    // The relay vouches for the first ten events: it raises the floor of the table above them. It raises the floor
    // again only about ten seconds later. The test kills the relay before that, so the recovery must repeat all other
    // published events.
    let relay = start(&database, &emulator);
    insert(&database, 1, 10).await;
    wait_until_delivered(&database, &emulator, &relay).await;
    wait_until_vouched(&database).await;
    insert(&database, 11, 300).await;
    insert_bad(&database, 400).await;
    insert(&database, 401, 100).await;
    eventually("the key is blocked", || async {
        (rows(&database, "quarantined").await == 21).then_some(())
    })
    .await;
    relay.kill_9();
    harness::wait_until_killed_relays_are_gone(&database, &emulator).await;
    database.drop_slot().await;
    insert(&database, 501, 100).await;
    let relay = start(&database, &emulator);
    wait_until_delivered(&database, &emulator, &relay).await;
    assert_whole_and_in_order(&database, &emulator, &relay).await;
    assert_eq!(rows(&database, "quarantined").await, 41);
    emulator.faults().lift_all();
    release(&database);
    eventually("everything is released", || async {
        (rows(&database, "published").await == 41).then_some(())
    })
    .await;
    assert_whole_and_in_order(&database, &emulator, &relay).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn kill_9_during_a_release_keeps_the_order_of_the_key() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    poison(&emulator);
    let mut relay = start(&database, &emulator);
    // The topic of this event does not exist. As long as the event waits, the confirmed position does not
    // advance, so each restart repeats all later events.
    database
        .execute(
            "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, version, \
             occurred_at) VALUES ('parcel', 'p', 'Sent', 1, clock_timestamp())",
        )
        .await;
    insert(&database, 1, 200).await;
    insert_bad(&database, 201).await;
    insert(&database, 202, 2_000).await;
    eventually("the key is blocked", || async {
        (rows(&database, "quarantined").await == 401).then_some(())
    })
    .await;
    emulator.faults().lift_all();
    let slow = Action::Delay(Duration::from_millis(30));
    emulator.faults().inject(Fault::new(slow));
    release(&database);
    for round in 0..4 {
        let published = rows(&database, "published").await;
        insert(&database, 10_001 + round * 100, 100).await;
        eventually("some more events are released", || async {
            let more = rows(&database, "published").await > published;
            (more || rows(&database, "released").await == 0).then_some(())
        })
        .await;
        relay.kill_9();
        harness::wait_until_killed_relays_are_gone(&database, &emulator).await;
        relay = start(&database, &emulator);
    }
    eventually("everything is released", || async {
        let left = rows(&database, "released").await + rows(&database, "quarantined").await;
        (left == 0).then_some(())
    })
    .await;
    // Check that the next relay repeats all events once more, with the released events in their original
    // order.
    relay.kill_9();
    harness::wait_until_killed_relays_are_gone(&database, &emulator).await;
    relay = start(&database, &emulator);
    emulator
        .create_topic("projects/demo/topics/parcel.events")
        .await
        .unwrap();
    wait_until_delivered(&database, &emulator, &relay).await;
    assert_whole_and_in_order(&database, &emulator, &relay).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn released_events_are_repeated_among_their_neighbours_when_the_slot_is_lost() {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    poison(&emulator);
    let relay = start(&database, &emulator);
    insert(&database, 1, 50).await;
    wait_until_delivered(&database, &emulator, &relay).await;
    // While this transaction runs, the relay cannot raise the floor above later events.
    let slow = harness::connect(&database.url).await;
    slow.batch_execute("BEGIN; SELECT pg_current_xact_id()")
        .await
        .unwrap();
    insert(&database, 51, 50).await;
    insert_bad(&database, 101).await;
    insert(&database, 102, 50).await;
    eventually("the key is blocked", || async {
        (rows(&database, "quarantined").await == 11).then_some(())
    })
    .await;
    emulator.faults().lift_all();
    release(&database);
    eventually("everything is released", || async {
        (rows(&database, "published").await == 11).then_some(())
    })
    .await;
    insert(&database, 152, 50).await;
    wait_until_delivered(&database, &emulator, &relay).await;
    relay.kill_9();
    harness::wait_until_killed_relays_are_gone(&database, &emulator).await;
    database.drop_slot().await;
    slow.batch_execute("ROLLBACK").await.unwrap();
    let before = emulator.journal().counts().stored_messages;
    let relay = start(&database, &emulator);
    relay.wait_for_log("recovered").await;
    assert_whole_and_in_order(&database, &emulator, &relay).await;
    let repeated = emulator.journal().counts().stored_messages - before;
    assert!(repeated >= 151, "{repeated}\n{}", relay.log());
}
