//! Tests of a recovery that is interrupted, or that waits for transactions.

use super::*;
use pubsub_emulator::checks::Violation;

#[tokio::test(flavor = "multi_thread")]
async fn kill_9_during_a_recovery_restarts_it_and_resends_only_unrecorded_events() {
    let (database, emulator) = served_and_stopped().await;
    database.drop_slot().await;
    insert(&database, 201, 3_000).await;
    emulator
        .faults()
        .inject(Fault::new(Action::Delay(Duration::from_millis(5))));
    for round in 1..=5 {
        // Allow one request at a time, so that the kill hits the middle of the recovery.
        let more = [("POSTRIDER_IN_FLIGHT_REQUESTS", "1")];
        let relay = Relay::start_with(&database, &emulator.addr().to_string(), &more);
        eventually("some more events are recorded", || async {
            (recorded(&database).await > 200 + round * 2).then_some(())
        })
        .await;
        insert(&database, 3_001 + round as u32 * 200, 100).await;
        relay.kill_9();
    }
    emulator.faults().lift_all();
    harness::wait_until_killed_relays_are_gone(&database, &emulator).await;
    let recorded_before = recorded(&database).await;
    let stored_before = emulator.journal().counts().stored_messages;
    let relay = Relay::start(&database, &emulator);
    database.wait_until_recorded().await;
    wait_until_recovered(&database).await;
    insert(&database, 5_001, 100).await;
    database.wait_until_recorded().await;
    database.wait_until_confirmed().await;
    let report = harness::check(&database, &emulator).await;
    assert!(report.is_clean(), "{report}\n{}", relay.log());
    let stored_after = emulator.journal().counts().stored_messages;
    assert_eq!(
        stored_after - stored_before,
        3_800 - recorded_before as u64,
        "the last run sends exactly the unrecorded events"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pubsub_outage_during_a_recovery_only_adds_lag() {
    let (database, emulator) = served_and_stopped().await;
    database.drop_slot().await;
    insert(&database, 201, 2_000).await;
    emulator.faults().refuse_connections(true);
    let relay = Relay::start(&database, &emulator);
    // Insert more events only after the relay has read the table, so that they come from the stream.
    relay.wait_for_log("finished reading the table").await;
    insert(&database, 2_201, 1).await;
    let first_ends = database
        .text("SELECT pg_current_wal_insert_lsn()::text")
        .await;
    insert(&database, 2_202, 299).await;
    relay.wait_for_log("pubsub-unreachable").await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    let is_behind = format!(
        "SELECT count(*) FROM pg_replication_slots WHERE confirmed_flush_lsn < '{first_ends}'"
    );
    assert_eq!(database.number(&is_behind).await, 1, "{}", relay.log());
    emulator.faults().refuse_connections(false);
    assert_nothing_is_lost_or_repeated(&database, &emulator, &relay).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_standby_completes_a_recovery_when_the_first_relay_dies() {
    let (database, emulator) = served_and_stopped().await;
    database.drop_slot().await;
    insert(&database, 201, 2_000).await;
    emulator.faults().refuse_connections(true);
    let first = Relay::start(&database, &emulator);
    // Start the second relay only after the first relay has read the table. By then the first relay holds the new
    // slot, so the second relay becomes its standby.
    first.wait_for_log("finished reading the table").await;
    let second = Relay::start(&database, &emulator);
    second.wait_for_log("standby").await;
    insert(&database, 2_201, 300).await;
    first.kill_9();
    second.wait_for_log("recovery-unfinished").await;
    emulator.faults().refuse_connections(false);
    assert_nothing_is_lost_or_repeated(&database, &emulator, &second).await;
}

/// The relay must continue with the slot that the unfinished recovery created. A new slot would have two disadvantages:
///
/// - One transaction inserts a row and deletes it again. The present slot streams this row. A new slot would not stream
///   it, and the table no longer contains it.
/// - Another transaction stays open. PostgreSQL finishes the creation of a slot only after such transactions have
///   ended.
#[tokio::test(flavor = "multi_thread")]
async fn a_restart_continues_an_unfinished_recovery_with_its_slot() {
    const SERIES: &str = "\
        INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, version, payload) \
        SELECT 'nowhere', 'n-1', 'Lost', n, '{}' FROM generate_series";
    let (mut database, emulator) = served_by(Database::private().await).await;
    database.drop_slot().await;
    database.execute(&format!("{SERIES}(1, 3) n")).await;
    let relay = Relay::start(&database, &emulator);
    relay.wait_for_log("topic-missing").await;
    let deleted = format!(
        "BEGIN; {SERIES}(4, 4) n; \
         DELETE FROM outbox.events WHERE aggregateid = 'n-1' AND version = 4; COMMIT"
    );
    database.execute(&deleted).await;
    insert(&database, 201, 50).await;
    relay.stop().await;
    let relay = Relay::start(&database, &emulator);
    relay.wait_for_log("continuing a recovery").await;
    relay.wait_for_log("topic-missing").await;
    eventually("events of other keys have their outcome", || async {
        (recorded(&database).await == 250).then_some(())
    })
    .await;
    relay.kill_9();
    harness::wait_until_killed_relays_are_gone(&database, &emulator).await;
    let long = harness::connect(&database.server().socket_url("postgres")).await;
    long.batch_execute("BEGIN; CREATE TABLE made_by_a_long_batch (n int)")
        .await
        .unwrap();
    let relay = Relay::start(&database, &emulator);
    relay.wait_for_log("continuing a recovery").await;
    insert(&database, 251, 50).await;
    let topic = "projects/demo/topics/nowhere.events";
    emulator.create_topic(topic).await.unwrap();
    wait_until_recovered(&database).await;
    database.wait_until_confirmed().await;
    long.batch_execute("COMMIT").await.unwrap();
    relay.stop().await;
    let report = harness::check(&database, &emulator).await;
    assert!(
        matches!(&report.violations[..], [Violation::Unexpected { stream, .. }]
                 if stream.ordering_key == "n-1"),
        "only the deleted row is not in the table: {report}"
    );
    assert!(report.duplicates.is_empty(), "{report}");
}

/// The next relay keeps the slot, but reads the tables again and repeats events in order. With
/// `dispatch = exceptions`, published events from the stream have no records, so the relay cannot know that
/// they were published.
#[tokio::test(flavor = "multi_thread")]
async fn without_records_a_restart_begins_an_unfinished_recovery_again() {
    let (database, emulator) = served_and_stopped().await;
    let host = emulator.addr().to_string();
    let more = [("POSTRIDER_DISPATCH", "exceptions")];
    database.drop_slot().await;
    insert(&database, 201, 50).await;
    let waiting = "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, version, payload) \
                   VALUES ('nowhere', 'n-1', 'Lost', 1, '{}')";
    database.execute(waiting).await;
    let relay = Relay::start_with(&database, &host, &more);
    relay.wait_for_log("topic-missing").await;
    insert(&database, 251, 50).await;
    database.wait_until_confirmed().await;
    relay.stop().await;
    let relay = Relay::start_with(&database, &host, &more);
    relay.wait_for_log("the relay keeps the slot").await;
    insert(&database, 301, 50).await;
    let topic = "projects/demo/topics/nowhere.events";
    emulator.create_topic(topic).await.unwrap();
    wait_until_recovered(&database).await;
    database.wait_until_confirmed().await;
    relay.stop().await;
    let report = harness::check(&database, &emulator).await;
    assert!(report.is_clean(), "{report}");
}

/// Kills a relay that has read 50 rows from the table in a recovery and could not publish them. Pub/Sub
/// still refuses connections afterwards.
async fn killed_in_a_recovery() -> (Database, RunningEmulator) {
    let (database, emulator) = served_and_stopped().await;
    database.drop_slot().await;
    insert(&database, 201, 50).await;
    emulator.faults().refuse_connections(true);
    let relay = Relay::start(&database, &emulator);
    relay.wait_for_log("finished reading the table").await;
    relay.kill_9();
    harness::wait_until_killed_relays_are_gone(&database, &emulator).await;
    (database, emulator)
}

/// Checks that the next relay replaces the slot and publishes every event once.
async fn assert_begins_again(database: &Database, emulator: &RunningEmulator) {
    let relay = Relay::start(database, emulator);
    relay.wait_for_log("dropped the old slot").await;
    emulator.faults().refuse_connections(false);
    assert_nothing_is_lost_or_repeated(database, emulator, &relay).await;
}

/// The slot no longer streams the rows that `slot advance` skipped, so the relay must replace the slot and read
/// these rows from the tables.
#[tokio::test(flavor = "multi_thread")]
async fn after_an_advance_of_the_slot_an_unfinished_recovery_begins_again() {
    let (database, emulator) = killed_in_a_recovery().await;
    insert(&database, 251, 50).await;
    command(&database, &["slot", "advance", "--yes"]);
    assert_begins_again(&database, &emulator).await;
}

fn command(database: &Database, arguments: &[&str]) {
    let environment = [
        ("DATABASE_URL", database.url.as_str()),
        ("POSTRIDER_SLOT", database.slot()),
    ];
    let ran = harness::postrider(arguments, &environment).output();
    let ran = ran.unwrap();
    assert!(ran.status.success(), "{ran:?}");
}

/// The operator asks for a recovery, so the relay must create a new slot instead of continuing with the
/// old one.
#[tokio::test(flavor = "multi_thread")]
async fn a_requested_recovery_does_not_continue_an_unfinished_one() {
    let (database, emulator) = killed_in_a_recovery().await;
    command(&database, &["recover", "--yes"]);
    assert_begins_again(&database, &emulator).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn relays_that_find_the_slot_missing_at_the_same_time_lose_and_swap_nothing() {
    let (database, emulator) = served_and_stopped().await;
    for round in 0..3 {
        database.drop_slot().await;
        insert(&database, 201 + round * 500, 500).await;
        let relays: Vec<Relay> = (0..3).map(|_| Relay::start(&database, &emulator)).collect();
        database.wait_until_recorded().await;
        wait_until_recovered(&database).await;
        for relay in relays {
            relay.stop().await;
        }
    }
    let report = harness::check(&database, &emulator).await;
    assert!(report.is_clean(), "{report}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_that_finds_the_slot_missing_too_late_marks_no_recovery() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let relay = Relay::start(&database, &emulator);
    insert(&database, 1, 200).await;
    database.wait_until_recorded().await;
    relay.kill_9();
    harness::wait_until_killed_relays_are_gone(&database, &emulator).await;
    database.drop_slot().await;
    let mut other = harness::connect(&database.url).await;
    let lock = other.transaction().await.unwrap();
    // Take a lock that gives the transaction no id. The creation of a slot waits only for transactions with an
    // id.
    lock.batch_execute("LOCK TABLE outbox.relay IN SHARE MODE")
        .await
        .unwrap();
    let late = Relay::start(&database, &emulator);
    eventually("the late relay waits to mark the slot", || async {
        let waits = "SELECT count(*) FROM pg_stat_activity \
                     WHERE wait_event_type = 'Lock' AND query LIKE '%INTO outbox.relay%'";
        (database.number(waits).await == 1).then_some(())
    })
    .await;
    // Meanwhile, create the slot and let another relay open it.
    create_slot(&database).await;
    let reader = Relay::start(&database, &emulator);
    eventually("a relay reads the slot", || async {
        let held = "SELECT count(*) FROM pg_replication_slots WHERE active";
        (database.number(held).await == 1).then_some(())
    })
    .await;
    lock.commit().await.unwrap();
    late.wait_for_log("standby for").await;
    let marked = "SELECT count(*) FROM outbox.relay WHERE recovering IS NOT NULL";
    assert_eq!(database.number(marked).await, 0, "{}", late.log());
    insert(&database, 201, 100).await;
    assert_nothing_is_lost_or_repeated(&database, &emulator, &reader).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_that_holds_up_the_new_slot_is_named_and_waited_for() {
    let (mut database, emulator) = served_by(Database::private().await).await;
    database.drop_slot().await;
    let blocker = harness::connect(&database.server().socket_url("postgres")).await;
    blocker
        .batch_execute("BEGIN; CREATE TABLE made_by_a_long_batch (n int)")
        .await
        .unwrap();
    insert(&database, 201, 100).await;
    let relay = Relay::start(&database, &emulator);
    relay.wait_for_log("slot-busy").await;
    assert!(
        relay.log().contains("idle transaction of server process"),
        "{}",
        relay.log()
    );
    blocker.batch_execute("COMMIT").await.unwrap();
    assert_nothing_is_lost_or_repeated(&database, &emulator, &relay).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_recovery_without_enough_temporary_files_names_the_limit_to_raise() {
    let (database, emulator) = served_by(Database::private().await).await;
    database.drop_slot().await;
    database
        .execute(
            "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, version, payload) \
             SELECT 'order', 'o-' || n % 7, 'OrderPlaced', n, jsonb_build_object('n', n) \
             FROM generate_series(201, 10000) n; \
             ALTER ROLE postgres SET work_mem = '64kB'; \
             ALTER ROLE postgres SET temp_file_limit = '64kB'",
        )
        .await;
    let relay = Relay::start(&database, &emulator);
    relay.wait_for_error("postgres-statement").await;
    let log = relay.log();
    assert!(
        log.contains("SQLSTATE 53400") && log.contains("raise temp_file_limit"),
        "{log}"
    );
    assert_eq!(relay.wait().await.code(), Some(3), "{log}");
    database
        .execute("ALTER ROLE postgres RESET temp_file_limit")
        .await;
    let relay = Relay::start(&database, &emulator);
    database.wait_until_recorded().await;
    assert_eq!(emulator.journal().counts().stored_messages, 10_000);
    relay.stop().await;
}
