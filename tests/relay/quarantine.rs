//! Bad events: found, set aside with what waits behind them, released in order, or discarded.

use std::collections::BTreeMap;
use std::time::Duration;

use pubsub_emulator::checks::{self, Expected, Report, Stream};
use pubsub_emulator::{Action, Attempt, Fault, FaultId, RunningEmulator};

use crate::harness::{self, Database, Relay, eventually, insert_orders, postrider};
use crate::http::free_addr;

const BAD: &str = "00000000-0000-4000-8000-00000000bad0";
const BAD_TOO: &str = "00000000-0000-4000-8000-00000000bad1";
const TOPIC: &str = "projects/demo/topics/order.events";

/// Inserts one event with this id into the key, as number `version` of its kind.
async fn insert_bad(database: &Database, id: &str, key: &str) {
    database
        .execute(&format!(
            "INSERT INTO outbox.events (id, aggregatetype, aggregateid, event_type, version, \
                 payload, occurred_at) \
             VALUES ('{id}', 'order', '{key}', 'Bad', 0, '{{\"bad\": true}}', clock_timestamp())"
        ))
        .await;
}

fn poison(emulator: &RunningEmulator, id: &str) -> FaultId {
    let event_id = id.to_owned();
    emulator
        .faults()
        .inject(Fault::new(Action::Poison { event_id }))
}

/// How many rows are in this state.
async fn in_state(database: &Database, state: &str) -> i64 {
    let sql = format!("SELECT count(*) FROM outbox.dispatch WHERE state = '{state}'");
    database.number(&sql).await
}

async fn wait_for_state(database: &Database, state: &str, count: i64) {
    eventually(&format!("{count} rows are {state}"), || async {
        (in_state(database, state).await == count).then_some(())
    })
    .await;
}

/// Ids of all events by stream in commit order, without those that are not published.
async fn expected_published(database: &Database) -> Expected {
    let rows = database
        .client
        .query(
            "SELECT d.topic, coalesce(d.ordering_key, ''), d.event_id::text \
             FROM outbox.dispatch d WHERE d.state = 'published' \
             ORDER BY d.commit_lsn, d.ordinal",
            &[],
        )
        .await
        .unwrap();
    let mut expected = BTreeMap::new();
    for row in rows {
        let (topic, key, id): (String, String, String) = (row.get(0), row.get(1), row.get(2));
        let events: &mut Vec<String> = expected.entry(Stream::new(topic, key)).or_default();
        events.push(id);
    }
    expected
}

/// What the journal holds against what the table says was published, in commit order.
async fn check_published(database: &Database, emulator: &RunningEmulator) -> Report {
    let expected = expected_published(database).await;
    checks::check(&emulator.journal().attempts(), &expected)
}

/// Runs a command of `postrider quarantine` against the database.
fn quarantine(database: &Database, arguments: &[&str]) -> String {
    let arguments: Vec<&str> = ["quarantine"].iter().chain(arguments).copied().collect();
    let ran = postrider(&arguments, &[("DATABASE_URL", &database.url)])
        .output()
        .unwrap();
    let (out, err) = (
        String::from_utf8_lossy(&ran.stdout).into_owned(),
        String::from_utf8_lossy(&ran.stderr).into_owned(),
    );
    assert!(ran.status.success(), "{arguments:?}: {out}{err}");
    out
}

#[tokio::test(flavor = "multi_thread")]
async fn one_poison_event_among_thousands_is_set_aside_and_only_its_key_waits() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    poison(&emulator, BAD);
    insert_orders(&database, 2_000, 20).await;
    insert_bad(&database, BAD, "o-7").await;
    insert_orders(&database, 2_000, 20).await;
    let relay = Relay::start(&database, &emulator);
    database.wait_until_recorded().await;
    database.wait_until_confirmed().await;
    assert_eq!(
        in_state(&database, "quarantined").await,
        101,
        "{}",
        relay.log()
    );
    let row = database
        .client
        .query_one(
            "SELECT error, attempts, ordering_key, topic FROM outbox.dispatch \
             WHERE event_id::text = $1",
            &[&BAD],
        )
        .await
        .unwrap();
    let error: String = row.get(0);
    assert!(
        error.starts_with("event-refused: InvalidArgument"),
        "{error}"
    );
    let attempts = emulator.journal().attempts();
    let carried = |attempt: &&Attempt| attempt.event_ids.iter().flatten().any(|id| **id == *BAD);
    assert_eq!(
        row.get::<_, i32>(1) as usize,
        attempts.iter().filter(carried).count(),
        "every request that carried it is counted"
    );
    assert_eq!(
        (row.get::<_, &str>(2), row.get::<_, &str>(3)),
        ("o-7", TOPIC)
    );
    let waits = "SELECT count(*) FROM outbox.dispatch WHERE ordering_key = 'o-7' \
         AND state = 'quarantined' AND error LIKE 'waits for event 00000000-%bad0 in quarantine'";
    assert_eq!(database.number(waits).await, 100);
    let others = "SELECT count(*) FROM outbox.dispatch WHERE ordering_key <> 'o-7' \
         AND state <> 'published'";
    assert_eq!(database.number(others).await, 0);
    let report = check_published(&database, &emulator).await;
    assert!(
        report.is_clean() && report.duplicates.is_empty(),
        "{report}"
    );
    assert_eq!(report.stored_messages, 3_900);
    assert!(
        relay.log().contains("set aside in quarantine"),
        "{}",
        relay.log()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn under_quarantine_event_only_the_bad_event_is_set_aside() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    poison(&emulator, BAD);
    insert_orders(&database, 300, 3).await;
    insert_bad(&database, BAD, "o-1").await;
    insert_orders(&database, 300, 3).await;
    let policy = [("POSTRIDER_ON_BAD_EVENT", "quarantine_event")];
    let addr = emulator.addr().to_string();
    let _relay = Relay::start_with(&database, &addr, &policy);
    database.wait_until_recorded().await;
    assert_eq!(in_state(&database, "quarantined").await, 1);
    let report = check_published(&database, &emulator).await;
    assert!(
        report.is_clean() && report.duplicates.is_empty(),
        "{report}"
    );
    assert_eq!(report.stored_messages, 600);
}

#[tokio::test(flavor = "multi_thread")]
async fn under_halt_the_relay_stops_at_the_bad_event_with_what_to_do() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    poison(&emulator, BAD);
    insert_orders(&database, 30, 1).await;
    insert_bad(&database, BAD, "o-0").await;
    insert_orders(&database, 30, 1).await;
    let addr = emulator.addr().to_string();
    let policy = [("POSTRIDER_ON_BAD_EVENT", "halt")];
    let relay = Relay::start_with(&database, &addr, &policy);
    relay.wait_for_error("event-refused").await;
    let log = relay.log();
    assert_eq!(relay.wait().await.code(), Some(5), "{log}");
    assert!(log.contains(BAD) && log.contains("on_bad_event"), "{log}");
    assert_eq!(in_state(&database, "quarantined").await, 0);
    assert_eq!(in_state(&database, "published").await, 30, "all before it");
    // It comes again, and is set aside by another policy.
    let relay = Relay::start(&database, &emulator);
    database.wait_until_recorded().await;
    assert_eq!(in_state(&database, "quarantined").await, 31);
    let report = check_published(&database, &emulator).await;
    assert!(
        report.is_clean() && report.duplicates.is_empty(),
        "{report}"
    );
    drop(relay);
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_that_cannot_be_mapped_are_set_aside_with_their_key_as_far_as_it_is_known() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    insert_orders(&database, 20, 2).await;
    database
        .execute(
            "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, headers) \
                 VALUES ('order', 'o-0', 'Headers', '[1]'); \
             INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, payload) \
                 VALUES ('order', 'big', 'TooLarge', to_jsonb(repeat('x', 10000001))); \
             INSERT INTO outbox.events (aggregatetype, aggregateid, event_type) \
                 VALUES ('order', repeat('k', 1025), 'LongKey'); \
             INSERT INTO outbox.events (aggregatetype, aggregateid, event_type) \
                 VALUES ('', 'o-1', 'NoTopic')",
        )
        .await;
    insert_orders(&database, 20, 2).await;
    let relay = Relay::start(&database, &emulator);
    database.wait_until_recorded().await;
    database.wait_until_confirmed().await;
    let rows = database
        .client
        .query(
            "SELECT e.event_type, d.error, d.topic, d.ordering_key \
             FROM outbox.dispatch d JOIN outbox.events e ON e.id = d.event_id \
             WHERE d.state = 'quarantined' AND e.event_type <> 'OrderPlaced' ORDER BY 1",
            &[],
        )
        .await
        .unwrap();
    let found: Vec<(&str, &str, Option<&str>, Option<&str>)> = rows
        .iter()
        .map(|row| {
            let error: &str = row.get(1);
            let (code, _) = error.split_once(':').unwrap();
            (row.get(0), code, row.get(2), row.get(3))
        })
        .collect();
    let topic = Some(TOPIC);
    assert_eq!(
        found,
        [
            ("Headers", "event-invalid", topic, Some("o-0")),
            ("LongKey", "event-invalid", topic, None),
            ("NoTopic", "event-invalid", None, Some("o-1")),
            ("TooLarge", "event-too-large", topic, Some("big")),
        ]
    );
    // o-0 waits from the bad event on; what came before it and all of o-1 was published.
    assert_eq!(
        in_state(&database, "published").await,
        30,
        "{}",
        relay.log()
    );
    assert_eq!(in_state(&database, "quarantined").await, 14);
    let report = check_published(&database, &emulator).await;
    assert!(
        report.is_clean() && report.duplicates.is_empty(),
        "{report}"
    );
    assert!(!relay.log().contains("xxxxxxxx"), "no payload in the log");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_letter_tells_of_the_bad_event_and_not_of_those_that_wait() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let dead = "projects/demo/topics/dead";
    emulator.create_topic(dead).await.unwrap();
    // Only for its own topic: the letter has the same event id.
    let event_id = BAD.to_owned();
    let fault = Fault::new(Action::Poison { event_id }).on_topic("order.events");
    emulator.faults().inject(fault);
    insert_bad(&database, BAD, "o-1").await;
    insert_orders(&database, 20, 2).await;
    database
        .execute(
            "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, headers, payload) \
             VALUES ('order', 'h', 'Headers', '[1]', '{}')",
        )
        .await;
    let addr = emulator.addr().to_string();
    let settings = [("POSTRIDER_DEAD_LETTER_TOPIC", "dead")];
    let relay = Relay::start_with(&database, &addr, &settings);
    database.wait_until_recorded().await;
    assert_eq!(
        in_state(&database, "quarantined").await,
        12,
        "{}",
        relay.log()
    );
    let attempts = emulator.journal().attempts();
    let letters = attempts
        .iter()
        .filter(|a| &*a.topic == dead && a.is_stored());
    let ids: Vec<&str> = letters
        .flat_map(|attempt| attempt.event_ids.iter().flatten())
        .map(|id| &**id)
        .collect();
    assert_eq!(ids.len(), 2, "{ids:?}");
    assert!(ids.contains(&BAD));
    // A letter that is refused, too, does not hold the event up.
    emulator.faults().lift_all();
    let second = BAD_TOO.to_owned();
    emulator
        .faults()
        .inject(Fault::new(Action::Poison { event_id: second }));
    insert_bad(&database, BAD_TOO, "o-0").await;
    database.wait_until_recorded().await;
    relay.wait_for_log("refuses the dead letter").await;
    assert_eq!(in_state(&database, "quarantined").await, 13);
    database.wait_until_confirmed().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn kill_9_in_the_middle_of_the_search_and_a_restart_keep_the_key_blocked_and_lose_nothing() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    poison(&emulator, BAD);
    insert_orders(&database, 1_000, 2).await;
    insert_bad(&database, BAD, "o-1").await;
    insert_orders(&database, 1_000, 2).await;
    let slow = Action::Delay(Duration::from_millis(30));
    let slow = emulator.faults().inject(Fault::new(slow));
    for errors in 1..5 {
        let relay = Relay::start(&database, &emulator);
        // It ends early when the bad event is alone in its request.
        eventually("the search is under way", || async {
            let refused = emulator.journal().counts().error_answers;
            let found = in_state(&database, "quarantined").await > 0;
            (refused >= errors * 2 || found).then_some(())
        })
        .await;
        relay.kill_9();
    }
    emulator.faults().lift(slow);
    let relay = Relay::start(&database, &emulator);
    database.wait_until_recorded().await;
    let before = in_state(&database, "quarantined").await;
    assert_eq!(before, 501, "{}", relay.log());
    relay.kill_9();
    let relay = Relay::start(&database, &emulator);
    relay
        .wait_for_log("events of these keys wait in quarantine")
        .await;
    insert_orders(&database, 10, 2).await;
    database.wait_until_recorded().await;
    assert_eq!(in_state(&database, "quarantined").await, before + 5);
    let report = check_published(&database, &emulator).await;
    assert!(report.is_clean(), "{report}");
}

/// A key with a bad event, and what waits behind it; the relay's settings are the default ones.
async fn with_a_blocked_key(events: u32) -> (Database, RunningEmulator, FaultId) {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let fault = poison(&emulator, BAD);
    insert_orders(&database, 10, 2).await;
    insert_bad(&database, BAD, "o-1").await;
    insert_orders(&database, events, 2).await;
    (database, emulator, fault)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_released_key_goes_out_in_commit_order_while_services_keep_writing_to_it() {
    let (database, emulator, fault) = with_a_blocked_key(1_000).await;
    let relay = Relay::start(&database, &emulator);
    wait_for_state(&database, "quarantined", 501).await;
    emulator.faults().lift(fault);
    let (writer, connection) = tokio_postgres::connect(&database.url, tokio_postgres::NoTls)
        .await
        .unwrap();
    tokio::spawn(connection);
    let writing = tokio::spawn(async move {
        for _ in 0..60 {
            writer
                .batch_execute(&harness::insert_orders_sql(50, 2))
                .await
                .unwrap();
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    });
    // Its first event: what is behind it goes with it.
    let said = quarantine(&database, &["release", BAD]);
    assert!(said.contains("first of key o-1"), "{said}");
    relay.wait_for_log("is released from quarantine").await;
    writing.await.unwrap();
    database.wait_until_recorded().await;
    wait_for_state(&database, "quarantined", 0).await;
    wait_for_state(&database, "released", 0).await;
    database.wait_until_confirmed().await;
    let report = harness::check(&database, &emulator).await;
    assert!(
        report.is_clean() && report.duplicates.is_empty(),
        "{report}\n{}",
        relay.log()
    );
    assert_eq!(report.stored_messages, 4_011);
    let cleared = "SELECT count(*) FROM outbox.dispatch WHERE error IS NOT NULL";
    assert_eq!(database.number(cleared).await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn kill_9_in_the_middle_of_a_release_goes_on_with_it_at_the_next_start() {
    let (database, emulator, fault) = with_a_blocked_key(2_000).await;
    let relay = Relay::start(&database, &emulator);
    wait_for_state(&database, "quarantined", 1_001).await;
    relay.kill_9();
    // A relay that is down: it happens at its next start.
    emulator.faults().lift(fault);
    quarantine(&database, &["release", "--key", "o-1"]);
    let slow = Fault::new(Action::Delay(Duration::from_millis(50)));
    let slow = emulator.faults().inject(slow);
    for left in [900, 600, 300] {
        let relay = Relay::start(&database, &emulator);
        insert_orders(&database, 20, 2).await;
        eventually("some are sent", || async {
            (in_state(&database, "released").await < left).then_some(())
        })
        .await;
        relay.kill_9();
    }
    emulator.faults().lift(slow);
    let relay = Relay::start(&database, &emulator);
    database.wait_until_recorded().await;
    wait_for_state(&database, "released", 0).await;
    wait_for_state(&database, "quarantined", 0).await;
    let report = harness::check(&database, &emulator).await;
    assert!(report.is_clean(), "{report}\n{}", relay.log());
    // The key is not blocked any more.
    insert_orders(&database, 20, 2).await;
    database.wait_until_recorded().await;
    assert_eq!(in_state(&database, "quarantined").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_fails_again_goes_back_with_all_behind_it_and_the_key_stays_blocked() {
    let (database, emulator, _fault) = with_a_blocked_key(600).await;
    let relay = Relay::start(&database, &emulator);
    wait_for_state(&database, "quarantined", 301).await;
    let attempts = format!("SELECT attempts::bigint FROM outbox.dispatch WHERE event_id = '{BAD}'");
    let before = database.number(&attempts).await;
    quarantine(&database, &["release", "--all"]);
    eventually("it was tried again", || async {
        (database.number(&attempts).await > before).then_some(())
    })
    .await;
    wait_for_state(&database, "quarantined", 301).await;
    insert_orders(&database, 20, 2).await;
    database.wait_until_recorded().await;
    assert_eq!(
        in_state(&database, "quarantined").await,
        311,
        "{}",
        relay.log()
    );
    let report = check_published(&database, &emulator).await;
    assert!(
        report.is_clean() && report.duplicates.is_empty(),
        "{report}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn the_bad_event_discarded_and_its_key_released_leaves_out_nothing_else() {
    let (database, emulator, _fault) = with_a_blocked_key(400).await;
    let relay = Relay::start(&database, &emulator);
    wait_for_state(&database, "quarantined", 201).await;
    quarantine(&database, &["discard", BAD, "--yes"]);
    quarantine(
        &database,
        &["release", "--key", "o-1", "--topic", "order.events"],
    );
    wait_for_state(&database, "quarantined", 0).await;
    wait_for_state(&database, "released", 0).await;
    insert_orders(&database, 20, 2).await;
    database.wait_until_recorded().await;
    assert_eq!(in_state(&database, "discarded").await, 1);
    assert_eq!(
        in_state(&database, "quarantined").await,
        0,
        "{}",
        relay.log()
    );
    let report = check_published(&database, &emulator).await;
    assert!(
        report.is_clean() && report.duplicates.is_empty(),
        "{report}"
    );
    assert_eq!(report.stored_messages, 430);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_of_which_everything_is_discarded_is_not_blocked_any_more() {
    let (database, emulator, _fault) = with_a_blocked_key(40).await;
    let relay = Relay::start(&database, &emulator);
    wait_for_state(&database, "quarantined", 21).await;
    quarantine(&database, &["discard", "--key", "o-1", "--yes"]);
    relay.wait_for_log("nothing is left in quarantine").await;
    insert_orders(&database, 20, 2).await;
    database.wait_until_recorded().await;
    assert_eq!(in_state(&database, "quarantined").await, 0);
    assert_eq!(in_state(&database, "discarded").await, 21);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_that_was_pruned_stays_in_quarantine_with_the_reason() {
    let (database, emulator, fault) = with_a_blocked_key(40).await;
    let relay = Relay::start(&database, &emulator);
    wait_for_state(&database, "quarantined", 21).await;
    emulator.faults().lift(fault);
    database
        .execute(&format!("DELETE FROM outbox.events WHERE id = '{BAD}'"))
        .await;
    quarantine(&database, &["release", "--all"]);
    relay
        .wait_for_log("cannot be released from quarantine")
        .await;
    wait_for_state(&database, "quarantined", 21).await;
    let shown = quarantine(&database, &["show", BAD]);
    assert!(shown.contains("is not in its table any more"), "{shown}");
    quarantine(&database, &["discard", BAD, "--yes"]);
    quarantine(&database, &["release", "--all"]);
    wait_for_state(&database, "published", 50).await;
    let report = check_published(&database, &emulator).await;
    assert!(
        report.is_clean() && report.duplicates.is_empty(),
        "{report}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_that_could_not_be_mapped_goes_out_when_other_settings_can() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let long = "repeat('k', 1025)";
    for kind in ["First", "Second"] {
        database
            .execute(&format!(
                "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, payload) \
                 VALUES ('order', {long}, '{kind}', '{{}}')"
            ))
            .await;
    }
    // The aggregate id is an attribute as well, which may not be so long.
    let relay = Relay::start(&database, &emulator);
    wait_for_state(&database, "quarantined", 2).await;
    relay.stop().await;
    let mut file = tempfile::NamedTempFile::new().unwrap();
    let settings = "[[tables]]\ntable = 'outbox.events'\nordering = 'none'\n\
        topic = 'order.events'\ncolumns = { aggregateid = '', aggregatetype = '' }\n";
    std::io::Write::write_all(&mut file, settings.as_bytes()).unwrap();
    let path = file.path().display().to_string();
    quarantine(&database, &["release", "--all"]);
    let addr = emulator.addr().to_string();
    let relay = Relay::start_with(&database, &addr, &[("POSTRIDER_CONFIG", &path)]);
    wait_for_state(&database, "published", 2).await;
    assert_eq!(
        emulator.journal().counts().stored_messages,
        2,
        "{}",
        relay.log()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn under_quarantine_event_events_are_released_one_by_one() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let first = poison(&emulator, BAD);
    poison(&emulator, BAD_TOO);
    insert_bad(&database, BAD, "o-1").await;
    insert_bad(&database, BAD_TOO, "").await;
    insert_orders(&database, 20, 2).await;
    let policy = [("POSTRIDER_ON_BAD_EVENT", "quarantine_event")];
    let addr = emulator.addr().to_string();
    let relay = Relay::start_with(&database, &addr, &policy);
    wait_for_state(&database, "quarantined", 2).await;
    emulator.faults().lift(first);
    quarantine(&database, &["release", "--all"]);
    eventually("one is sent, the other fails again", || async {
        let left = in_state(&database, "quarantined").await;
        let released = in_state(&database, "released").await;
        ((left, released) == (1, 0)).then_some(())
    })
    .await;
    assert_eq!(
        in_state(&database, "published").await,
        21,
        "{}",
        relay.log()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn the_quarantine_is_seen_in_metrics_and_status_without_the_names_of_keys() {
    let (database, emulator, _fault) = with_a_blocked_key(20).await;
    let http = free_addr();
    let addr = emulator.addr().to_string();
    let relay = Relay::start_with(&database, &addr, &[("POSTRIDER_HTTP_ADDR", &http)]);
    wait_for_state(&database, "quarantined", 11).await;
    let page = |path: &'static str| {
        let http = http.clone();
        async move {
            use tokio::io::{AsyncReadExt, AsyncWriteExt};
            let mut stream = tokio::net::TcpStream::connect(&http).await.ok()?;
            let request = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
            stream.write_all(request.as_bytes()).await.ok()?;
            let mut text = String::new();
            stream.read_to_string(&mut text).await.ok()?;
            Some(text)
        }
    };
    let metrics = eventually("the gauge shows one key", || async {
        let text = page("/metrics").await?;
        text.contains("postrider_blocked_keys 1").then_some(text)
    })
    .await;
    assert!(
        metrics.contains("events_quarantined_total{kind=\"event-refused\"} 1"),
        "{metrics}"
    );
    assert!(
        metrics.contains("events_quarantined_total{kind=\"waits\"} 10"),
        "{metrics}"
    );
    eventually("nothing is left in memory", || async {
        let text = page("/metrics").await?;
        text.contains("postrider_in_flight_bytes 0\n").then_some(())
    })
    .await;
    let status = page("/status").await.unwrap();
    assert!(status.contains("\"blocked_keys\":1"), "{status}");
    assert!(
        !status.contains("o-1") && !metrics.contains("o-1"),
        "{}",
        relay.log()
    );
}

/// Puts rows of so many keys into quarantine, as if each had had a bad event.
async fn fill_quarantine(database: &Database, keys: u32) {
    database
        .execute(&format!(
            "INSERT INTO outbox.dispatch (commit_lsn, ordinal, event_id, topic, ordering_key, \
                 state, attempts, committed_at, error) \
             SELECT '0/8', n, gen_random_uuid(), '{TOPIC}', 'full-' || n, 'quarantined', 1, \
                    now(), 'event-refused: made by a test' \
             FROM generate_series(1, {keys}) n; \
             ANALYZE outbox.dispatch"
        ))
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_bad_key_too_many_stops_the_relay_and_nothing_of_it_is_confirmed() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let poisoned = poison(&emulator, BAD);
    fill_quarantine(&database, 100_000).await;
    let relay = Relay::start(&database, &emulator);
    insert_orders(&database, 20, 2).await;
    database.wait_until_recorded().await;
    insert_bad(&database, BAD, "o-1").await;
    relay.wait_for_error("quarantine-full").await;
    let log = relay.log();
    assert!(log.contains("postrider quarantine list"), "{log}");
    assert_eq!(relay.wait().await.code(), Some(5), "{log}");
    let of_it = format!("SELECT count(*) FROM outbox.dispatch WHERE event_id = '{BAD}'");
    assert_eq!(database.number(&of_it).await, 0);
    // It is met again, and goes when there is room.
    let relay = Relay::start(&database, &emulator);
    relay.wait_for_error("quarantine-full").await;
    assert_eq!(relay.wait().await.code(), Some(5));
    emulator.faults().lift(poisoned);
    let relay = Relay::start(&database, &emulator);
    database.wait_until_recorded().await;
    assert_eq!(emulator.journal().counts().stored_messages, 21);
    relay.stop().await;
    // A relay that starts with too many says so, too, and what the page says helps.
    fill_one_more(&database).await;
    let relay = Relay::start(&database, &emulator);
    relay.wait_for_error("quarantine-full").await;
    assert_eq!(relay.wait().await.code(), Some(5));
    quarantine(&database, &["discard", "--all", "--yes"]);
    let relay = Relay::start(&database, &emulator);
    insert_orders(&database, 20, 2).await;
    database.wait_until_recorded().await;
    assert_eq!(in_state(&database, "discarded").await, 100_001);
    relay.stop().await;
}

async fn fill_one_more(database: &Database) {
    database
        .execute(
            "INSERT INTO outbox.dispatch (commit_lsn, ordinal, event_id, topic, ordering_key, \
                 state, attempts, committed_at, error) \
             SELECT commit_lsn, 200000, gen_random_uuid(), topic, 'full-0', state, attempts, \
                    committed_at, error FROM outbox.dispatch WHERE state = 'quarantined' LIMIT 1",
        )
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bad_event_that_comes_while_its_key_is_released_has_a_dead_letter_and_its_turn() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let dead = "projects/demo/topics/dead";
    emulator.create_topic(dead).await.unwrap();
    let event_id = BAD.to_owned();
    let fault = Fault::new(Action::Poison { event_id }).on_topic("order.events");
    let fault = emulator.faults().inject(fault);
    insert_bad(&database, BAD, "o-1").await;
    insert_orders(&database, 1_000, 2).await;
    let addr = emulator.addr().to_string();
    let settings = [("POSTRIDER_DEAD_LETTER_TOPIC", "dead")];
    let relay = Relay::start_with(&database, &addr, &settings);
    wait_for_state(&database, "quarantined", 501).await;
    emulator.faults().lift(fault);
    let slow = Fault::new(Action::Delay(Duration::from_millis(1_500)));
    let slow = emulator.faults().inject(slow);
    quarantine(&database, &["release", "--all"]);
    eventually("the release is under way", || async {
        let released = in_state(&database, "released").await;
        (released > 0 && in_state(&database, "quarantined").await == 0).then_some(())
    })
    .await;
    database
        .execute(&format!(
            "INSERT INTO outbox.events (id, aggregatetype, aggregateid, event_type, headers) \
             VALUES ('{BAD_TOO}', 'order', 'o-1', 'Headers', '[1]')"
        ))
        .await;
    insert_orders(&database, 20, 2).await;
    let is_released = format!(
        "SELECT count(*) FROM outbox.dispatch WHERE event_id = '{BAD_TOO}' AND state = 'released'"
    );
    eventually("it stands behind what is released", || async {
        (database.number(&is_released).await == 1).then_some(())
    })
    .await;
    emulator.faults().lift(slow);
    // All before it goes out; it stays, with what is behind it.
    wait_for_state(&database, "quarantined", 11).await;
    wait_for_state(&database, "released", 0).await;
    let attempts = emulator.journal().attempts();
    let letters = attempts
        .iter()
        .filter(|a| &*a.topic == dead && a.is_stored());
    let letters: Vec<&str> = letters
        .flat_map(|attempt| attempt.event_ids.iter().flatten())
        .map(|id| &**id)
        .collect();
    assert_eq!(letters, [BAD, BAD_TOO], "{}", relay.log());
    database.wait_until_recorded().await;
    let to_orders = emulator.journal().attempts();
    let to_orders: Vec<_> = to_orders
        .into_iter()
        .filter(|a| &*a.topic == TOPIC)
        .collect();
    let report = checks::check(&to_orders, &expected_published(&database).await);
    assert!(
        report.is_clean() && report.duplicates.is_empty(),
        "{report}"
    );
    assert_eq!(report.stored_messages, 1_011);
    database.wait_until_confirmed().await;
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn hundreds_of_released_keys_of_a_missing_topic_do_not_keep_another_key_waiting() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let poisoned = poison(&emulator, BAD);
    let relay = Relay::start(&database, &emulator);
    // In the order of topics the missing one comes first.
    database
        .execute(
            "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, headers) \
             SELECT 'absent', 'a-' || n, 'Headers', '[1]' FROM generate_series(1, 600) n",
        )
        .await;
    insert_bad(&database, BAD, "o-1").await;
    wait_for_state(&database, "quarantined", 601).await;
    database
        .execute(
            "ALTER TABLE outbox.events DISABLE TRIGGER ALL; \
             UPDATE outbox.events SET headers = NULL; \
             ALTER TABLE outbox.events ENABLE TRIGGER ALL",
        )
        .await;
    emulator.faults().lift(poisoned);
    quarantine(&database, &["release", "--all"]);
    wait_for_state(&database, "published", 1).await;
    assert_eq!(
        in_state(&database, "released").await,
        600,
        "{}",
        relay.log()
    );
    emulator
        .create_topic("projects/demo/topics/absent.events")
        .await
        .unwrap();
    wait_for_state(&database, "published", 601).await;
    relay.stop().await;
}
