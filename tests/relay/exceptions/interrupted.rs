//! Tests a recovery that ends early again and again: its slot is lost, or the relay is killed. Each later
//! recovery must begin where the earlier one has stopped, and must not publish resolved rows again.

use std::collections::HashMap;
use std::time::Duration;

use pubsub_emulator::{Action, Fault, RunningEmulator};
use scratch_postgres::ScratchPostgres;

use super::{check, insert, start, start_with, stored, wait_until_delivered, wait_until_vouched};
use crate::harness::{self, Database, Relay, eventually};

/// Number of rows to recover. Each has a key of its own, so each needs a request of its own.
const ROWS: u32 = 4_000;
const FEW_REQUESTS: [(&str, &str); 1] = [("POSTRIDER_IN_FLIGHT_REQUESTS", "2")];
const SEQ: &str = "SELECT coalesce((recovery_progress ->> 'seq')::bigint, -1) FROM outbox.capture";

/// What a recovery had resolved at one moment: the rows up to `seq`, and the number of publish requests
/// by then.
struct Resolved {
    seq: i64,
    attempts: usize,
}

/// Starts a server that invalidates a slot after a few megabytes of WAL. Delivers 100 events with a relay, and
/// stops the relay.
async fn served() -> (Database, RunningEmulator) {
    let server = ScratchPostgres::builder()
        .setting("wal_level", "logical")
        .initdb_arg("--wal-segsize=1")
        .setting("max_slot_wal_keep_size", "1MB")
        .setting("min_wal_size", "2MB")
        .setting("max_wal_size", "4MB")
        .start();
    let database = Database::on(server.unwrap()).await;
    let emulator = harness::emulator().await;
    let relay = start(&database, &emulator);
    insert(&database, 1, 100).await;
    wait_until_delivered(&database, &emulator, &relay).await;
    wait_until_vouched(&database).await;
    relay.stop().await;
    (database, emulator)
}

async fn insert_rows(database: &Database) {
    let rows = format!(
        "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, version, occurred_at) \
         SELECT 'order', 'many-' || n, 'OrderPlaced', n, clock_timestamp() \
         FROM generate_series(1001, 1000 + {ROWS}) n"
    );
    database.execute(&rows).await;
}

fn slow(emulator: &RunningEmulator) {
    let slow = Action::Delay(Duration::from_millis(3));
    emulator.faults().inject(Fault::new(slow));
}

/// Waits until the recovery has resolved more than the rows up to `seq`. Returns how far it has got.
async fn resolved(database: &Database, emulator: &RunningEmulator, seq: i64) -> Resolved {
    let seq = eventually("the recovery has got further", || async {
        let now = database.number(SEQ).await;
        (now > seq).then_some(now)
    })
    .await;
    let attempts = emulator.journal().attempts().len();
    Resolved { seq, attempts }
}

/// Writes WAL until the server has invalidated the slot, and the relay has created `slots` slots
/// according to its log.
async fn lose_slot(database: &Database, relay: &Relay, slots: usize) {
    eventually("the relay has another slot", || async {
        database
            .execute("SELECT pg_logical_emit_message(false, 'filler', repeat('x', 900000))")
            .await;
        database.execute("CHECKPOINT").await;
        (relay.log().matches("created the slot").count() >= slots).then_some(())
    })
    .await;
}

/// Checks that no row was published again after it was resolved, and that no row is missing or out of order.
async fn assert_only_the_rest_is_repeated(
    database: &Database,
    emulator: &RunningEmulator,
    resolved: &[Resolved],
    log: &str,
) {
    let report = check(database, emulator).await;
    assert!(report.is_clean(), "{report}\n{log}");
    let sql = "SELECT id::text, seq FROM outbox.events WHERE aggregateid LIKE 'many-%'";
    let rows = database.client.query(sql, &[]).await.unwrap();
    let seqs: HashMap<String, i64> = rows.iter().map(|row| (row.get(0), row.get(1))).collect();
    let attempts = emulator.journal().attempts();
    for Resolved {
        seq,
        attempts: from,
    } in resolved
    {
        let later = attempts[*from..]
            .iter()
            .flat_map(|attempt| attempt.event_ids.iter().flatten());
        let again = later.filter_map(|id| seqs.get(&id.to_string()));
        let again = again.filter(|published| *published <= seq).count();
        assert_eq!(again, 0, "rows up to {seq} were resolved\n{log}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_recovery_that_loses_its_slot_again_and_again_ends_and_repeats_little() {
    let (database, emulator) = served().await;
    insert_rows(&database).await;
    database.drop_slot().await;
    slow(&emulator);
    let relay = start_with(&database, &emulator, &FEW_REQUESTS);
    let mut reached = vec![resolved(&database, &emulator, -1).await];
    for round in 1..4 {
        // The recovery has not read this row, although the `seq` of the row is below the progress that the
        // recovery has recorded. After the loss of the slot, the next recovery must publish the row all the
        // same.
        let late = format!(
            "INSERT INTO outbox.events (seq, aggregatetype, aggregateid, event_type, version) \
             OVERRIDING SYSTEM VALUE VALUES (-{round}, 'order', 'late-{round}', 'Late', 1)"
        );
        database.execute(&late).await;
        lose_slot(&database, &relay, 1 + round).await;
        let seq = reached.last().map_or(-1, |last| last.seq);
        reached.push(resolved(&database, &emulator, seq).await);
    }
    emulator.faults().lift_all();
    wait_until_delivered(&database, &emulator, &relay).await;
    let log = relay.log();
    assert_only_the_rest_is_repeated(&database, &emulator, &reached, &log).await;
    let late = "SELECT id::text FROM outbox.events WHERE event_type = 'Late'";
    let late = database.client.query(late, &[]).await.unwrap();
    let stored = stored(&emulator);
    assert!(
        late.iter()
            .all(|row| stored.contains(row.get::<_, &str>(0))),
        "{log}"
    );
    let left = "SELECT count(*) FROM outbox.capture WHERE recovery_progress IS NOT NULL";
    assert_eq!(database.number(left).await, 0, "{log}");
}

/// The stream of a kept slot contains the rows that an earlier session has read from the table, so the
/// next session could publish them a second time.
#[tokio::test(flavor = "multi_thread")]
async fn a_recovery_that_keeps_its_slot_and_is_killed_repeats_little() {
    let (database, emulator) = served().await;
    insert_rows(&database).await;
    database
        .execute("GRANT USAGE ON SCHEMA outbox TO PUBLIC")
        .await;
    slow(&emulator);
    let mut reached: Vec<Resolved> = Vec::new();
    for _ in 0..3 {
        let relay = start_with(&database, &emulator, &FEW_REQUESTS);
        let seq = reached.last().map_or(-1, |last| last.seq);
        reached.push(resolved(&database, &emulator, seq).await);
        relay.kill_9();
        harness::wait_until_killed_relays_are_gone(&database, &emulator).await;
    }
    emulator.faults().lift_all();
    let relay = start(&database, &emulator);
    insert(&database, 9_001, 50).await;
    wait_until_delivered(&database, &emulator, &relay).await;
    let log = relay.log();
    assert!(log.contains("the relay keeps the slot"), "{log}");
    assert_only_the_rest_is_repeated(&database, &emulator, &reached, &log).await;
}

/// A row that waits for its topic has no outcome, so a later recovery must find it.
#[tokio::test(flavor = "multi_thread")]
async fn a_row_that_waits_in_an_interrupted_recovery_is_published_later() {
    let (database, emulator) = served().await;
    let waits = "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, version) \
                 VALUES ('nowhere', 'n-1', 'Waits', 1)";
    for _ in 0..2 {
        insert_rows(&database).await;
        database.execute(waits).await;
    }
    database.drop_slot().await;
    let relay = start(&database, &emulator);
    relay.wait_for_log("topic-missing").await;
    let first = "SELECT min(seq) FROM outbox.events WHERE aggregateid = 'n-1'";
    let first = database.number(first).await;
    let reached = eventually("the recovery has got as far as it can", || async {
        let now = database.number(SEQ).await;
        (now > 0 && stored(&emulator).len() >= 2 * ROWS as usize).then_some(now)
    })
    .await;
    assert!(reached < first, "{}", relay.log());
    relay.kill_9();
    harness::wait_until_killed_relays_are_gone(&database, &emulator).await;
    database.drop_slot().await;
    let relay = start(&database, &emulator);
    relay.wait_for_log("topic-missing").await;
    let topic = "projects/demo/topics/nowhere.events";
    emulator.create_topic(topic).await.unwrap();
    wait_until_delivered(&database, &emulator, &relay).await;
}

/// Another session has locked `outbox.capture`, so the relay cannot write the progress of the recovery. The
/// recovery must go on without it.
#[tokio::test(flavor = "multi_thread")]
async fn a_recovery_goes_on_while_its_progress_cannot_be_written() {
    let (database, emulator) = served().await;
    insert_rows(&database).await;
    database.drop_slot().await;
    slow(&emulator);
    let relay = start_with(&database, &emulator, &FEW_REQUESTS);
    resolved(&database, &emulator, -1).await;
    let other = harness::connect(&database.url).await;
    let lock = "BEGIN; LOCK TABLE outbox.capture IN SHARE ROW EXCLUSIVE MODE";
    other.batch_execute(lock).await.unwrap();
    relay
        .wait_for_log("cannot record how far the recovery has got")
        .await;
    let before = stored(&emulator).len();
    eventually("more rows are published", || async {
        (stored(&emulator).len() > before).then_some(())
    })
    .await;
    let reached = database.number(SEQ).await;
    other.batch_execute("COMMIT").await.unwrap();
    resolved(&database, &emulator, reached).await;
    emulator.faults().lift_all();
    wait_until_delivered(&database, &emulator, &relay).await;
    wait_until_vouched(&database).await;
    let log = relay.log();
    assert!(!log.contains("retrying in"), "the session goes on\n{log}");
    let report = check(&database, &emulator).await;
    assert!(
        report.is_clean() && report.duplicates.is_empty(),
        "{report}\n{log}"
    );
}
