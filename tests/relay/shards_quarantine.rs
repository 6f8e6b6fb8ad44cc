//! A bad event in one shard: that shard alone sets it aside and releases it, also where its ordering
//! key is shared with another.

use std::collections::BTreeMap;

use pubsub_emulator::{Action, Fault, FaultId, RunningEmulator};

use crate::harness::{self, Database, eventually, insert_orders, postrider};
use crate::shards::{sharded, sharded_with, start, start_with};

const BAD: &str = "00000000-0000-4000-8000-00000000bad0";

const BAD_TOO: &str = "00000000-0000-4000-8000-00000000bad1";

fn poison(emulator: &RunningEmulator) -> FaultId {
    poison_event(emulator, BAD)
}

fn poison_event(emulator: &RunningEmulator, id: &str) -> FaultId {
    let event_id = id.to_owned();
    emulator
        .faults()
        .inject(Fault::new(Action::Poison { event_id }))
}

async fn insert_bad(database: &Database, key: &str) {
    insert_bad_event(database, BAD, key).await;
}

async fn insert_bad_event(database: &Database, id: &str, key: &str) {
    database
        .execute(&format!(
            "INSERT INTO outbox.events \
                 (id, aggregatetype, aggregateid, event_type, version, payload, occurred_at) \
             VALUES ('{id}', 'order', '{key}', 'Bad', 0, '{{}}', clock_timestamp())"
        ))
        .await;
}

fn quarantine(database: &Database, arguments: &[&str]) -> String {
    let arguments: Vec<&str> = ["quarantine"].iter().chain(arguments).copied().collect();
    let ran = postrider(&arguments, &[("DATABASE_URL", &database.url)])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&ran.stdout).into_owned();
    assert!(ran.status.success(), "{arguments:?}: {text}");
    text
}

const ASIDE: &str = "SELECT count(*) FROM outbox.dispatch WHERE state <> 'published'";

async fn wait_until_nothing_is_aside(database: &Database) {
    eventually("everything set aside is published", || async {
        (database.number(ASIDE).await == 0).then_some(())
    })
    .await;
}

/// The places in the log of what was stored of each key, in the order in which it was stored.
async fn stored_places(database: &Database, emulator: &RunningEmulator) -> Vec<Vec<i64>> {
    let rows = database
        .client
        .query(
            "SELECT d.event_id::text, e.aggregateid, \
                    row_number() OVER (ORDER BY e.occurred_at, e.version) \
             FROM outbox.dispatch d JOIN outbox.events e ON e.id = d.event_id",
            &[],
        )
        .await
        .unwrap();
    let events: BTreeMap<String, (String, i64)> = rows
        .iter()
        .map(|row| (row.get(0), (row.get(1), row.get(2))))
        .collect();
    let mut stored: Vec<_> = emulator.journal().attempts();
    stored.retain(|attempt| attempt.first_message_id.is_some());
    stored.sort_by_key(|attempt| attempt.first_message_id);
    let mut keys: BTreeMap<String, Vec<i64>> = BTreeMap::new();
    for id in stored
        .iter()
        .flat_map(|attempt| attempt.event_ids.iter().flatten())
    {
        let (key, place) = &events[&**id];
        keys.entry(key.clone()).or_default().push(*place);
    }
    keys.into_values().collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_that_waits_in_one_shard_is_released_in_order_and_the_other_shard_goes_on() {
    let Some((database, emulator)) = sharded(&["0/2", "1/2"]).await else {
        return;
    };
    let fault = poison(&emulator);
    let relays = ["0/2", "1/2"].map(|shard| start(&database, &emulator, shard));
    insert_orders(&database, 200, 10).await;
    insert_bad(&database, "o-7").await;
    insert_orders(&database, 200, 10).await;
    database.wait_until_recorded().await;
    assert_eq!(database.number(ASIDE).await, 21);
    let blocked = relays
        .each_ref()
        .map(|relay| relay.log().contains("set aside"));
    assert_eq!(blocked.iter().filter(|blocked| **blocked).count(), 1);
    // Also over a restart each knows what is its own.
    let [one, two] = relays;
    one.stop().await;
    two.stop().await;
    let relays = ["0/2", "1/2"].map(|shard| start(&database, &emulator, shard));
    insert_orders(&database, 200, 10).await;
    database.wait_until_recorded().await;
    assert_eq!(database.number(ASIDE).await, 41);
    let knows = relays
        .each_ref()
        .map(|relay| relay.log().contains("events of these keys wait"));
    assert_eq!(knows, blocked);
    emulator.faults().lift(fault);
    quarantine(&database, &["release", "--key", "o-7"]);
    wait_until_nothing_is_aside(&database).await;
    insert_orders(&database, 200, 10).await;
    database.wait_until_recorded().await;
    wait_until_nothing_is_aside(&database).await;
    let report = harness::check(&database, &emulator).await;
    assert!(
        report.is_clean() && report.duplicates.is_empty(),
        "{report}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bucket_that_two_shards_share_waits_in_one_of_them_and_each_releases_its_own() {
    let bucketed = [("POSTRIDER_ORDERING", "bucketed(1)")];
    let Some((database, emulator)) = sharded_with(&["0/2", "1/2"], &bucketed).await else {
        return;
    };
    let fault = poison(&emulator);
    let relays = ["0/2", "1/2"].map(|shard| start_with(&database, &emulator, shard, &bucketed));
    insert_orders(&database, 200, 10).await;
    database.wait_until_recorded().await;
    insert_bad(&database, "o-7").await;
    insert_orders(&database, 200, 10).await;
    database.wait_until_recorded().await;
    let shards =
        "SELECT count(DISTINCT ordinal % 2) FROM outbox.dispatch WHERE state <> 'published'";
    assert_eq!(database.number(shards).await, 1);
    let others = "SELECT count(*) FROM outbox.dispatch d JOIN outbox.events e ON e.id = d.event_id \
                  WHERE d.state = 'published' AND e.version > 0";
    assert!(
        database.number(others).await > 200,
        "the other shard goes on"
    );
    emulator.faults().lift(fault);
    quarantine(&database, &["release", "--all"]);
    wait_until_nothing_is_aside(&database).await;
    insert_orders(&database, 100, 10).await;
    database.wait_until_recorded().await;
    wait_until_nothing_is_aside(&database).await;
    for places in stored_places(&database, &emulator).await {
        assert!(places.is_sorted(), "{places:?}");
    }
    assert_eq!(emulator.journal().counts().stored_messages, 501);
    for relay in relays {
        relay.stop().await;
    }
}

/// Keys of the share `shard` of 2.
async fn keys_of(database: &Database, shard: i32) -> Vec<String> {
    let sql = format!(
        "SELECT key FROM (SELECT 'o-' || n FROM generate_series(0, 9) n) k (key) \
         WHERE (hashtext(key) & 2147483647) % 2 = {shard}"
    );
    let rows = database.client.query(&sql, &[]).await.unwrap();
    rows.iter().map(|row| row.get(0)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_released_in_one_shard_leaves_what_waits_in_the_other() {
    let bucketed = [("POSTRIDER_ORDERING", "bucketed(1)")];
    let Some((database, emulator)) = sharded_with(&["0/2", "1/2"], &bucketed).await else {
        return;
    };
    let fault = poison(&emulator);
    poison_event(&emulator, BAD_TOO);
    let _relays = ["0/2", "1/2"].map(|shard| start_with(&database, &emulator, shard, &bucketed));
    insert_bad(&database, &keys_of(&database, 0).await[0]).await;
    insert_bad_event(&database, BAD_TOO, &keys_of(&database, 1).await[0]).await;
    insert_orders(&database, 100, 10).await;
    database.wait_until_recorded().await;
    assert_eq!(database.number(ASIDE).await, 102);
    emulator.faults().lift(fault);
    database
        .execute(&format!(
            "UPDATE outbox.dispatch SET state = 'released' WHERE event_id = '{BAD}'"
        ))
        .await;
    let of_first = "SELECT count(*) FROM outbox.dispatch \
                    WHERE state <> 'published' AND ordinal % 2 = 0";
    eventually("the first shard has nothing aside", || async {
        (database.number(of_first).await == 0).then_some(())
    })
    .await;
    let of_second = "SELECT count(*) FROM outbox.dispatch \
                     WHERE state <> 'quarantined' AND ordinal % 2 = 1";
    assert_eq!(database.number(of_second).await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shard_without_new_events_releases_what_it_has_though_others_have_recorded_much() {
    let Some((database, emulator)) = sharded(&["0/2", "1/2"]).await else {
        return;
    };
    let fault = poison(&emulator);
    let relay = start(&database, &emulator, "0/2");
    let _other = start(&database, &emulator, "1/2");
    insert_bad(&database, &keys_of(&database, 0).await[0]).await;
    database.wait_until_recorded().await;
    relay.stop().await;
    let key = &keys_of(&database, 1).await[0];
    database
        .execute(&format!(
            "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, version) \
             SELECT 'order', '{key}', 'OrderPlaced', n FROM generate_series(1, 100) n"
        ))
        .await;
    database.wait_until_recorded().await;
    emulator.faults().lift(fault);
    quarantine(&database, &["release", "--all"]);
    let _relay = start(&database, &emulator, "0/2");
    wait_until_nothing_is_aside(&database).await;
}
