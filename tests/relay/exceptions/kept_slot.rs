//! Tests in which the publication or a captured table changes while the relay is down or cannot publish,
//! and rows are deleted before the relay has published them. The relay must keep its slot, because only the
//! stream still contains the deleted rows.

mod interrupted;

use std::collections::{BTreeMap, BTreeSet};

use pubsub_emulator::RunningEmulator;
use pubsub_emulator::checks::Violation;

use super::{
    after_some_events, check, insert, insert_sql, start, start_with, stored, wait_until_recovered,
    wait_until_vouched,
};
use crate::harness::{self, Database, Relay, eventually};

const OUT: &str = "ALTER PUBLICATION postrider DROP TABLE outbox.events";
const IN: &str = "ALTER PUBLICATION postrider ADD TABLE outbox.events";
const UNPUBLISH: &str = "DROP PUBLICATION postrider";
const PUBLISH: &str = "CREATE PUBLICATION postrider FOR TABLE outbox.events \
                       WITH (publish = 'insert', publish_via_partition_root = true)";
const GRANT: &str = "GRANT USAGE ON SCHEMA outbox TO PUBLIC";
const DELETE: &str = "DELETE FROM outbox.events WHERE version BETWEEN 61 AND 140";
/// A trigger that `init` creates refuses TRUNCATE, so this statement switches triggers off.
const TRUNCATE: &str = "SET session_replication_role = replica; TRUNCATE outbox.events; \
                        RESET session_replication_role";
const KEEPS: &str = "the relay keeps the slot";

/// Every event that the test has inserted, including deleted ones.
#[derive(Default)]
struct Inserted {
    all: BTreeSet<String>,
}

impl Inserted {
    /// Adds the rows that are in the table now.
    async fn note(&mut self, database: &Database) {
        let events = database.expected().await;
        self.all.extend(events.into_values().flatten());
    }

    async fn wait_until_delivered(&mut self, database: &Database, emulator: &RunningEmulator) {
        self.note(database).await;
        eventually("every event is stored", || async {
            let stored = stored(emulator);
            self.all.iter().all(|id| stored.contains(id)).then_some(())
        })
        .await;
        wait_until_recovered(database).await;
        database.wait_until_confirmed().await;
    }

    /// Waits until all noted rows are delivered, and checks their order.
    async fn arrive_in_order(
        &mut self,
        database: &Database,
        emulator: &RunningEmulator,
        relay: &Relay,
    ) {
        self.wait_until_delivered(database, emulator).await;
        self.assert_in_order(database, emulator, &relay.log()).await;
    }

    /// Checks that the rows that are still in the table were published in order, and that no other events
    /// were published except the deleted rows.
    async fn assert_in_order(&self, database: &Database, emulator: &RunningEmulator, log: &str) {
        let mut report = check(database, emulator).await;
        report.violations.retain(|violation| {
            !matches!(violation, Violation::Unexpected { event_id, .. }
                      if self.all.contains(event_id))
        });
        assert!(report.is_clean(), "{report}\n{log}");
    }
}

fn assert_kept(relay: &Relay) {
    let log = relay.log();
    assert!(log.contains(KEEPS), "{log}");
    assert!(!log.contains("created the slot"), "{log}");
}

/// Runs the statements `change` and then `removal` while no relay runs, and checks that no event is lost
/// and that the slot is kept.
async fn changed_while_down(change: &[&str], removal: &str, more: &[(&str, &str)]) {
    let (database, emulator, relay) = after_some_events(50).await;
    relay.stop().await;
    let mut inserted = Inserted::default();
    insert(&database, 51, 50).await;
    inserted.note(&database).await;
    for sql in change {
        database.execute(sql).await;
    }
    insert(&database, 101, 50).await;
    inserted.note(&database).await;
    database.execute(removal).await;
    insert(&database, 151, 50).await;
    let relay = start_with(&database, &emulator, more);
    inserted.arrive_in_order(&database, &emulator, &relay).await;
    assert_kept(&relay);
    // Check that a later session streams without a recovery, and publishes no event again.
    let before = emulator.journal().counts().stored_messages;
    relay.stop().await;
    let relay = start_with(&database, &emulator, more);
    relay.wait_for_log("streaming").await;
    database.wait_until_confirmed().await;
    let audited = "SELECT count(*) FROM outbox.relay WHERE audited_at > since";
    eventually("an audit of this session", || async {
        (database.number(audited).await == 1).then_some(())
    })
    .await;
    let log = relay.log();
    assert!(!log.contains("recovering"), "{log}");
    assert_eq!(emulator.journal().counts().stored_messages, before, "{log}");
}

async fn changed(change: &[&str]) {
    changed_while_down(change, DELETE, &[]).await;
    changed_while_down(change, TRUNCATE, &[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn deleted_rows_are_delivered_after_the_publication_was_created_again() {
    changed(&[UNPUBLISH, PUBLISH]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn deleted_rows_are_delivered_after_a_table_was_out_of_the_publication() {
    changed(&[OUT, IN]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn deleted_rows_are_delivered_after_a_grant_on_the_schema() {
    changed(&[GRANT]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn deleted_rows_are_delivered_after_a_table_was_renamed_and_back() {
    let back = "ALTER TABLE outbox.away RENAME TO events";
    changed(&["ALTER TABLE outbox.events RENAME TO away", back]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_of_a_table_that_was_dropped_and_created_again_are_delivered() {
    let create = "CREATE TABLE outbox.made_again (LIKE outbox.events INCLUDING ALL)";
    let rename = "ALTER TABLE outbox.made_again RENAME TO events";
    changed(&[create, "DROP TABLE outbox.events", rename, IN]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_slot_is_kept_even_if_the_relay_must_not_replace_a_lost_slot() {
    let stop = [("POSTRIDER_SLOT_ON_LOSS", "stop")];
    changed_while_down(&[OUT, IN], DELETE, &stop).await;
}

/// The stream leaves out the rows of the gap. The relay reads these rows from the table, and each key keeps its
/// order.
#[tokio::test(flavor = "multi_thread")]
async fn rows_of_a_gap_come_from_the_table_and_deleted_rows_from_the_stream() {
    let (database, emulator, relay) = after_some_events(50).await;
    relay.stop().await;
    let mut inserted = Inserted::default();
    insert(&database, 51, 100).await;
    inserted.note(&database).await;
    database.execute(DELETE).await;
    database.execute(OUT).await;
    insert(&database, 151, 50).await;
    database.execute(IN).await;
    insert(&database, 201, 50).await;
    let relay = start(&database, &emulator);
    inserted.arrive_in_order(&database, &emulator, &relay).await;
    assert_kept(&relay);
}

/// The relay reads rows from the table, and then gets the same rows from the stream. It must skip them
/// there.
#[tokio::test(flavor = "multi_thread")]
async fn rows_that_come_from_the_table_and_from_the_stream_are_sent_once() {
    let (database, emulator, relay) = after_some_events(50).await;
    wait_until_vouched(&database).await;
    relay.stop().await;
    let mut inserted = Inserted::default();
    insert(&database, 51, 2_000).await;
    inserted.note(&database).await;
    database.execute(GRANT).await;
    database.execute(DELETE).await;
    let relay = start(&database, &emulator);
    inserted.wait_until_delivered(&database, &emulator).await;
    insert(&database, 3_001, 100).await;
    inserted.wait_until_delivered(&database, &emulator).await;
    let log = relay.log();
    inserted.assert_in_order(&database, &emulator, &log).await;
    assert_kept(&relay);
    let attempts = emulator.journal().attempts();
    let copies = attempts.iter().filter(|attempt| attempt.is_stored());
    let mut counts: BTreeMap<String, u32> = BTreeMap::new();
    for id in copies.flat_map(|attempt| attempt.event_ids.iter().flatten()) {
        *counts.entry(id.to_string()).or_default() += 1;
    }
    counts.retain(|_, copies| *copies > 1);
    assert!(
        counts.is_empty() || relay.has_lost_its_slot(),
        "{counts:?}\n{log}"
    );
}

/// Pub/Sub is down. So when the relay notices the change, it has events in memory that it cannot publish.
#[tokio::test(flavor = "multi_thread")]
async fn deleted_rows_are_delivered_if_a_change_happens_while_pubsub_is_down() {
    for change in [[OUT, IN], [UNPUBLISH, PUBLISH], [GRANT, "SELECT 1"]] {
        let (database, emulator, relay) = after_some_events(50).await;
        emulator.faults().refuse_connections(true);
        emulator.faults().reset_connections();
        let mut inserted = Inserted::default();
        insert(&database, 51, 100).await;
        inserted.note(&database).await;
        relay.wait_for_log("pubsub-unreachable").await;
        // Make the change in one transaction. Otherwise the relay might write to its row while the publication does
        // not exist. The stream would get stuck at this write, and the relay would replace the slot.
        database.execute(&change.join("; ")).await;
        database.execute(DELETE).await;
        relay.wait_for_log(KEEPS).await;
        insert(&database, 151, 50).await;
        emulator.faults().refuse_connections(false);
        inserted.arrive_in_order(&database, &emulator, &relay).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn deleted_rows_that_wait_for_their_topic_are_delivered_after_a_change() {
    let (database, emulator, relay) = after_some_events(50).await;
    let mut inserted = Inserted::default();
    let waiting = "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, version, payload) \
                   SELECT 'nowhere', 'n-1', 'Waits', n, '{}' FROM generate_series(61, 80) n";
    database.execute(waiting).await;
    insert(&database, 141, 50).await;
    inserted.note(&database).await;
    relay.wait_for_log("topic-missing").await;
    database.execute(GRANT).await;
    database.execute(TRUNCATE).await;
    relay.wait_for_log(KEEPS).await;
    insert(&database, 191, 50).await;
    relay.stop().await;
    let relay = start(&database, &emulator);
    relay.wait_for_log("topic-missing").await;
    let topic = "projects/demo/topics/nowhere.events";
    emulator.create_topic(topic).await.unwrap();
    inserted.arrive_in_order(&database, &emulator, &relay).await;
}

/// For each row, PostgreSQL uses the publication as it was when the row was inserted. So the stream leaves
/// out rows of a transaction that inserted them during the gap, even if the transaction commits later. The
/// relay must wait for such transactions, and then read their rows from the table.
#[tokio::test(flavor = "multi_thread")]
async fn rows_that_an_open_transaction_inserted_in_a_gap_are_delivered() {
    let (database, emulator, relay) = after_some_events(50).await;
    relay.stop().await;
    let slow = harness::connect(&database.url).await;
    database.execute(OUT).await;
    let rows = "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, version) \
                SELECT 'order', 'slow', 'OrderPlaced', n FROM generate_series(1, 10) n";
    slow.batch_execute(&format!("BEGIN; {rows}")).await.unwrap();
    database.execute(IN).await;
    let relay = start(&database, &emulator);
    relay
        .wait_for_log("waits for transactions that were open")
        .await;
    assert!(!relay.log().contains("finished reading"), "{}", relay.log());
    slow.batch_execute("COMMIT").await.unwrap();
    insert(&database, 51, 50).await;
    let mut inserted = Inserted::default();
    inserted.wait_until_delivered(&database, &emulator).await;
    assert_kept(&relay);
}

/// A transaction inserts a row before the table is published again, and commits afterwards. Old minor
/// versions of PostgreSQL may then leave rows of later transactions out of the stream of the slot. So on
/// these versions the relay recovers with a new slot.
#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_that_was_open_during_the_change_does_not_hide_later_rows() {
    let (database, emulator, relay) = after_some_events(50).await;
    relay.stop().await;
    let slow = harness::connect(&database.url).await;
    database.execute(OUT).await;
    let row = "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, version) \
               VALUES ('order', 'slow', 'OrderPlaced', 1)";
    slow.batch_execute(&format!("BEGIN; {row}")).await.unwrap();
    database.execute(IN).await;
    slow.batch_execute("COMMIT").await.unwrap();
    let relay = start(&database, &emulator);
    relay.wait_for_log("recovering: finished reading").await;
    insert(&database, 51, 50).await;
    Inserted::default()
        .wait_until_delivered(&database, &emulator)
        .await;
}

/// Before PostgreSQL 18, the stream cannot get past a row that was inserted while there was no publication.
/// The relay must then recover with a new slot, instead of trying to keep the slot again and again.
#[tokio::test(flavor = "multi_thread")]
async fn a_kept_slot_whose_stream_is_stuck_is_replaced() {
    let (database, emulator, relay) = after_some_events(50).await;
    relay.stop().await;
    insert(&database, 51, 50).await;
    database.execute(UNPUBLISH).await;
    database.execute(&insert_sql("o", 101, 50)).await;
    database.execute(PUBLISH).await;
    insert(&database, 151, 50).await;
    let relay = start(&database, &emulator);
    let mut inserted = Inserted::default();
    inserted.arrive_in_order(&database, &emulator, &relay).await;
    let log = relay.log();
    let version = "SELECT current_setting('server_version_num')::bigint";
    let is_stuck = database.number(version).await < 180_000;
    assert_eq!(log.contains("slot-stuck"), is_stuck, "{log}");
    assert_eq!(
        log.matches("created the slot").count(),
        usize::from(is_stuck),
        "{log}"
    );
}
