//! Tests in which a column of a captured table gets another type or name, or leaves the publication, while rows
//! from before the change still wait in the WAL. The relay delivers all rows with all their columns, and no operator
//! has to ask for a recovery.

use crate::harness::{self, Database, Relay, eventually};
use crate::mapping::Subscriber;

/// Executes `before`, and alters the type of `column` while two rows wait in the WAL. Returns the ordering key and
/// the data of all messages. They come from a row that the relay published before the change, from the two rows
/// that wait, and from a row that is inserted after the change.
async fn delivered(
    before: &str,
    column: &str,
    change: &str,
    values: [&str; 4],
) -> Vec<(String, String)> {
    let database = Database::private().await;
    database.execute(before).await;
    let emulator = harness::emulator().await;
    let mut orders = Subscriber::new(&emulator, "order.events").await;
    let insert = |value: &str| {
        format!(
            "INSERT INTO outbox.events (aggregatetype, event_type, {column}) \
             VALUES ('order', 'New', {value})"
        )
    };
    let relay = Relay::start(&database, &emulator);
    database.execute(&insert(values[0])).await;
    database.wait_until_recorded().await;
    database.wait_until_confirmed().await;
    relay.stop().await;
    database.execute(&insert(values[1])).await;
    database.execute(&insert(values[2])).await;
    let alter = format!("ALTER TABLE outbox.events ALTER {column} {change}");
    database.execute(&alter).await;
    database.execute(&insert(values[3])).await;
    let relay = Relay::start(&database, &emulator);
    database.wait_until_recorded().await;
    let published = "SELECT count(*) FROM outbox.dispatch WHERE state = 'published'";
    assert_eq!(database.number(published).await, 4, "{}", relay.log());
    database.wait_until_confirmed().await;
    let messages = orders.take(4).await.into_iter();
    let mut sent: Vec<_> = messages
        .map(|message| {
            let data = String::from_utf8(message.data.to_vec()).unwrap();
            (message.ordering_key, data)
        })
        .collect();
    sent.sort();
    relay.stop().await;
    sent
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_from_before_a_text_key_became_a_number_are_delivered() {
    let change = "TYPE int4 USING aggregateid::int4";
    let sent = delivered("", "aggregateid", change, ["'1'", "'2'", "'3'", "4"]).await;
    let keys: Vec<&str> = sent.iter().map(|(key, _)| &**key).collect();
    assert_eq!(keys, ["1", "2", "3", "4"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_from_before_a_json_payload_became_bytes_are_delivered() {
    let change = "TYPE bytea USING convert_to(payload::text, 'UTF8')";
    let sent = delivered("", "payload", change, ["'1'", "'2'", "'3'", "'\\x34'"]).await;
    let data: Vec<&str> = sent.iter().map(|(_, data)| &**data).collect();
    assert_eq!(data, ["1", "2", "3", "4"]);
}

/// The domain of the payload is dropped, so the catalogue no longer says what its base type was.
#[tokio::test(flavor = "multi_thread")]
async fn rows_from_before_the_domain_of_the_payload_was_dropped_are_delivered() {
    let domain = |base: &str, using: &str| {
        format!(
            "CREATE DOMAIN public.body AS {base}; \
             ALTER TABLE outbox.events ALTER payload TYPE public.body USING {using}"
        )
    };
    let data = |sent: Vec<(String, String)>| -> Vec<String> {
        sent.into_iter().map(|(_, data)| data).collect()
    };
    let json = domain("jsonb", "payload::jsonb");
    let change = "TYPE bytea USING convert_to(payload::text, 'UTF8'); DROP DOMAIN public.body";
    let sent = delivered(&json, "payload", change, ["'1'", "'2'", "'3'", "'\\x34'"]).await;
    assert_eq!(data(sent), ["1", "2", "3", "4"]);
    let bytes = domain("bytea", "convert_to(payload::text, 'UTF8')");
    let change = "TYPE jsonb USING convert_from(payload, 'UTF8')::jsonb; DROP DOMAIN public.body";
    let values = ["'\\x31'", "'\\x32'", "'\\x33'", "'4'"];
    let sent = delivered(&bytes, "payload", change, values).await;
    assert_eq!(data(sent), ["1", "2", "3", "4"]);
}

const ROW: &str = "INSERT INTO outbox.events (aggregatetype, event_type, headers) \
                   VALUES ('order', 'New', '{\"tenant\": \"acme\"}')";

/// Waits until `count` events are published, and checks that each message has the attribute from its headers.
async fn assert_all_have_headers(
    database: &Database,
    relay: &Relay,
    orders: &mut Subscriber,
    count: usize,
) {
    database.wait_until_recorded().await;
    database.wait_until_confirmed().await;
    for message in orders.take(count).await {
        let tenant = message.attributes.get("tenant").map(String::as_str);
        assert_eq!(tenant, Some("acme"), "{message:?} {}", relay.log());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_from_before_an_optional_column_was_renamed_and_retyped_keep_its_value() {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    let mut orders = Subscriber::new(&emulator, "order.events").await;
    let relay = Relay::start(&database, &emulator);
    database.execute(ROW).await;
    database.wait_until_recorded().await;
    database.wait_until_confirmed().await;
    relay.stop().await;
    let meta = "ALTER TABLE outbox.events RENAME headers TO meta";
    database.execute(meta).await;
    database.execute(&ROW.replace("headers", "meta")).await;
    let headers = "ALTER TABLE outbox.events RENAME meta TO headers; \
                   ALTER TABLE outbox.events ALTER headers TYPE text";
    database.execute(headers).await;
    let relay = Relay::start(&database, &emulator);
    assert_all_have_headers(&database, &relay, &mut orders, 2).await;
}

async fn has_column_lists(database: &Database) -> bool {
    let version = "SELECT current_setting('server_version_num')::bigint";
    let has = database.number(version).await >= 150_000;
    if !has {
        println!("SKIPPED: column lists need PostgreSQL 15");
    }
    has
}

/// The columns of the outbox table except `left_out`, for a column list.
async fn columns_without(database: &Database, left_out: &str) -> String {
    let columns = format!(
        "SELECT string_agg(quote_ident(attname), ', ') FROM pg_attribute \
         WHERE attrelid = 'outbox.events'::regclass AND attnum > 0 \
             AND NOT attisdropped AND attname <> '{left_out}'"
    );
    database.text(&columns).await
}

/// Executes `before`. Then the publication leaves `column` out for a while, and `is_running` says whether a relay runs
/// at that time. Checks that all rows are published with the column, that an audit then covers the publication, and
/// that a later session keeps the result of this audit (`audited_publication`).
async fn left_out_for_a_while(before: &str, column: &str, is_running: bool) {
    let database = Database::private().await;
    if !has_column_lists(&database).await {
        return;
    }
    database.execute(before).await;
    let emulator = harness::emulator().await;
    let mut orders = Subscriber::new(&emulator, "order.events").await;
    let mut relay = Some(Relay::start(&database, &emulator));
    database.execute(ROW).await;
    database.wait_until_recorded().await;
    database.wait_until_confirmed().await;
    let before_change = database
        .text("SELECT audited_publication FROM outbox.relay")
        .await;
    if !is_running {
        relay.take().expect("a relay").stop().await;
    }
    let columns = columns_without(&database, column).await;
    let leave_out = format!("ALTER PUBLICATION postrider SET TABLE outbox.events ({columns})");
    database.execute(&leave_out).await;
    database.execute(ROW).await;
    if let Some(relay) = &relay {
        relay.wait_for_log("publication-drift").await;
    }
    database.execute(ROW).await;
    let send_all = "ALTER PUBLICATION postrider SET TABLE outbox.events";
    database.execute(send_all).await;
    database.execute(ROW).await;
    let relay = relay.unwrap_or_else(|| Relay::start(&database, &emulator));
    assert_all_have_headers(&database, &relay, &mut orders, 4).await;
    let audited = || database.text("SELECT audited_publication FROM outbox.relay");
    let compared = eventually("the changed publication is audited", || async {
        let now = audited().await;
        (now != before_change && !["", "wrong"].contains(&&*now)).then_some(now)
    })
    .await;
    relay.stop().await;
    let relay = Relay::start(&database, &emulator);
    relay.wait_for_log("streaming").await;
    assert_eq!(audited().await, compared, "{}", relay.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_streamed_while_an_optional_column_was_left_out_are_published_with_it() {
    left_out_for_a_while("SELECT 1", "headers", false).await;
    left_out_for_a_while("SELECT 1", "headers", true).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_streamed_while_a_needed_column_was_left_out_are_published_with_it() {
    left_out_for_a_while("SELECT 1", "event_type", true).await;
}

/// PostgreSQL adds a new column as the last one. So if the stream lacks the last column, the relay could think that
/// the rows are older than the column, and publish them without it.
#[tokio::test(flavor = "multi_thread")]
async fn a_running_relay_publishes_no_row_without_the_last_column() {
    let last =
        "ALTER TABLE outbox.events DROP headers; ALTER TABLE outbox.events ADD headers jsonb";
    left_out_for_a_while(last, "headers", true).await;
}

/// The relay must refuse to start. Otherwise each row from the stream would lack the column and cause a recovery. A
/// recovery would not help, because a new slot streams the rows without the column too.
#[tokio::test(flavor = "multi_thread")]
async fn a_column_of_the_topic_that_the_publication_leaves_out_is_refused() {
    let database = Database::private().await;
    if !has_column_lists(&database).await {
        return;
    }
    let emulator = harness::emulator().await;
    let column = "ALTER TABLE outbox.events ADD region text DEFAULT 'order'";
    database.execute(column).await;
    let columns = columns_without(&database, "region").await;
    let leave_out = format!("ALTER PUBLICATION postrider SET TABLE outbox.events ({columns})");
    database.execute(&leave_out).await;
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "[[tables]]\ntopic = '{region}.events'\n").unwrap();
    let path = file.path().display().to_string();
    let host = emulator.addr().to_string();
    database.execute(ROW).await;
    let relay = Relay::start_with(&database, &host, &[("POSTRIDER_CONFIG", &path)]);
    relay.wait_for_error("publication-drift").await;
    assert!(relay.log().contains("region"), "{}", relay.log());
}
