//! Tests of first starts with `dispatch = exceptions`, and of switches between `full` and `exceptions`.

use std::time::Duration;

use pubsub_emulator::{Action, Fault};

use super::{
    after_some_events, assert_whole_and_in_order, insert, make_slot, rows, start, start_with,
    stored, wait_until_compared, wait_until_delivered, wait_until_recovered,
};
use crate::harness::{self, Database, Relay, eventually};

#[tokio::test(flavor = "multi_thread")]
async fn start_new_delivers_no_old_row_even_when_the_slot_is_lost() {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    database.drop_slot().await;
    database.execute("DELETE FROM outbox.capture").await;
    insert(&database, 1, 300).await;
    make_slot(&database).await;
    let relay = start(&database, &emulator);
    relay.wait_for_log("streaming").await;
    insert(&database, 301, 20).await;
    eventually(
        "the rows written after the first start are delivered",
        || async { (stored(&emulator).len() == 20).then_some(()) },
    )
    .await;
    relay.kill_9();
    database.drop_slot().await;
    insert(&database, 321, 20).await;
    let relay = start(&database, &emulator);
    eventually("the rows written after the loss are delivered", || async {
        (stored(&emulator).len() == 40).then_some(())
    })
    .await;
    wait_until_recovered(&database).await;
    assert_eq!(stored(&emulator).len(), 40, "{}", relay.log());
    assert_eq!(rows(&database, "discarded").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn start_all_delivers_the_rows_of_the_table_in_order() {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    database.drop_slot().await;
    insert(&database, 1, 1_000).await;
    let slow = Action::Delay(Duration::from_millis(10));
    emulator.faults().inject(Fault::new(slow).times(100));
    let all = [("POSTRIDER_START", "all")];
    let relay = start_with(&database, &emulator, &all);
    relay.wait_for_log("recovering").await;
    insert(&database, 1_001, 300).await;
    relay.kill_9();
    let relay = start_with(&database, &emulator, &all);
    wait_until_delivered(&database, &emulator, &relay).await;
    assert_whole_and_in_order(&database, &emulator, &relay).await;
    relay.stop().await;
    let before = emulator.journal().counts().stored_messages;
    let relay = start_with(&database, &emulator, &all);
    relay.wait_for_log("streaming").await;
    database.wait_until_confirmed().await;
    assert_eq!(emulator.journal().counts().stored_messages, before);
}

#[tokio::test(flavor = "multi_thread")]
async fn switching_modes_with_kill_9_in_between_loses_and_swaps_nothing() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let host = emulator.addr().to_string();
    let slow = Action::Delay(Duration::from_millis(2));
    emulator.faults().inject(Fault::new(slow));
    let modes = [
        "full",
        "exceptions",
        "exceptions",
        "full",
        "full",
        "exceptions",
        "full",
    ];
    for (round, mode) in (0u32..).zip(modes) {
        let relay = Relay::start_with(&database, &host, &[("POSTRIDER_DISPATCH", mode)]);
        let target = emulator.journal().counts().stored_messages + 150;
        insert(&database, 1 + round * 400, 400).await;
        eventually("some more events are stored", || async {
            (emulator.journal().counts().stored_messages >= target).then_some(())
        })
        .await;
        relay.kill_9();
        harness::wait_until_killed_relays_are_gone(&database, &emulator).await;
    }
    let relay = Relay::start(&database, &emulator);
    insert(&database, 4_001, 100).await;
    wait_until_delivered(&database, &emulator, &relay).await;
    eventually("full records have resumed", || async {
        let full = "SELECT count(*) FROM outbox.relay WHERE dispatch = 'full'";
        (database.number(full).await == 1).then_some(())
    })
    .await;
    assert_whole_and_in_order(&database, &emulator, &relay).await;
    // Check that a restart repeats no recorded event and loses none, now that full records have resumed.
    let before = emulator.journal().counts().stored_messages;
    insert(&database, 5_001, 100).await;
    wait_until_delivered(&database, &emulator, &relay).await;
    let last = "SELECT count(*) FROM outbox.dispatch d JOIN outbox.events e ON e.id = d.event_id \
                WHERE e.version >= 5001";
    eventually("the last events are recorded", || async {
        (database.number(last).await == 100).then_some(())
    })
    .await;
    relay.kill_9();
    let relay = Relay::start(&database, &emulator);
    relay.wait_for_log("streaming").await;
    database.wait_until_confirmed().await;
    let after = emulator.journal().counts().stored_messages;
    assert_eq!(after, before + 100, "{}", relay.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn after_a_switch_to_full_records_the_auditor_repeats_no_row_without_a_record() {
    let (database, emulator, relay) = after_some_events(300).await;
    relay.stop().await;
    let relay = Relay::start(&database, &emulator);
    insert(&database, 301, 300).await;
    wait_until_delivered(&database, &emulator, &relay).await;
    wait_until_compared(&database).await;
    assert_eq!(emulator.journal().counts().stored_messages, 600);
    assert!(!relay.log().contains("publication-gap"), "{}", relay.log());
    assert_eq!(rows(&database, "published").await, 300);
}
