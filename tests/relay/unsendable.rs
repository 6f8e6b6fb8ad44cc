//! The stream cannot bring some rows: rows with bytes that have no form in UTF-8, rows with values larger
//! than any message, and rows from before a column was altered. The relay recovers by itself and reads
//! such rows from their table.

use pubsub_emulator::RunningEmulator;
use scratch_postgres::ScratchPostgres;

use crate::harness::{self, Database, Relay, eventually};
use crate::mapping::settings;

/// Starts a database with the encoding `encoding`, in which rows of `outbox.events` may be changed.
async fn in_encoding(encoding: &str) -> Database {
    let server = ScratchPostgres::builder()
        .setting("wal_level", "logical")
        .initdb_arg(&format!("--encoding={encoding}"))
        .initdb_arg("--locale=C");
    let database = Database::on(server.start().unwrap()).await;
    database
        .execute("DROP TRIGGER insert_only ON outbox.events")
        .await;
    database
}

async fn insert(database: &Database, key: &str, payload: &str) {
    database
        .execute(&format!(
            "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, payload) \
             VALUES ('order', '{key}', 'OrderPlaced', {payload})"
        ))
        .await;
}

/// In WIN1252 the byte 0x81 is valid, but it has no form in UTF-8.
const NO_UTF8: &str = "to_jsonb(convert_from('\\x81', 'WIN1252'))";

async fn states(database: &Database) -> String {
    database
        .text(
            "SELECT coalesce(string_agg(state || ' ' || n, ', ' ORDER BY state), '') \
             FROM (SELECT state, count(*) AS n FROM outbox.dispatch GROUP BY state) s",
        )
        .await
}

fn stored(emulator: &RunningEmulator) -> u64 {
    emulator.journal().counts().stored_messages
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_that_is_not_utf8_is_quarantined_and_other_keys_continue() {
    let database = in_encoding("WIN1252").await;
    let emulator = harness::emulator().await;
    let relay = Relay::start(&database, &emulator);
    insert(&database, "good", "'1'").await;
    database.wait_until_recorded().await;
    insert(&database, "bad", NO_UTF8).await;
    insert(&database, "bad", "'2'").await;
    insert(&database, "good", "'3'").await;
    database.wait_until_recorded().await;
    assert_eq!(
        states(&database).await,
        "published 2, quarantined 2",
        "{}",
        relay.log()
    );
    let reason = database
        .text("SELECT error FROM outbox.dispatch WHERE error LIKE '%cannot send%'")
        .await;
    assert!(reason.contains("payload") && reason.is_ascii(), "{reason}");
    let old = "SELECT count(*) FROM outbox.dispatch WHERE committed_at < now() - interval '1 hour'";
    assert_eq!(database.number(old).await, 0, "the time of the commit");
    insert(&database, "good", "'4'").await;
    database.wait_until_recorded().await;
    assert_eq!(stored(&emulator), 3, "no event is repeated");
    // Correct the row and release the key. The relay publishes the row and the event that waits behind
    // it.
    database
        .execute("UPDATE outbox.events SET payload = '1' WHERE payload::text LIKE '\"_\"'")
        .await;
    database
        .execute("UPDATE outbox.dispatch SET state = 'released' WHERE state = 'quarantined'")
        .await;
    eventually("everything is published", || async {
        (states(&database).await == "published 5").then_some(())
    })
    .await;
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_non_utf8_row_corrected_or_deleted_before_it_is_read_leaves_no_trace() {
    let database = in_encoding("WIN1252").await;
    let emulator = harness::emulator().await;
    insert(&database, "corrected", NO_UTF8).await;
    insert(&database, "deleted", NO_UTF8).await;
    insert(&database, "good", "'1'").await;
    for sql in [
        "UPDATE outbox.events SET payload = '\"corrected\"' WHERE aggregateid = 'corrected'",
        "DELETE FROM outbox.events WHERE aggregateid = 'deleted'",
    ] {
        database.execute(sql).await;
    }
    let relay = Relay::start(&database, &emulator);
    database.wait_until_recorded().await;
    assert_eq!(states(&database).await, "published 2", "{}", relay.log());
    insert(&database, "good", "'2'").await;
    database.wait_until_recorded().await;
    assert_eq!(stored(&emulator), 3);
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn in_sql_ascii_a_row_that_is_not_utf8_is_quarantined() {
    let database = in_encoding("SQL_ASCII").await;
    let emulator = harness::emulator().await;
    let relay = Relay::start(&database, &emulator);
    insert(
        &database,
        "bad",
        "('\"' || convert_from('\\xff', 'SQL_ASCII') || '\"')::jsonb",
    )
    .await;
    insert(&database, "good", "'1'").await;
    database.wait_until_recorded().await;
    assert_eq!(
        states(&database).await,
        "published 1, quarantined 1",
        "{}",
        relay.log()
    );
    relay.stop().await;
}

/// 36 MB in hexadecimal are more than the 64 MiB that the relay accepts in a message of the stream.
/// PostgreSQL itself cannot send 600 MB, which would exceed its limit of 1 GiB.
#[tokio::test(flavor = "multi_thread")]
async fn values_larger_than_any_message_are_quarantined_in_little_memory() {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    database
        .execute("ALTER TABLE outbox.events ALTER payload TYPE bytea USING NULL")
        .await;
    let relay = Relay::start(&database, &emulator);
    insert(&database, "good", "'1'").await;
    database.wait_until_recorded().await;
    let usual = relay.peak_rss_kib();
    for megabytes in [36, 600] {
        let payload = format!("convert_to(repeat('x', {megabytes} * 1000000), 'UTF8')");
        insert(&database, &format!("large-{megabytes}"), &payload).await;
        insert(&database, "good", "'2'").await;
        database.wait_until_recorded().await;
    }
    assert_eq!(
        states(&database).await,
        "published 3, quarantined 2",
        "{}",
        relay.log()
    );
    let more = relay.peak_rss_kib().saturating_sub(usual) / 1024;
    assert!(more < 128, "{more} MiB more than before");
    relay.stop().await;
}

/// Alters the table after rows were inserted, before a relay has read them. The stream cannot bring
/// these rows, but the relay can read them from the table. The settings name its current columns.
async fn altered(alter: &str, columns: &str) {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    let addr = emulator.addr().to_string();
    for n in 1..=3 {
        insert(&database, "a", &format!("'{n}'")).await;
    }
    database.execute(alter).await;
    let file = settings(&format!(
        "[[tables]]\ntable = \"outbox.events\"\ncolumns = {{ {columns} }}\n"
    ));
    let config = file.path().to_str().unwrap();
    let relay = Relay::start_with(&database, &addr, &[("POSTRIDER_CONFIG", config)]);
    database.wait_until_recorded().await;
    assert_eq!(states(&database).await, "published 3", "{}", relay.log());
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_from_before_a_column_was_renamed_are_delivered() {
    let alter = "ALTER TABLE outbox.events RENAME aggregateid TO customer";
    altered(alter, "aggregateid = \"customer\"").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_from_before_a_column_was_replaced_are_delivered() {
    let alter = "ALTER TABLE outbox.events ADD customer int NOT NULL DEFAULT 7, DROP aggregateid";
    altered(alter, "aggregateid = \"customer\"").await;
}
