//! Tests of `postrider replay`, which makes the relay publish events again. The relay publishes the
//! replayed events of a key in order, and never mixes them with new events of the key.

mod interrupted;
mod shown;

use std::collections::BTreeMap;
use std::process::{Child, Output};
use std::time::Duration;

use pubsub_emulator::checks::Expected;
use pubsub_emulator::{Action, Fault, RunningEmulator};
use serde_json::Value;

use crate::harness::{self, Database, Relay, eventually, insert_orders, postrider};
use crate::mapping::Subscriber;

const TOPIC: &str = "projects/demo/topics/order.events";

fn environment(database: &Database) -> [(&str, &str); 2] {
    [
        ("DATABASE_URL", &database.url),
        ("POSTRIDER_SLOT", database.slot()),
    ]
}

fn replay(database: &Database, arguments: &[&str]) -> Output {
    let arguments = [&["replay"], arguments].concat();
    postrider(&arguments, &environment(database))
        .output()
        .unwrap()
}

/// Runs `postrider replay` with `--json`, checks that it exits with `code`, and returns its output.
fn replayed(database: &Database, code: i32, arguments: &[&str]) -> Value {
    let ran = replay(database, &[arguments, &["--json"]].concat());
    let error = String::from_utf8_lossy(&ran.stderr);
    assert_eq!(ran.status.code(), Some(code), "{arguments:?}: {error}");
    serde_json::from_slice(&ran.stdout).unwrap_or_else(|e| panic!("{e}: {error}"))
}

/// Kills a replay, and waits until PostgreSQL has ended its sessions. Until then the replay counts as running.
async fn kill(database: &Database, mut command: Child) {
    command.kill().unwrap();
    command.wait().unwrap();
    let sessions = "SELECT count(*) FROM pg_stat_activity \
                    WHERE datname = current_database() AND application_name = 'postrider replay'";
    eventually("the killed replay has no session", || async {
        (database.number(sessions).await == 0).then_some(())
    })
    .await;
}

/// The event ids of the stored messages of each key, in the order of storage.
fn stored(emulator: &RunningEmulator) -> BTreeMap<String, Vec<String>> {
    let mut keys: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut attempts = emulator.journal().attempts();
    attempts.retain(pubsub_emulator::Attempt::is_stored);
    attempts.sort_by_key(|attempt| attempt.first_message_id);
    for attempt in attempts {
        let ids = attempt.event_ids.iter().flatten().map(ToString::to_string);
        keys.entry(attempt.ordering_key.to_string())
            .or_default()
            .extend(ids);
    }
    keys
}

/// The expected event ids of one key. All events must have the same topic.
fn of_key<'a>(expected: &'a Expected, key: &str) -> &'a [String] {
    let found = expected
        .iter()
        .find(|(stream, _)| stream.ordering_key == key);
    found.map_or(&[], |(_, ids)| ids)
}

/// Starts a relay and waits until it has recorded `events` events with `keys` keys.
async fn with_published_events(events: u32, keys: u32) -> (Database, RunningEmulator, Relay) {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let relay = Relay::start(&database, &emulator);
    insert_orders(&database, events, keys).await;
    database.wait_until_recorded().await;
    (database, emulator, relay)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replay_comes_in_order_and_unmixed_while_services_keep_writing() {
    let (database, emulator, relay) = with_published_events(600, 3).await;
    let old = database.expected().await;
    let (writer, connection) = tokio_postgres::connect(&database.url, tokio_postgres::NoTls)
        .await
        .unwrap();
    tokio::spawn(connection);
    let writing = tokio::spawn(async move {
        for _ in 0..80 {
            let insert = harness::insert_orders_sql(12, 3);
            writer.batch_execute(&insert).await.unwrap();
            tokio::time::sleep(Duration::from_millis(25)).await;
        }
    });
    let (url, slot) = (database.url.clone(), database.slot().to_owned());
    let ran = tokio::task::spawn_blocking(move || {
        let environment = [
            ("DATABASE_URL", url.as_str()),
            ("POSTRIDER_SLOT", slot.as_str()),
        ];
        let arguments = [
            "replay",
            "--topic",
            "order.events",
            "--name",
            "r1",
            "--yes",
            "--json",
        ];
        postrider(&arguments, &environment).output().unwrap()
    })
    .await
    .unwrap();
    let error = String::from_utf8_lossy(&ran.stderr);
    let report: Value =
        serde_json::from_slice(&ran.stdout).unwrap_or_else(|e| panic!("{e} {error}"));
    assert_eq!(report["finished"], true, "{report}");
    let sent = report["sent"].as_u64().unwrap();
    assert!(sent >= 600, "{report}");
    writing.await.unwrap();
    database.wait_until_recorded().await;
    database.wait_until_confirmed().await;

    let (all, stored) = (database.expected().await, stored(&emulator));
    let mut copies = 0;
    for key in ["o-0", "o-1", "o-2"] {
        let (all, stored) = (of_key(&all, key), &stored[key]);
        let old = of_key(&old, key);
        let again = stored.len() - all.len();
        copies += again as u64;
        assert!(again >= old.len(), "{key}: {again} copies\n{}", relay.log());
        // The replay has published `again` events of this key a second time. Check that these are the oldest `again`
        // events of the key, and that their second copies are in order and in one block.
        let block = &all[..again];
        let begin = stored
            .windows(again)
            .rposition(|window| window == block)
            .unwrap_or_else(|| panic!("{key} is not in one block: {stored:?}"));
        // Check that all other messages are the first copies of the events, in order.
        let rest = [&stored[..begin], &stored[begin + again..]].concat();
        assert_eq!(rest, all, "{key}");
    }
    assert_eq!(copies, sent);
    let named = "SELECT count(*) FROM outbox.dispatch WHERE replay = 'r1' AND state = 'published' \
                 AND error IS NULL AND message_id IS NOT NULL";
    assert_eq!(database.number(named).await as u64, sent);
    let rest = "SELECT count(*) FROM outbox.replay_event";
    assert_eq!(database.number(rest).await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_replayed_by_its_id_carries_the_name_of_the_replay() {
    let (database, emulator, _relay) = with_published_events(20, 2).await;
    let mut subscriber = Subscriber::new(&emulator, "order.events").await;
    let id = "SELECT id::text FROM outbox.events WHERE version = 7";
    let id = database.text(id).await;
    // Check that a dry run, and a command without `--yes`, change nothing.
    let found = replayed(&database, 0, &[&id, "--dry-run"]);
    assert_eq!(
        (&found["events"], &found["first_ids"][0]),
        (&1.into(), &id.as_str().into())
    );
    let refused = replay(&database, &[&id]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("confirmation-missing"));
    let stored_before = emulator.journal().counts().stored_messages;

    let report = replayed(&database, 0, &[&id, "--yes", "--name", "just.one"]);
    assert_eq!(
        (&report["sent"], &report["finished"]),
        (&1.into(), &true.into())
    );
    let message = subscriber.take(1).await.remove(0);
    assert_eq!(message.attributes["event_id"], id);
    assert_eq!(message.attributes["replay"], "just.one");
    assert_eq!(message.ordering_key, "o-1");
    let stored = emulator.journal().counts().stored_messages;
    assert_eq!(stored, stored_before + 1);
    // Check that the name of a replay cannot be used again, and that a replay that has ended cannot be
    // resumed.
    let again = replay(&database, &[&id, "--yes", "--name", "just.one"]);
    assert!(String::from_utf8_lossy(&again.stderr).contains("there is a replay called just.one"));
    let over = replay(&database, &["--resume", "just.one"]);
    assert!(String::from_utf8_lossy(&over.stderr).contains("has ended"));
    // Check that new events of the key do not carry the attribute `replay`.
    insert_orders(&database, 2, 2).await;
    for message in subscriber.take(2).await {
        assert!(!message.attributes.contains_key("replay"), "{message:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replay_can_choose_events_by_position_time_and_key() {
    let (database, emulator, _relay) = with_published_events(40, 4).await;
    let at = |n: u32| {
        format!(
            "SELECT d.commit_lsn::text FROM outbox.dispatch d JOIN outbox.events e ON e.id = d.event_id \
             WHERE e.version = {n}"
        )
    };
    let (from, to) = (database.text(&at(11)).await, database.text(&at(20)).await);
    let found = replayed(
        &database,
        0,
        &["--from-lsn", &from, "--to-lsn", &to, "--dry-run"],
    );
    assert_eq!(found["events"], 10);
    let keyed = [
        "--from-lsn",
        &from,
        "--key",
        "o-3",
        "--topic",
        TOPIC,
        "--dry-run",
    ];
    assert_eq!(replayed(&database, 0, &keyed)["events"], 8);
    assert_eq!(
        replayed(&database, 0, &["--since", "1h", "--dry-run"])["events"],
        40
    );
    assert_eq!(
        replayed(&database, 1, &["--until", "1h", "--dry-run"])["events"],
        0
    );
    assert_eq!(
        replayed(&database, 1, &["--key", "O-3", "--dry-run"])["events"],
        0
    );
    // Check that the value of `--key` never runs as SQL.
    let evil = replayed(&database, 1, &["--key", "o-3' or true --", "--dry-run"]);
    assert_eq!(evil["events"], 0);
    let wrong = replay(&database, &["--from-lsn", "16/x", "--yes"]);
    assert!(String::from_utf8_lossy(&wrong.stderr).contains("16/B374D848"));
    let everything = replay(&database, &["--yes"]);
    assert!(String::from_utf8_lossy(&everything.stderr).contains("at least one of --key"));
    let none = "SELECT count(*) FROM outbox.replay";
    assert_eq!(database.number(none).await, 0);
    let unknown = replay(&database, &["--key", "nobody", "--yes"]);
    assert_eq!(unknown.status.code(), Some(1));
    assert_eq!(emulator.journal().counts().stored_messages, 40);
    assert_eq!(
        replayed(&database, 0, &["--key", "o-3", "--yes"])["sent"],
        10
    );
    assert_eq!(emulator.journal().counts().stored_messages, 50);
}

/// Checks the messages of one ordering key after a replay:
///
/// - `old`: the replayed events. Each of them was published once before.
/// - `new`: the events that were inserted after the replay began.
/// - `later`: the event ids of all messages that Pub/Sub has stored since the first publication of `old`, in this
///   order.
fn old_events_are_repeated_as_a_block(later: &[String], old: &[String], new: &[String]) {
    // Check that each old event is published again, in order. A crash may repeat some of them.
    let mut wanted = old.iter().peekable();
    for id in later {
        wanted.next_if(|wanted| *wanted == id);
    }
    assert_eq!(wanted.peek(), None);
    // Check that no new event is published between two old events.
    let is_old = |id: &&String| old.contains(id);
    let last_old = later.iter().rposition(|id| is_old(&id)).unwrap();
    let first_old = later.iter().position(|id| is_old(&id)).unwrap();
    assert!(later[first_old..=last_old].iter().all(|id| is_old(&id)));
    // Check that new events are complete and in order.
    let mut new = new.iter().peekable();
    for id in later {
        new.next_if(|wanted| *wanted == id);
    }
    assert_eq!(new.peek(), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replay_continues_after_a_crash_of_the_relay_and_of_the_command() {
    for policy in ["quarantine_key", "quarantine_event"] {
        let settings = [("POSTRIDER_ON_BAD_EVENT", policy)];
        let database = Database::start().await;
        let emulator = harness::emulator().await;
        let host = emulator.addr().to_string();
        let start = || Relay::start_with(&database, &host, &settings);
        let mut relay = start();
        insert_orders(&database, 3_000, 10).await;
        database.wait_until_recorded().await;
        let first = database.expected().await;
        let slow = Fault::new(Action::Delay(Duration::from_millis(20)));
        let slow = emulator.faults().inject(slow);
        let arguments = [
            "replay",
            "--topic",
            "order.events",
            "--yes",
            "--name",
            "big",
        ];
        let command = postrider(&arguments, &environment(&database))
            .spawn()
            .unwrap();
        let released = "SELECT count(*) FROM outbox.dispatch WHERE replay = 'big'";
        eventually("some events are released", || async {
            (database.number(released).await > 500).then_some(())
        })
        .await;
        kill(&database, command).await;
        relay.kill_9();
        harness::wait_until_killed_relays_are_gone(&database, &emulator).await;
        insert_orders(&database, 100, 10).await;
        relay = start();
        emulator.faults().lift(slow);
        let report = replayed(&database, 0, &["--resume", "big"]);
        assert_eq!(report["finished"], true, "{report}\n{}", relay.log());
        insert_orders(&database, 100, 10).await;
        database.wait_until_recorded().await;
        assert_eq!(database.number(released).await, 3_000);
        let aside = "SELECT count(*) FROM outbox.dispatch WHERE state <> 'published'";
        assert_eq!(database.number(aside).await, 0, "{policy}\n{}", relay.log());
        let (stored, all) = (stored(&emulator), database.expected().await);
        for (stream, ids) in &first {
            let copies = &stored[&stream.ordering_key];
            println!("{policy} {stream:?}");
            let later = &copies[ids.len()..];
            old_events_are_repeated_as_a_block(later, ids, &all[stream][ids.len()..]);
        }
        relay.stop().await;
    }
}
