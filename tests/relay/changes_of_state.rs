//! Tests how soon the views show a change of the relay's state, and whether all views show the same state
//! in the meantime.

use std::time::{Duration, Instant};

use pubsub_emulator::{Action, Fault};
use tonic::Code;

use crate::condition::{command, delivering, json, status, wait_for_command, wait_for_state};
use crate::harness::{self, Database, Relay, eventually, insert_orders};
use crate::new_snapshot::begin;

/// The supervisor polls every five seconds. The relay must write its state also between two polls. To test
/// this, topics begin to fail just after a poll.
#[tokio::test(flavor = "multi_thread")]
async fn the_commands_learn_at_once_that_topics_fail() {
    let (database, emulator, addr, _relay) = delivering().await;
    for n in 1..=30 {
        let topic = format!("projects/demo/topics/t{n}.events");
        emulator.create_topic(&topic).await.unwrap();
    }
    let since_poll = format!(
        "SELECT (extract(epoch FROM clock_timestamp() - state_change) * 1000)::bigint \
         FROM pg_stat_activity WHERE application_name = 'postrider supervisor ' || \
             (SELECT active_pid FROM pg_replication_slots WHERE slot_name = '{}')",
        database.slot()
    );
    // A busy machine may delay the relay, so it is enough if one of three attempts is in time.
    let mut attempts = Vec::new();
    for attempt in 0..3 {
        eventually("the supervisor has just polled", || async {
            (database.number(&since_poll).await < 200).then_some(())
        })
        .await;
        let missing = emulator
            .faults()
            .inject(Fault::new(Action::Fail(Code::NotFound)));
        let insert = format!(
            "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, version) \
             SELECT 't' || n, 'a{attempt}-' || n, 'Placed', 1 FROM generate_series(1, 30) n"
        );
        database.execute(&insert).await;
        let failed_for = format!(
            "SELECT coalesce(min((condition ->> 'for_seconds')::float8 * 1000), -1)::bigint \
             FROM outbox.relay WHERE slot = '{}' AND condition ->> 'state' = 'blocked-on-pubsub'",
            database.slot()
        );
        let millis = eventually("the relay writes that it is blocked", || async {
            let millis = database.number(&failed_for).await;
            (millis >= 0).then_some(millis)
        })
        .await;
        attempts.push(millis);
        let ran = command(&database, &["status", "--json"]);
        assert_eq!(json(&ran)["state"], "blocked-on-pubsub", "{ran:?}");
        emulator.faults().lift(missing);
        database.wait_until_recorded().await;
        wait_for_state(&addr, "streaming").await;
        wait_for_command(&database, "streaming").await;
        if millis < 4_200 {
            return;
        }
    }
    panic!("the relay wrote its state late: {attempts:?} ms");
}

/// After an outage, the relay sends the failed requests of 5,000 keys again, a few at a time. Soon after
/// the first of them succeed, it must no longer report that it is blocked.
#[tokio::test(flavor = "multi_thread")]
async fn a_relay_that_delivers_again_after_an_outage_is_not_blocked() {
    let (database, emulator, addr, _relay) = delivering().await;
    let faults = emulator.faults();
    let fails = faults.inject(Fault::new(Action::Fail(Code::Unavailable)));
    insert_orders(&database, 5_000, 5_000).await;
    eventually("the relay is blocked for long", || async {
        let status = status(&addr).await?;
        let is_blocked = status["state"] == "blocked-on-pubsub";
        (is_blocked && status["for_seconds"].as_f64()? > 8.0).then_some(())
    })
    .await;
    let before = status(&addr).await.unwrap()["events_published"].as_u64();
    faults.inject(Fault::new(Action::Delay(Duration::from_millis(400))));
    faults.lift(fails);
    let mut delivers_since = None;
    let seen = std::sync::Mutex::new(Vec::new());
    eventually("everything is published", || async {
        let status = status(&addr).await?;
        seen.lock().unwrap().push((Instant::now(), status.clone()));
        let published = status["events_published"].as_u64()?;
        (published >= before? + 5_000).then_some(())
    })
    .await;
    let seen = seen.into_inner().unwrap();
    let first = seen[0].0;
    for (at, status) in seen {
        if status["events_published"].as_u64() <= before {
            continue;
        }
        let since = *delivers_since.get_or_insert(at);
        let is_late = at.duration_since(since) > Duration::from_millis(2_500);
        assert!(
            !is_late || status["state"] != "blocked-on-pubsub",
            "{:?} after the end of the outage: {status}",
            at.duration_since(first)
        );
    }
    database.wait_until_recorded().await;
}

/// The relay is killed, but PostgreSQL continues to create its slot. The commands must notice that the
/// relay is gone, although its slot looks in use.
#[tokio::test(flavor = "multi_thread")]
async fn a_relay_that_is_killed_while_it_creates_its_slot_is_down() {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    let relay = Relay::start(&database, &emulator);
    insert_orders(&database, 10, 5).await;
    database.wait_until_recorded().await;
    relay.stop().await;
    database.drop_slot().await;
    let (transaction, _) = begin(&database).await;
    let relay = Relay::start(&database, &emulator);
    let recovers = eventually("the command says that the relay recovers", || async {
        let state = json(&command(&database, &["status", "--json"]))["state"].clone();
        ["recovering", "blocked-on-database"]
            .iter()
            .any(|name| state == *name)
            .then_some(Instant::now())
    })
    .await;
    // The relay writes its state again every few seconds, so the commands must keep showing it.
    while recovers.elapsed() < Duration::from_secs(20) {
        let ran = command(&database, &["status", "--json"]);
        let state = &json(&ran)["state"];
        assert!(
            state == "recovering" || state == "blocked-on-database",
            "{ran:?}"
        );
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    relay.kill_9();
    let killed = Instant::now();
    loop {
        let ran = command(&database, &["status", "--json"]);
        let state = json(&ran)["state"].clone();
        if state == "down" || state == "missing" {
            break;
        }
        assert!(killed.elapsed() < Duration::from_secs(30), "{ran:?}");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    transaction.batch_execute("COMMIT").await.unwrap();
    let _relay = Relay::start(&database, &emulator);
    insert_orders(&database, 10, 5).await;
    database.wait_until_recorded().await;
}
