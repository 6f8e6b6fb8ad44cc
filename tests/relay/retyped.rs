//! Tests in which a column of a captured table gets another type while rows from before the change still
//! wait in the WAL. The relay delivers all rows, and no operator has to ask for a recovery.

use crate::harness::{self, Database, Relay};
use crate::mapping::Subscriber;

/// Alters the type of `column` while two rows wait in the WAL. Returns the ordering key and the data of all
/// messages. They come from a row that the relay published before the change, from the two rows that wait,
/// and from a row that is inserted after the change.
async fn delivered(column: &str, change: &str, values: [&str; 4]) -> Vec<(String, String)> {
    let database = Database::private().await;
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
    let sent = delivered("aggregateid", change, ["'1'", "'2'", "'3'", "4"]).await;
    let keys: Vec<&str> = sent.iter().map(|(key, _)| &**key).collect();
    assert_eq!(keys, ["1", "2", "3", "4"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_from_before_a_json_payload_became_bytes_are_delivered() {
    let change = "TYPE bytea USING convert_to(payload::text, 'UTF8')";
    let sent = delivered("payload", change, ["'1'", "'2'", "'3'", "'\\x34'"]).await;
    let data: Vec<&str> = sent.iter().map(|(_, data)| &**data).collect();
    assert_eq!(data, ["1", "2", "3", "4"]);
}
