//! Tests in which other sessions hold locks while a prune run adds or drops the partition of a day. If the run
//! does not get its own lock soon, it leaves that step to a later run, and continues. So services can keep inserting.

use tokio_postgres::Client;

use super::*;
use crate::harness::{self, Relay};

/// The longest time that an insert into the partition of today may take. Pruning may delay such an insert
/// by 0.1 s for each of its locks. The rest of this limit is for slow machines. The tests hold their locks much longer.
const DELAYED: Duration = Duration::from_millis(1_000);

#[tokio::test(flavor = "multi_thread")]
async fn a_day_that_is_in_use_is_pruned_row_by_row_and_dropped_later() {
    let database = daily_database().await;
    let emulator = harness::emulator().await;
    let (old, relay) = old_day(&database, &emulator).await;
    let reader = connect(&database.url).await;
    reader
        .batch_execute("BEGIN; SELECT count(*) FROM outbox.events")
        .await
        .unwrap();
    let service = TimedService::start(&database).await;
    let (url, slot) = (database.url.clone(), database.slot().to_owned());
    let pruning = tokio::task::spawn_blocking(move || prune_as(&url, &slot, "--yes"));
    let (code, json) = pruning.await.unwrap();
    let slowest = service.stop().await;
    assert!(slowest < DELAYED, "{slowest:?}");
    assert!(code == Some(0) || code == Some(1), "{json:#}");
    assert_eq!(json["tables"][0]["rows"], 200, "{json:#}");
    assert!(dropped(&json).is_empty(), "{json:#}");
    let note = json["tables"][0]["notes"][0].as_str().unwrap();
    assert!(note.contains("was not dropped as a whole"), "{note}");
    assert_eq!(rows(&database, &old).await, 0);

    reader.batch_execute("COMMIT").await.unwrap();
    let (_, json) = prune(&database, "--yes");
    assert_eq!(dropped(&json), [0], "{json:#}");
    assert!(!exists(&database, &old).await);
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_day_is_not_added_while_somebody_uses_the_default_partition() {
    let database = daily_database().await;
    let (last, _) = day(&database, 7).await;
    database.execute(&format!("DROP TABLE {last}")).await;
    let user = connect(&database.url).await;
    user.batch_execute("BEGIN; SELECT count(*) FROM outbox.events_default")
        .await
        .unwrap();
    let service = TimedService::start(&database).await;
    let (url, slot) = (database.url.clone(), database.slot().to_owned());
    let pruning = tokio::task::spawn_blocking(move || prune_as(&url, &slot, "--yes"));
    let (_, json) = pruning.await.unwrap();
    let slowest = service.stop().await;
    assert!(slowest < DELAYED, "{slowest:?}");
    let note = json["tables"][0]["notes"][0].as_str().unwrap();
    assert!(note.contains("no partition was added for"), "{note}");
    assert!(!exists(&database, &last).await);

    user.batch_execute("COMMIT").await.unwrap();
    let (_, json) = prune(&database, "--yes");
    assert_eq!(
        json["tables"][0]["days_added"].as_array().unwrap().len(),
        1,
        "{json:#}"
    );
    assert!(exists(&database, &last).await);
}

/// Publishes 200 events of an old day, and ages their records, so that the rows may be deleted. Returns the
/// name of the partition, and the relay.
async fn old_day(database: &Database, emulator: &RunningEmulator) -> (String, Relay) {
    let old = add_past_day(database, -20).await;
    let relay = Relay::start(database, emulator);
    insert(database, 200, "o", -20).await;
    wait_until_stored(emulator, 200).await;
    database.wait_until_recorded().await;
    database.wait_until_confirmed().await;
    relay.stop().await;
    let relay = Relay::start(database, emulator);
    wait_until_settled(database).await;
    age_records(database).await;
    (old, relay)
}

/// Starts a prune run while a reader keeps the run from dropping the partition of the old day. Waits until
/// the run has locked the partition. Returns the session of the reader, and the task of the run.
async fn prune_behind_a_reader(database: &Database) -> (Client, JoinHandle<serde_json::Value>) {
    let reader = connect(&database.url).await;
    let read = "BEGIN; SELECT count(*) FROM outbox.events";
    reader.batch_execute(read).await.unwrap();
    let (url, slot) = (database.url.clone(), database.slot().to_owned());
    let pruning = tokio::task::spawn_blocking(move || prune_as(&url, &slot, "--yes").1);
    let locked = "SELECT count(*) FROM pg_locks WHERE mode = 'ShareRowExclusiveLock' AND granted \
                  AND relation IN (SELECT partition FROM outbox.days() WHERE day IS NOT NULL)";
    eventually("the day is locked", || async {
        (database.number(locked).await == 1).then_some(())
    })
    .await;
    (reader, pruning)
}

/// The services and the prune run may wait for locks of each other. PostgreSQL could resolve such a
/// deadlock after one second by ending the transaction of a service. So the prune run must give up earlier.
#[tokio::test(flavor = "multi_thread")]
async fn services_that_insert_into_a_day_that_is_dropped_never_fail() {
    let database = daily_database().await;
    let emulator = harness::emulator().await;
    let (old, relay) = old_day(&database, &emulator).await;
    let (reader, pruning) = prune_behind_a_reader(&database).await;
    let insert = format!(
        "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, payload, occurred_at) \
         VALUES ('order', 'late', 'OrderPlaced', '{{}}', {})",
        midnight(-20)
    );
    let mut services = Vec::new();
    for _ in 0..16 {
        let (client, insert) = (connect(&database.url).await, insert.clone());
        services.push(tokio::spawn(
            async move { client.batch_execute(&insert).await },
        ));
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    for service in services {
        service.await.unwrap().unwrap();
    }
    let json = pruning.await.unwrap();
    let note = json["tables"][0]["notes"][0].as_str().unwrap();
    assert!(note.contains("another session waits"), "{note}");
    assert_eq!(rows(&database, &old).await, 16);
    reader.batch_execute("COMMIT").await.unwrap();
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_day_stays_if_a_record_changes_after_its_row_was_judged() {
    let database = daily_database().await;
    let emulator = harness::emulator().await;
    let (old, relay) = old_day(&database, &emulator).await;
    let (reader, pruning) = prune_behind_a_reader(&database).await;
    database
        .execute(
            "UPDATE outbox.dispatch SET state = 'quarantined' \
             WHERE event_id = (SELECT id FROM outbox.events ORDER BY seq LIMIT 1)",
        )
        .await;
    // Wait until the prune run has read the old records, and has given up its first attempt to drop the
    // day.
    tokio::time::sleep(Duration::from_millis(400)).await;
    reader.batch_execute("COMMIT").await.unwrap();
    let json = pruning.await.unwrap();
    assert!(dropped(&json).is_empty(), "{json:#}");
    assert_eq!(rows(&database, &old).await, 1, "the others are deleted");
    relay.stop().await;
}
