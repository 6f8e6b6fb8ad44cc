//! Tests that quarantined events stay in quarantine through crashes of the relay and the loss of the slot, and
//! can be released afterwards. The tests run with `dispatch = full` and with `dispatch = exceptions`.

use crate::exceptions::{
    assert_whole_and_in_order, insert, insert_bad, poison, release, rows, wait_until_delivered,
};
use crate::harness::{self, Database, Relay, eventually};

/// Kills the relay three times under load, drops the slot after the second kill, and finally releases
/// all events. Returns the database, and the number of `published` dispatch rows before the release.
async fn is_kept_and_released(dispatch: &str) -> (Database, i64) {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let host = emulator.addr().to_string();
    let settings = [("POSTRIDER_DISPATCH", dispatch)];
    let start = || Relay::start_with(&database, &host, &settings);
    poison(&emulator);
    let mut relay = start();
    insert(&database, 1, 300).await;
    insert_bad(&database, 301).await;
    insert(&database, 302, 300).await;
    wait_until_delivered(&database, &emulator, &relay).await;
    assert_eq!(rows(&database, "quarantined").await, 61);
    for round in 0..3 {
        insert(&database, 1_000 + round * 200, 200).await;
        relay.kill_9();
        harness::wait_until_killed_relays_are_gone(&database, &emulator).await;
        if round == 1 {
            database.drop_slot().await;
            insert(&database, 1_900, 50).await;
        }
        relay = start();
        wait_until_delivered(&database, &emulator, &relay).await;
        assert_whole_and_in_order(&database, &emulator, &relay).await;
    }
    let behind = "SELECT count(*) FROM outbox.events \
                  WHERE aggregateid = 'o-1' AND version >= 301";
    let behind = database.number(behind).await;
    assert_eq!(rows(&database, "quarantined").await, behind);
    let published = rows(&database, "published").await;
    let stored = || emulator.journal().counts().stored_messages;
    let before = stored();
    emulator.faults().lift_all();
    release(&database);
    eventually("everything is released", || async {
        (rows(&database, "published").await == published + behind).then_some(())
    })
    .await;
    // The quarantine is empty, so `assert_whole_and_in_order` checks every event of every key.
    assert_eq!(rows(&database, "quarantined").await, 0);
    assert_whole_and_in_order(&database, &emulator, &relay).await;
    assert_eq!(i64::try_from(stored() - before), Ok(behind), "each once");
    relay.stop().await;
    (database, published)
}

#[tokio::test(flavor = "multi_thread")]
async fn quarantined_events_survive_crashes_and_a_lost_slot() {
    let (_, published) = is_kept_and_released("exceptions").await;
    assert_eq!(published, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn with_full_records_quarantined_events_survive_crashes_and_a_lost_slot() {
    let (database, _) = is_kept_and_released("full").await;
    let without_a_row = "SELECT count(*) FROM outbox.events e WHERE NOT EXISTS \
                         (SELECT FROM outbox.dispatch d WHERE d.event_id = e.id)";
    assert_eq!(database.number(without_a_row).await, 0);
}
