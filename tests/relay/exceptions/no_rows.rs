//! Tests of relays with the setting `dispatch = exceptions`. Published events get no dispatch row, even if
//! relays are killed. An idle relay writes nothing.

use std::time::Duration;

use pubsub_emulator::{Action, Fault};

use super::{
    assert_whole_and_in_order, check, insert, rows, start, wait_until_delivered, wait_until_vouched,
};
use crate::harness::{self, Database, eventually};

#[tokio::test(flavor = "multi_thread")]
async fn published_events_get_no_row_and_the_relay_vouches_for_them() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let relay = start(&database, &emulator);
    insert(&database, 1, 1_000).await;
    wait_until_delivered(&database, &emulator, &relay).await;
    wait_until_vouched(&database).await;
    let report = check(&database, &emulator).await;
    assert!(
        report.is_clean() && report.duplicates.is_empty(),
        "{report}"
    );
    let rows = "SELECT count(*) FROM outbox.dispatch";
    assert_eq!(database.number(rows).await, 0);
    assert_eq!(
        database.text("SELECT dispatch FROM outbox.relay").await,
        "exceptions"
    );
    relay.stop().await;
    let relay = start(&database, &emulator);
    relay.wait_for_log("streaming").await;
    database.wait_until_confirmed().await;
    assert_eq!(emulator.journal().counts().stored_messages, 1_000);
    assert!(!relay.log().contains("recovering"), "{}", relay.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn kill_9_under_load_loses_nothing_and_repeats_completely_and_in_order() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let slow = Action::Delay(Duration::from_millis(3));
    emulator.faults().inject(Fault::new(slow));
    insert(&database, 1, 3_000).await;
    for round in 1..=5 {
        let relay = start(&database, &emulator);
        let target = emulator.journal().counts().stored_messages + 300;
        // Insert more events, because the relays of earlier rounds may already have delivered and confirmed
        // all others.
        insert(&database, 2_601 + round * 400, 300).await;
        eventually("some more events are stored", || async {
            (emulator.journal().counts().stored_messages >= target).then_some(())
        })
        .await;
        insert(&database, 2_901 + round * 400, 100).await;
        relay.kill_9();
        harness::wait_until_killed_relays_are_gone(&database, &emulator).await;
    }
    let relay = start(&database, &emulator);
    wait_until_delivered(&database, &emulator, &relay).await;
    assert_whole_and_in_order(&database, &emulator, &relay).await;
    assert_eq!(rows(&database, "published").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_relay_writes_nothing() {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    let relay = start(&database, &emulator);
    insert(&database, 1, 100).await;
    wait_until_delivered(&database, &emulator, &relay).await;
    wait_until_vouched(&database).await;
    database.execute("CREATE TABLE other (n int)").await;
    // Every write creates a new row version, so equal versions prove that the relay wrote nothing.
    let versions = "SELECT string_agg(t.xmin::text || t.ctid::text, ' ') FROM outbox.relay t";
    // The relay may still record earlier work, so wait longer than the interval between two
    // vouches.
    let mut before = eventually("the relay's row no longer changes", || async {
        let row = database.text(versions).await;
        tokio::time::sleep(Duration::from_secs(14)).await;
        (database.text(versions).await == row).then_some(row)
    })
    .await;
    for round in 0..2 {
        database
            .execute("INSERT INTO other SELECT generate_series(1, 20000)")
            .await;
        database.wait_until_confirmed().await;
        let now = database.text(versions).await;
        assert!(round == 0 || now == before, "{}", relay.log());
        before = now;
        tokio::time::sleep(Duration::from_secs(12)).await;
    }
    assert_eq!(database.text(versions).await, before, "{}", relay.log());
}
