//! Tests in which a table with old rows is added to the settings with `start = all`. The relay then recovers: it
//! publishes unpublished rows from the tables. This recovery keeps the slot, because the slot is intact. So rows
//! that were deleted before the recovery are not lost: the slot still streams them.

use std::collections::HashMap;
use std::io::Write;

use super::*;

const START_ALL: &str = "start = \"all\"\n[[tables]]\ntable = \"outbox.events\"\n[[tables]]\ntable = \"public.later\"\n";

/// Delivers 200 events and stops the relay. Then inserts `rows` more events, deletes those with the
/// versions 231 to 260, and creates a second table with 2 * `rows` rows. Half of these rows are inserted
/// before the publication contains the table. Returns the number of all events.
async fn prepared(rows: u32) -> (Database, RunningEmulator, i64) {
    let (database, emulator) = served_by(Database::private().await).await;
    insert(&database, 201, rows).await;
    let delete = "DELETE FROM outbox.events WHERE version BETWEEN 231 AND 260";
    database.execute(delete).await;
    let create = "CREATE TABLE public.later (LIKE outbox.events INCLUDING ALL)";
    database.execute(create).await;
    for (first, publish) in [
        (1, "ALTER PUBLICATION postrider ADD TABLE public.later"),
        (1 + rows, "SELECT 1"),
    ] {
        let last = first + rows - 1;
        let fill = format!(
            "INSERT INTO public.later (aggregatetype, aggregateid, event_type, version, occurred_at) \
             SELECT 'order', 'later', 'OrderPlaced', n, clock_timestamp() \
             FROM generate_series({first}, {last}) n"
        );
        database.execute(&fill).await;
        database.execute(publish).await;
    }
    (database, emulator, i64::from(200 + 3 * rows))
}

/// Writes the settings file. Dropping the returned value deletes the file.
fn settings() -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::with_suffix(".toml").unwrap();
    file.write_all(START_ALL.as_bytes()).unwrap();
    file
}

/// Returns how often Pub/Sub stored each event.
fn copies(emulator: &RunningEmulator) -> HashMap<String, u32> {
    let mut copies = HashMap::new();
    let attempts = emulator.journal().attempts();
    let stored = attempts.iter().filter(|attempt| attempt.is_stored());
    for id in stored.flat_map(|attempt| attempt.event_ids.iter().flatten()) {
        *copies.entry(id.to_string()).or_default() += 1;
    }
    copies
}

async fn wait_until_stored(emulator: &RunningEmulator, events: i64) {
    eventually("every event is stored", || async {
        (copies(emulator).len() as i64 == events).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_that_is_added_loses_no_deleted_row_of_another_table() {
    let file = settings();
    let path = file.path().display().to_string();
    for mode in ["full", "exceptions"] {
        let (database, emulator, events) = prepared(100).await;
        let more = [
            ("POSTRIDER_CONFIG", path.as_str()),
            ("POSTRIDER_DISPATCH", mode),
        ];
        let relay = Relay::start_with(&database, &emulator.addr().to_string(), &more);
        wait_until_stored(&emulator, events).await;
        wait_until_recovered(&database).await;
        database.wait_until_confirmed().await;
        let log = relay.log();
        assert!(log.contains("table-added"), "{log}");
        assert!(!log.contains("created the slot"), "{log}");
        if mode == "full" {
            assert_eq!(recorded(&database).await, events, "{log}");
            let once = copies(&emulator).into_values().all(|copies| copies == 1);
            assert!(once || relay.has_lost_its_slot(), "{log}");
            let in_order = "SELECT count(*) FROM ( \
                SELECT l.version - lag(l.version) OVER (ORDER BY d.message_id::bigint) AS step \
                FROM outbox.dispatch d JOIN public.later l ON l.id = d.event_id) s WHERE step <> 1";
            assert_eq!(database.number(in_order).await, 0, "{log}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn kill_9_while_the_rows_of_an_added_table_are_sent_repeats_no_recorded_event() {
    let file = settings();
    let path = file.path().display().to_string();
    let (database, emulator, events) = prepared(1_500).await;
    let host = emulator.addr().to_string();
    let slow = Action::Delay(Duration::from_millis(5));
    emulator.faults().inject(Fault::new(slow));
    for round in 1..=4 {
        let one = ("POSTRIDER_IN_FLIGHT_REQUESTS", "1");
        let more = [("POSTRIDER_CONFIG", path.as_str()), one];
        let relay = Relay::start_with(&database, &host, &more);
        eventually("some more events are recorded", || async {
            (recorded(&database).await > 200 + round * 500).then_some(())
        })
        .await;
        relay.kill_9();
        harness::wait_until_killed_relays_are_gone(&database, &emulator).await;
    }
    emulator.faults().lift_all();
    let stored = || emulator.journal().counts().stored_messages;
    let (recorded_before, stored_before) = (recorded(&database).await, stored());
    let relay = Relay::start_with(&database, &host, &[("POSTRIDER_CONFIG", path.as_str())]);
    wait_until_stored(&emulator, events).await;
    wait_until_recovered(&database).await;
    database.wait_until_confirmed().await;
    let log = relay.log();
    assert!(!log.contains("created the slot"), "{log}");
    assert_eq!(recorded(&database).await, events, "{log}");
    assert_eq!(
        (stored() - stored_before) as i64,
        events - recorded_before,
        "the last run sends exactly the unrecorded events\n{log}"
    );
}

/// After a crash of the server, the slot may go back to a position before the recovery. The stream then
/// contains rows of the added table that the relay has recorded under other positions, so the relay must
/// find these records by event id.
#[tokio::test(flavor = "multi_thread")]
async fn a_crash_of_the_server_after_the_recovery_repeats_no_row_of_the_added_table() {
    let file = settings();
    let path = file.path().display().to_string();
    let (mut database, emulator, events) = prepared(100).await;
    let host = emulator.addr().to_string();
    let more = [("POSTRIDER_CONFIG", path.as_str())];
    let relay = Relay::start_with(&database, &host, &more);
    wait_until_stored(&emulator, events).await;
    wait_until_recovered(&database).await;
    database.wait_until_confirmed().await;
    relay.kill_9();
    database.server().restart(StopMode::Immediate).unwrap();
    database.reconnect().await;
    let _relay = Relay::start_with(&database, &host, &more);
    insert(&database, 9_001, 10).await;
    wait_until_stored(&emulator, events + 10).await;
    database.wait_until_recorded().await;
    let twice = copies(&emulator)
        .into_iter()
        .find(|(_, copies)| *copies > 1);
    assert_eq!(twice, None);
}

/// The recovery has published all rows from the tables, and the stream contains the same rows. The relay is killed
/// before the slot has confirmed the last of these rows. So the next session receives them from the stream. It must
/// recognise them, and must not publish them again.
#[tokio::test(flavor = "multi_thread")]
async fn after_kill_9_a_kept_slot_repeats_no_row_that_came_from_the_tables() {
    let file = settings();
    let path = file.path().display().to_string();
    let (database, emulator, _) = prepared(50).await;
    let host = emulator.addr().to_string();
    let more = [("POSTRIDER_CONFIG", path.as_str())];
    // The recovery waits for this transaction before it takes its snapshot, so the test can write rows in
    // the meantime.
    let open = harness::connect(&database.url).await;
    open.batch_execute("BEGIN; SELECT pg_current_xact_id()")
        .await
        .unwrap();
    let relay = Relay::start_with(&database, &host, &more);
    relay
        .wait_for_log("waits for transactions that were open")
        .await;
    insert(&database, 1_001, 50).await;
    let passed = database.current_wal().await;
    // Insert one more row, so that a commit ends past `passed`. Otherwise the confirmed position might never reach
    // `passed`, because it only moves to the ends of commits.
    insert(&database, 1_051, 1).await;
    // Keep the slot from confirming later rows: the topic of this row is missing. The row is only in the stream,
    // because its own transaction deletes it from the table.
    let waits = "BEGIN; \
        INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, version) \
        VALUES ('nowhere', 'n-1', 'Waits', 1); \
        DELETE FROM outbox.events WHERE aggregateid = 'n-1'; COMMIT";
    database.execute(waits).await;
    insert(&database, 2_001, 50).await;
    open.batch_execute("COMMIT").await.unwrap();
    relay.wait_for_log("topic-missing").await;
    // Wait until `outbox.relay` contains the confirmed position too. Otherwise the next session would begin the
    // recovery again instead of continuing it.
    let is_recorded = "SELECT count(*) FROM outbox.relay r JOIN pg_replication_slots s \
                       ON s.slot_name = r.slot WHERE r.confirmed_lsn >= s.confirmed_flush_lsn";
    eventually("the slot has passed the first rows", || async {
        let has_passed = database.confirmed().await >= passed;
        (has_passed && database.number(is_recorded).await == 1).then_some(())
    })
    .await;
    relay.kill_9();
    harness::wait_until_killed_relays_are_gone(&database, &emulator).await;
    let relay = Relay::start_with(&database, &host, &more);
    relay.wait_for_log("continuing a recovery").await;
    relay.wait_for_log("topic-missing").await;
    insert(&database, 3_001, 50).await;
    let topic = "projects/demo/topics/nowhere.events";
    emulator.create_topic(topic).await.unwrap();
    wait_until_recovered(&database).await;
    database.wait_until_confirmed().await;
    let twice = copies(&emulator)
        .into_iter()
        .find(|(_, copies)| *copies > 1);
    assert_eq!(twice, None, "{}", relay.log());
}
