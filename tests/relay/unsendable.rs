//! Tests of rows that the relay cannot get from the stream: rows with bytes that cannot be converted to
//! UTF-8, rows with values larger than any message, and rows from before a column was altered. The relay
//! recovers automatically and reads such rows from the table.

mod unreadable_id;

use pubsub_emulator::{Action, Fault, RunningEmulator};
use scratch_postgres::ScratchPostgres;
use tonic::Code;

use crate::harness::{self, Database, Relay, eventually};
use crate::mapping::{Subscriber, settings};

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

/// In WIN1252 the byte 0x81 is valid, but PostgreSQL cannot convert it to UTF-8.
const NO_UTF8: &str = "to_jsonb(convert_from('\\x81', 'WIN1252'))";

async fn states(database: &Database) -> String {
    database
        .text(
            "SELECT coalesce(string_agg(state || ' ' || n, ', ' ORDER BY state), '') \
             FROM (SELECT state, count(*) AS n FROM outbox.dispatch GROUP BY state) s",
        )
        .await
}

/// The number of events that Pub/Sub has stored at least once.
fn stored_ids(emulator: &RunningEmulator) -> usize {
    let attempts = emulator.journal().attempts();
    let attempts = attempts.iter().filter(|attempt| attempt.is_stored());
    let ids = attempts.flat_map(|attempt| attempt.event_ids.iter().flatten());
    ids.map(|id| id.to_string())
        .collect::<std::collections::HashSet<_>>()
        .len()
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

#[tokio::test(flavor = "multi_thread")]
async fn errors_that_the_encoding_of_the_database_cannot_store_are_stored_escaped() {
    for encoding in ["WIN1252", "SQL_ASCII"] {
        errors_are_stored_escaped(encoding).await;
    }
}

/// Pub/Sub's errors contain characters outside ASCII, and the database's encoding may lack them. Checks that the relay
/// escapes these characters in the record of a quarantined event, and in the condition of the relay.
async fn errors_are_stored_escaped(encoding: &str) {
    let database = in_encoding(encoding).await;
    let emulator = harness::emulator().await;
    for (key, code) in [
        ("refused", Code::InvalidArgument),
        ("denied", Code::PermissionDenied),
    ] {
        let message = "key \u{2192} caf\u{e9}";
        let says = Fault::new(Action::FailSaying { code, message });
        emulator.faults().inject(says.on_ordering_key(key));
    }
    let relay = Relay::start(&database, &emulator);
    insert(&database, "refused", "'1'").await;
    insert(&database, "denied", "'2'").await;
    insert(&database, "good", "'3'").await;
    let escaped = |text: &str| text.contains("key \\u{2192} caf\\u{e9}");
    let reason = "SELECT coalesce(max(error), '') FROM outbox.dispatch WHERE state = 'quarantined'";
    eventually("the reason of the quarantine is stored", || async {
        escaped(&database.text(reason).await).then_some(())
    })
    .await;
    let condition = "SELECT coalesce(max(condition::text), '') FROM outbox.relay";
    eventually("the condition of the relay is stored", || async {
        let condition: String = database.text(condition).await;
        let json: serde_json::Value = serde_json::from_str(&condition).ok()?;
        escaped(json["what"].as_str()?).then_some(())
    })
    .await;
    emulator.faults().lift_all();
    eventually("the other events are published", || async {
        (states(&database).await == "published 2, quarantined 1").then_some(())
    })
    .await;
    assert!(
        relay.log().contains("key \u{2192} caf\u{e9}"),
        "{}",
        relay.log()
    );
    relay.stop().await;
}

/// A value of 36 MB takes 72 MB in hexadecimal, more than the 64 MiB that the relay accepts in a
/// message of the stream. A value of 600 MB would exceed PostgreSQL's own limit of 1 GiB, so
/// PostgreSQL cannot send it.
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

/// These values have several hundred MB, but PostgreSQL compresses them to a few MB at most. If a value is too large
/// to send, PostgreSQL may report a lack of memory. The relay must not blame the server: it must quarantine the event.
/// The first round reads such a value from the stream, the second round reads one from the table.
#[tokio::test(flavor = "multi_thread")]
async fn huge_values_that_are_stored_in_little_space_are_quarantined_in_little_memory() {
    let json = "to_jsonb(repeat('0', 200000000))";
    let text = "repeat('0', 500000000)";
    for (mode, payload_type, huge, good) in [
        ("exceptions", "jsonb", json, "'1'"),
        ("full", "text", text, "'1'"),
    ] {
        let database = Database::private().await;
        let emulator = harness::emulator().await;
        let host = emulator.addr().to_string();
        let alter =
            format!("ALTER TABLE outbox.events ALTER payload TYPE {payload_type} USING NULL");
        database.execute(&alter).await;
        let has_lz4 = "SELECT count(*) FROM pg_settings \
                       WHERE name = 'default_toast_compression' AND 'lz4' = ANY (enumvals)";
        if database.number(has_lz4).await == 1 {
            let lz4 = "ALTER TABLE outbox.events ALTER payload SET COMPRESSION lz4";
            database.execute(lz4).await;
        }
        let more = [("POSTRIDER_DISPATCH", mode)];
        let mut running = Some(Relay::start_with(&database, &host, &more));
        insert(&database, "good", good).await;
        eventually("the first event is stored", || async {
            (stored_ids(&emulator) == 1).then_some(())
        })
        .await;
        for round in 1..=2 {
            let reads_table = round == 2;
            if reads_table && let Some(relay) = running.take() {
                relay.stop().await;
                database.drop_slot().await;
            }
            insert(&database, &format!("huge-{round}"), huge).await;
            insert(&database, "good", good).await;
            let start = || Relay::start_with(&database, &host, &more);
            let relay = running.get_or_insert_with(start);
            let bad = "SELECT count(*) FROM outbox.dispatch WHERE state = 'quarantined'";
            eventually(
                "the bad row is set aside, and the good row is stored",
                || async {
                    let is_aside = database.number(bad).await == round;
                    (is_aside && stored_ids(&emulator) as i64 == 1 + round).then_some(())
                },
            )
            .await;
            let memory = relay.peak_rss_kib() / 1024;
            assert!(
                memory < 200,
                "{mode}, {payload_type}: {memory} MiB\n{}",
                relay.log()
            );
        }
    }
}

/// Alters the table after rows were inserted, before a relay has read them. The relay cannot read
/// these rows from the stream, but it can read them from the table. The settings name the current
/// columns of the table.
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

/// Rows wait in the WAL while an optional column is renamed to its default name, and its custom name is removed from
/// the settings. Checks that these rows are published with the column's values.
async fn an_optional_column_gets_its_default_name(column: &str, value: &str, attribute: &str) {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    let mut subscriber = Subscriber::new(&emulator, "order.events").await;
    let addr = emulator.addr().to_string();
    let rename = format!("ALTER TABLE outbox.events RENAME {column} TO custom");
    database.execute(&rename).await;
    let file = settings(&format!(
        "[[tables]]\ntable = \"outbox.events\"\ncolumns = {{ {column} = \"custom\" }}\n"
    ));
    let config = file.path().to_str().unwrap();
    let insert = |name: &str| {
        format!(
            "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, payload, {name}) \
             VALUES ('order', 'a', 'New', '{{}}', {value})"
        )
    };
    let relay = Relay::start_with(&database, &addr, &[("POSTRIDER_CONFIG", config)]);
    database.execute(&insert("custom")).await;
    database.wait_until_recorded().await;
    relay.stop().await;
    database.execute(&insert("custom")).await;
    database.execute(&insert("custom")).await;
    let rename = format!("ALTER TABLE outbox.events RENAME custom TO {column}");
    database.execute(&rename).await;
    database.execute(&insert(column)).await;
    let relay = Relay::start(&database, &emulator);
    database.wait_until_recorded().await;
    let messages = subscriber.take(4).await;
    let values: Vec<_> = messages
        .iter()
        .map(|message| message.attributes.get(attribute).cloned())
        .collect();
    assert!(values[0].is_some(), "{values:?}");
    assert!(
        values.iter().all(|value| *value == values[0]),
        "{values:?}\n{}",
        relay.log()
    );
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_from_before_the_headers_were_renamed_keep_their_headers() {
    let headers = "'{\"tenant\": \"t1\"}'";
    an_optional_column_gets_its_default_name("headers", headers, "tenant").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_from_before_the_version_was_renamed_keep_their_version() {
    an_optional_column_gets_its_default_name("version", "7", "version").await;
}

/// Rows in the WAL lack a column that was added later. That is no error, so the relay publishes these rows from the
/// stream.
#[tokio::test(flavor = "multi_thread")]
async fn an_added_optional_column_causes_no_recovery() {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    let drop = "ALTER TABLE outbox.events DROP COLUMN headers";
    database.execute(drop).await;
    let relay = Relay::start(&database, &emulator);
    insert(&database, "a", "'1'").await;
    database.wait_until_recorded().await;
    relay.stop().await;
    insert(&database, "a", "'2'").await;
    let add = "ALTER TABLE outbox.events ADD COLUMN headers jsonb";
    database.execute(add).await;
    insert(&database, "a", "'3'").await;
    let relay = Relay::start(&database, &emulator);
    database.wait_until_recorded().await;
    assert_eq!(states(&database).await, "published 3", "{}", relay.log());
    assert!(!relay.log().contains("recover"), "{}", relay.log());
    assert_eq!(emulator.journal().counts().stored_messages, 3);
    relay.stop().await;
}
