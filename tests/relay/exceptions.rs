//! `dispatch = exceptions`: published events have no row, nothing is lost all the same, and what is
//! repeated is repeated whole and in order.

use std::collections::HashSet;
use std::time::Duration;

use pubsub_emulator::checks::{self, Report};
use pubsub_emulator::{Action, Fault, RunningEmulator};

use crate::harness::{self, Database, Relay, eventually, postrider};

const EXCEPTIONS: [(&str, &str); 1] = [("POSTRIDER_DISPATCH", "exceptions")];
pub(crate) const BAD: &str = "00000000-0000-4000-8000-00000000bad0";

pub(crate) fn start(database: &Database, emulator: &RunningEmulator) -> Relay {
    start_with(database, emulator, &[])
}

pub(crate) fn start_with(
    database: &Database,
    emulator: &RunningEmulator,
    more: &[(&str, &str)],
) -> Relay {
    let settings: Vec<_> = EXCEPTIONS.iter().chain(more).copied().collect();
    Relay::start_with(database, &emulator.addr().to_string(), &settings)
}

/// Events with the versions `first..first + count`, one transaction each, over 5 keys.
fn insert_sql(key: &str, first: u32, count: u32) -> String {
    format!(
        "DO $$ BEGIN FOR i IN {first}..{last} LOOP \
         INSERT INTO outbox.events \
             (aggregatetype, aggregateid, event_type, version, payload, occurred_at) \
         VALUES ('order', '{key}-' || (i % 5), 'OrderPlaced', i, '{{}}', clock_timestamp()); \
         COMMIT; END LOOP; END $$",
        last = first + count - 1
    )
}

pub(crate) async fn insert(database: &Database, first: u32, count: u32) {
    database.execute(&insert_sql("o", first, count)).await;
}

pub(crate) async fn insert_bad(database: &Database, version: u32) {
    database
        .execute(&format!(
            "INSERT INTO outbox.events (id, aggregatetype, aggregateid, event_type, version, \
                 payload, occurred_at) \
             VALUES ('{BAD}', 'order', 'o-1', 'Bad', {version}, '{{}}', clock_timestamp())"
        ))
        .await;
}

pub(crate) fn poison(emulator: &RunningEmulator) {
    let event_id = BAD.to_owned();
    let fault = Fault::new(Action::Poison { event_id });
    emulator.faults().inject(fault);
}

pub(crate) fn stored(emulator: &RunningEmulator) -> HashSet<String> {
    let attempts = emulator.journal().attempts();
    let stored = attempts.iter().filter(|attempt| attempt.is_stored());
    let ids = stored.flat_map(|attempt| attempt.event_ids.iter().flatten());
    ids.map(|id| id.to_string()).collect()
}

/// Waits until every event is stored, or has a row, and the slot has confirmed everything.
pub(crate) async fn wait_until_delivered(
    database: &Database,
    emulator: &RunningEmulator,
    relay: &Relay,
) {
    let sql = "SELECT e.id::text FROM outbox.events e WHERE NOT EXISTS \
               (SELECT FROM outbox.dispatch d WHERE d.event_id = e.id)";
    eventually("every event is delivered", || async {
        let stored = stored(emulator);
        let rows = database.client.query(sql, &[]).await.unwrap();
        let is_missing = |row: &tokio_postgres::Row| !stored.contains(row.get::<_, &str>(0));
        let missing = rows.iter().any(is_missing);
        assert!(!relay.log().contains("error["), "{}", relay.log());
        (!missing).then_some(())
    })
    .await;
    wait_until_recovered(database).await;
    database.wait_until_confirmed().await;
}

async fn wait_until_recovered(database: &Database) {
    eventually("the mark of the recovery is gone", || async {
        let marked = "SELECT count(*) FROM outbox.relay WHERE recovering IS NOT NULL";
        (database.number(marked).await == 0).then_some(())
    })
    .await;
}

/// Waits until the relay has vouched for every event that is committed.
pub(crate) async fn wait_until_vouched(database: &Database) {
    let sql = "SELECT count(*) FROM outbox.relay r WHERE NOT EXISTS \
               (SELECT FROM outbox.events e WHERE e.xmin::text::bigint >= r.resolved_xid)";
    eventually("the relay has vouched", || async {
        (database.number(sql).await == 1).then_some(())
    })
    .await;
}

pub(crate) async fn rows(database: &Database, state: &str) -> i64 {
    let sql = format!("SELECT count(*) FROM outbox.dispatch WHERE state = '{state}'");
    database.number(&sql).await
}

/// Everything that is not set aside was published in order, and repeated as a whole.
pub(crate) async fn check(database: &Database, emulator: &RunningEmulator) -> Report {
    let mut expected = database.expected().await;
    let aside = "SELECT event_id::text FROM outbox.dispatch WHERE state <> 'published'";
    let aside = database.client.query(aside, &[]).await.unwrap();
    let aside: HashSet<String> = aside.iter().map(|row| row.get(0)).collect();
    for events in expected.values_mut() {
        events.retain(|id| !aside.contains(id));
    }
    checks::check(&emulator.journal().attempts(), &expected)
}

pub(crate) async fn assert_whole_and_in_order(
    database: &Database,
    emulator: &RunningEmulator,
    relay: &Relay,
) {
    let report = check(database, emulator).await;
    assert!(report.is_clean(), "{report}\n{}", relay.log());
}

/// The same, and nothing was repeated, but for what a lost slot cut short.
pub(crate) async fn assert_once_and_in_order(
    database: &Database,
    emulator: &RunningEmulator,
    relay: &Relay,
) {
    let report = check(database, emulator).await;
    let once = report.duplicates.is_empty() || relay.has_lost_its_slot();
    assert!(report.is_clean() && once, "{report}\n{}", relay.log());
}

/// A relay that has delivered so many events.
async fn after_some_events(count: u32) -> (Database, RunningEmulator, Relay) {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let relay = start(&database, &emulator);
    insert(&database, 1, count).await;
    wait_until_delivered(&database, &emulator, &relay).await;
    (database, emulator, relay)
}

async fn make_slot(database: &Database) {
    let slot = database.slot();
    let sql = format!("SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')");
    database.execute(&sql).await;
}

/// Waits until full records are back, and the tables are compared with them.
pub(crate) async fn wait_until_compared(database: &Database) {
    let sql = "SELECT count(*) FROM outbox.relay \
               WHERE dispatch = 'full' AND audit_marks IS NOT NULL";
    eventually("the tables are compared", || async {
        (database.number(sql).await == 1).then_some(())
    })
    .await;
}

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
async fn kill_9_under_load_loses_nothing_and_repeats_whole_and_in_order() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let slow = Action::Delay(Duration::from_millis(3));
    emulator.faults().inject(Fault::new(slow));
    insert(&database, 1, 3_000).await;
    for round in 1..=5 {
        let relay = start(&database, &emulator);
        let target = emulator.journal().counts().stored_messages + 300;
        // The relay before may have delivered and confirmed all that there was.
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

/// Keys with events in quarantine whose earlier events, which have no row, come again.
#[tokio::test(flavor = "multi_thread")]
async fn what_stands_before_a_blocked_event_is_repeated_before_it_when_the_slot_is_lost() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    poison(&emulator);
    // So that nothing is vouched for after the first events.
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
    eventually("all is released", || async {
        (rows(&database, "published").await == 41).then_some(())
    })
    .await;
    assert_whole_and_in_order(&database, &emulator, &relay).await;
}

pub(crate) fn release(database: &Database) {
    let url = [("DATABASE_URL", database.url.as_str())];
    let ran = postrider(&["quarantine", "release", "--all"], &url).output();
    assert!(ran.unwrap().status.success());
}

#[tokio::test(flavor = "multi_thread")]
async fn kill_9_in_the_middle_of_a_release_keeps_the_order_of_the_key() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    poison(&emulator);
    let mut relay = start(&database, &emulator);
    // Of a topic that is missing: the position stays, and each restart repeats everything.
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
        eventually("some more is released", || async {
            let more = rows(&database, "published").await > published;
            (more || rows(&database, "released").await == 0).then_some(())
        })
        .await;
        relay.kill_9();
        harness::wait_until_killed_relays_are_gone(&database, &emulator).await;
        relay = start(&database, &emulator);
    }
    eventually("all is released", || async {
        let left = rows(&database, "released").await + rows(&database, "quarantined").await;
        (left == 0).then_some(())
    })
    .await;
    // Once more all of it, the released ones among their neighbours.
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
async fn what_was_released_is_repeated_among_its_neighbours_when_the_slot_is_lost() {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    poison(&emulator);
    let relay = start(&database, &emulator);
    insert(&database, 1, 50).await;
    wait_until_delivered(&database, &emulator, &relay).await;
    // As long as it runs, nothing that comes later is vouched for.
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
    eventually("all is released", || async {
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

#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_slot_costs_nothing_but_repeats_since_the_relay_vouched_last() {
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
async fn a_slot_that_is_dropped_and_made_again_after_a_crash_loses_nothing() {
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

const OUT: &str = "ALTER PUBLICATION postrider DROP TABLE outbox.events";
const IN: &str = "ALTER PUBLICATION postrider ADD TABLE outbox.events";

/// Also undone between two looks.
#[tokio::test(flavor = "multi_thread")]
async fn rows_of_a_gap_of_the_publication_are_delivered_by_a_relay_that_runs() {
    let (database, emulator, relay) = after_some_events(300).await;
    for round in 0..2 {
        database.execute(OUT).await;
        let gap = format!("gap{round}");
        database.execute(&insert_sql(&gap, 1, 50)).await;
        database.execute(IN).await;
        insert(&database, 1_000 + round * 300, 300).await;
        wait_until_delivered(&database, &emulator, &relay).await;
        assert_whole_and_in_order(&database, &emulator, &relay).await;
    }
    assert!(relay.log().contains("publication-gap"), "{}", relay.log());
    assert_eq!(rows(&database, "published").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_of_a_gap_of_which_no_relay_saw_anything_are_delivered_in_order() {
    let (database, emulator, relay) = after_some_events(300).await;
    relay.stop().await;
    database.execute(OUT).await;
    insert(&database, 301, 100).await;
    database.execute(IN).await;
    insert(&database, 401, 100).await;
    let relay = start(&database, &emulator);
    wait_until_delivered(&database, &emulator, &relay).await;
    assert_whole_and_in_order(&database, &emulator, &relay).await;
    assert!(
        relay.log().contains("publication-changed"),
        "{}",
        relay.log()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_that_was_renamed_for_a_while_loses_nothing() {
    let (database, emulator, relay) = after_some_events(100).await;
    relay.stop().await;
    let row = "INSERT INTO outbox.away (aggregatetype, aggregateid, event_type, version, \
               occurred_at) VALUES ('order', 'o-1', 'OrderPlaced', 201, clock_timestamp())";
    for sql in [
        "ALTER TABLE outbox.events RENAME TO away",
        row,
        "ALTER TABLE outbox.away RENAME TO events",
    ] {
        database.execute(sql).await;
    }
    let relay = start(&database, &emulator);
    wait_until_delivered(&database, &emulator, &relay).await;
    assert_whole_and_in_order(&database, &emulator, &relay).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_first_start_with_new_delivers_no_row_from_before_it_also_when_the_slot_is_lost() {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    database.drop_slot().await;
    insert(&database, 1, 300).await;
    make_slot(&database).await;
    insert(&database, 301, 20).await;
    let relay = start(&database, &emulator);
    eventually("what came after the slot is delivered", || async {
        (stored(&emulator).len() == 20).then_some(())
    })
    .await;
    relay.kill_9();
    database.drop_slot().await;
    insert(&database, 321, 20).await;
    let relay = start(&database, &emulator);
    eventually("what came after that is delivered", || async {
        (stored(&emulator).len() == 40).then_some(())
    })
    .await;
    wait_until_recovered(&database).await;
    assert_eq!(stored(&emulator).len(), 40, "{}", relay.log());
    assert_eq!(rows(&database, "discarded").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_first_start_with_all_delivers_what_is_in_the_table_in_order() {
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
async fn switching_there_and_back_with_kill_9_on_the_way_loses_and_swaps_nothing() {
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
    eventually("the relay is back at full records", || async {
        let full = "SELECT count(*) FROM outbox.relay WHERE dispatch = 'full'";
        (database.number(full).await == 1).then_some(())
    })
    .await;
    assert_whole_and_in_order(&database, &emulator, &relay).await;
    // From here on what is recorded is not sent again, and nothing else is missing.
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
async fn back_at_full_records_the_auditor_delivers_no_row_that_was_delivered_without_one() {
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

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_relay_writes_nothing() {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    let relay = start(&database, &emulator);
    insert(&database, 1, 100).await;
    wait_until_delivered(&database, &emulator, &relay).await;
    wait_until_vouched(&database).await;
    database.execute("CREATE TABLE other (n int)").await;
    // Every write leaves another row version behind.
    let versions = "SELECT string_agg(t.xmin::text || t.ctid::text, ' ') FROM outbox.relay t";
    // What is under way may still be written down: for longer than from one vouch to the next.
    let mut before = eventually("the relay's row rests", || async {
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

#[tokio::test(flavor = "multi_thread")]
async fn rows_of_a_transaction_that_is_older_than_a_vouch_are_delivered_after_a_lost_slot() {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    let relay = start(&database, &emulator);
    insert(&database, 1, 50).await;
    wait_until_delivered(&database, &emulator, &relay).await;
    wait_until_vouched(&database).await;
    // So that the next vouch is another one.
    insert(&database, 51, 50).await;
    let slow = harness::connect(&database.url).await;
    let row = |key: &str| {
        format!(
            "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, version, \
             occurred_at) VALUES ('order', '{key}', 'OrderPlaced', 1, clock_timestamp());"
        )
    };
    // Rows of savepoints have transaction ids of their own.
    let begun = format!(
        "BEGIN; {} SAVEPOINT a; {} RELEASE a; SAVEPOINT b; {}",
        row("slow-0"),
        row("slow-1"),
        row("slow-2")
    );
    slow.batch_execute(&begun).await.unwrap();
    let resolved = || async {
        let sql = "SELECT coalesce(max(resolved_xid), 0) FROM outbox.relay";
        database.number(sql).await
    };
    let before = resolved().await;
    insert(&database, 101, 100).await;
    let stored_all = || async { (stored(&emulator).len() >= 200).then_some(()) };
    eventually("the others are delivered", stored_all).await;
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

#[tokio::test(flavor = "multi_thread")]
async fn a_publication_of_a_schema_is_refused_since_it_leaves_no_trace() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let version = "SELECT current_setting('server_version_num')::bigint";
    if database.number(version).await < 150_000 {
        return;
    }
    database
        .execute(
            "ALTER PUBLICATION postrider DROP TABLE outbox.events; \
             ALTER PUBLICATION postrider ADD TABLES IN SCHEMA outbox",
        )
        .await;
    let relay = start(&database, &emulator);
    relay.wait_for_error("publication-drift").await;
    assert!(relay.log().contains("by its schema"), "{}", relay.log());
    assert!(!relay.wait().await.success());
}
