//! Tests of the messages that a subscriber receives from different tables, columns, payloads and
//! envelopes.

use std::collections::HashMap;
use std::io::Write;

use googleapis_tonic_google_pubsub_v1::google::pubsub::v1::subscriber_client::SubscriberClient;
use googleapis_tonic_google_pubsub_v1::google::pubsub::v1::{
    AcknowledgeRequest, PubsubMessage, PullRequest, Subscription,
};
use pubsub_emulator::RunningEmulator;
use tempfile::NamedTempFile;
use tonic::transport::Channel;

use crate::harness::{self, Database, Relay, eventually};

/// An ordered subscription to one topic.
pub(crate) struct Subscriber {
    client: SubscriberClient<Channel>,
    name: String,
}

impl Subscriber {
    pub(crate) async fn new(emulator: &RunningEmulator, topic: &str) -> Self {
        // Ignore an error, because the topic may already exist.
        let _ = emulator
            .create_topic(&format!("projects/demo/topics/{topic}"))
            .await;
        let channel = harness::channel(&emulator.addr().to_string()).await;
        let mut client = SubscriberClient::new(channel);
        let name = format!("projects/demo/subscriptions/{topic}");
        let subscription = Subscription {
            name: name.clone(),
            topic: format!("projects/demo/topics/{topic}"),
            enable_message_ordering: true,
            ack_deadline_seconds: 60,
            ..Subscription::default()
        };
        client.create_subscription(subscription).await.unwrap();
        Self { client, name }
    }

    /// Waits for at least `count` messages, acknowledges them, and returns them.
    pub(crate) async fn take(&mut self, count: usize) -> Vec<PubsubMessage> {
        let mut messages = Vec::new();
        let client = &self.client;
        let name = &self.name;
        while messages.len() < count {
            let received = eventually("a message arrives", || async {
                let request = PullRequest {
                    subscription: name.clone(),
                    max_messages: 100,
                    ..PullRequest::default()
                };
                let response = client.clone().pull(request).await.unwrap().into_inner();
                (!response.received_messages.is_empty()).then_some(response.received_messages)
            })
            .await;
            let ack_ids = received.iter().map(|m| m.ack_id.clone()).collect();
            let ack = AcknowledgeRequest {
                subscription: name.clone(),
                ack_ids,
            };
            client.clone().acknowledge(ack).await.unwrap();
            messages.extend(received.into_iter().filter_map(|m| m.message));
        }
        messages
    }

    pub(crate) async fn take_one(&mut self) -> PubsubMessage {
        self.take(1).await.remove(0)
    }
}

pub(crate) fn settings(toml: &str) -> NamedTempFile {
    let mut file = NamedTempFile::new().unwrap();
    file.write_all(toml.as_bytes()).unwrap();
    file
}

pub(crate) fn attributes(message: &PubsubMessage) -> HashMap<&str, &str> {
    message
        .attributes
        .iter()
        .map(|(k, v)| (k.as_str(), v.as_str()))
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_default_table_yields_payload_key_and_all_default_attributes() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let mut orders = Subscriber::new(&emulator, "order.events").await;
    let relay = Relay::start(&database, &emulator);
    database
        .execute(
            "SET outbox.traceparent = '00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01'; \
             SELECT outbox.emit('order', 'o-1', 'OrderPlaced', '{\"total\": 12.50}', \
                                '{\"tenant\": \"acme\"}', 7)",
        )
        .await;
    let message = orders.take_one().await;
    assert_eq!(
        message.data,
        "{\"total\": 12.50}".as_bytes(),
        "{}",
        relay.log()
    );
    assert_eq!(message.ordering_key, "o-1");
    let attributes = attributes(&message);
    for (name, value) in [
        ("event_type", "OrderPlaced"),
        ("aggregate_type", "order"),
        ("aggregate_id", "o-1"),
        ("version", "7"),
        ("schema_version", "1"),
        ("tenant", "acme"),
        (
            "traceparent",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        ),
        (
            "googclient_traceparent",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        ),
    ] {
        assert_eq!(attributes.get(name), Some(&value), "{name}");
    }
    let id = database.text("SELECT id::text FROM outbox.events").await;
    assert_eq!(attributes["event_id"], id);
    assert!(
        attributes["occurred_at"].ends_with('Z'),
        "{}",
        attributes["occurred_at"]
    );
}

const OTHER_TABLES: &str = "\
    CREATE TABLE legacy (id bigserial PRIMARY KEY, aggregatetype text, aggregateid text, \
                 type text, payload text, topic text); \
             CREATE TABLE blobs (id text PRIMARY KEY, kind text, subject text, what text, body bytea); \
             CREATE TABLE parts (id uuid DEFAULT gen_random_uuid(), aggregatetype text, \
                 aggregateid text, event_type text, payload json, day date) PARTITION BY RANGE (day); \
             CREATE TABLE parts_a PARTITION OF parts FOR VALUES FROM ('2020-01-01') TO ('2030-01-01'); \
             CREATE TABLE parts_b PARTITION OF parts FOR VALUES FROM ('2030-01-01') TO ('2040-01-01'); \
             GRANT SELECT ON legacy, blobs, parts TO postrider_relay; \
             ALTER PUBLICATION postrider ADD TABLE legacy, blobs, parts";

const OTHER_SETTINGS: &str = "\
    [[tables]]\n\
         table = 'public.legacy'\n\
         columns = { event_type = 'type', topic = 'topic' }\n\
         [[tables]]\n\
         table = 'public.blobs'\n\
         columns = { aggregatetype = 'kind', aggregateid = 'subject', event_type = 'what', payload = 'body' }\n\
         topic = 'blobs'\n\
         ordering = 'bucketed(8)'\n\
         [[tables]]\n\
         table = 'public.parts'\n\
         topic = 'parts'\n\
         ordering = 'none'\n";

#[tokio::test(flavor = "multi_thread")]
async fn tables_with_other_names_ids_types_and_partitions_are_captured_together() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    database.execute(OTHER_TABLES).await;
    let file = settings(OTHER_SETTINGS);
    let mut special = Subscriber::new(&emulator, "special").await;
    let mut blobs = Subscriber::new(&emulator, "blobs").await;
    let mut parts = Subscriber::new(&emulator, "parts").await;
    let path = file.path().display().to_string();
    let addr = emulator.addr().to_string();
    let relay = Relay::start_with(&database, &addr, &[("POSTRIDER_CONFIG", &path)]);
    relay.wait_for_log("streaming").await;
    database
        .execute(
            "INSERT INTO legacy (aggregatetype, aggregateid, type, payload, topic) \
                 VALUES ('order', 'o-1', 'Placed', 'plain text', 'special'); \
             INSERT INTO blobs VALUES ('b-1', 'blob', 's-1', 'Stored', '\\x00ff10'); \
             INSERT INTO parts (aggregatetype, aggregateid, event_type, payload, day) VALUES \
                 ('part', 'p-1', 'A', '{\"a\":  1}', '2026-01-01'), \
                 ('part', 'p-1', 'B', '{\"b\": 2}', '2035-01-01')",
        )
        .await;
    let legacy = special.take_one().await;
    assert_eq!(legacy.data, "plain text".as_bytes());
    let known_as = "SELECT outbox.event_uuid('public.legacy', '1')::text";
    assert_eq!(
        attributes(&legacy)["event_id"],
        database.text(known_as).await
    );
    assert_eq!(attributes(&legacy)["source_id"], "1");
    let blob = blobs.take_one().await;
    assert_eq!(
        blob.data.as_ref(),
        [0x00, 0xff, 0x10],
        "bytes are sent unchanged"
    );
    assert!(
        blob.ordering_key.starts_with("bucket-"),
        "{}",
        blob.ordering_key
    );
    let mut both = parts.take(2).await;
    both.sort_by(|a, b| a.data.cmp(&b.data));
    assert_eq!(
        both[0].data,
        "{\"a\":  1}".as_bytes(),
        "json keeps its spaces"
    );
    assert!(both.iter().all(|message| message.ordering_key.is_empty()));
    eventually("every event has its row", || async {
        let rows = database
            .number("SELECT count(*) FROM outbox.dispatch")
            .await;
        (rows == 4).then_some(())
    })
    .await;
    let found = database
        .text(
            "SELECT source_id FROM outbox.dispatch \
             WHERE event_id = outbox.event_uuid('public.legacy', '1')",
        )
        .await;
    assert_eq!(found, "public.legacy:1");
    assert!(
        !relay.log().contains("not in the settings"),
        "{}",
        relay.log()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn each_envelope_produces_its_documented_message() {
    for (envelope, check) in [
        (
            "cloudevents-binary",
            check_cloudevents_binary as fn(&PubsubMessage),
        ),
        ("cloudevents-structured", check_cloudevents_structured),
        ("protobuf", check_protobuf),
    ] {
        let database = Database::start().await;
        let emulator = harness::emulator().await;
        let mut orders = Subscriber::new(&emulator, "order.events").await;
        let addr = emulator.addr().to_string();
        let relay = Relay::start_with(&database, &addr, &[("POSTRIDER_ENVELOPE", envelope)]);
        database
            .execute("SELECT outbox.emit('order', 'o-1', 'OrderPlaced', '{\"total\": 1}')")
            .await;
        let message = orders.take_one().await;
        check(&message);
        assert_eq!(message.ordering_key, "o-1", "{envelope}");
        relay.stop().await;
    }
}

fn check_cloudevents_binary(message: &PubsubMessage) {
    let attributes = attributes(message);
    assert_eq!(attributes["ce-specversion"], "1.0");
    assert_eq!(attributes["ce-type"], "OrderPlaced");
    assert_eq!(attributes["ce-subject"], "o-1");
    assert_eq!(attributes["ce-id"], attributes["event_id"]);
    assert_eq!(message.data, "{\"total\": 1}".as_bytes());
}

fn check_cloudevents_structured(message: &PubsubMessage) {
    let event: serde_json::Value = serde_json::from_slice(&message.data).unwrap();
    assert_eq!(event["specversion"], "1.0");
    assert_eq!(event["type"], "OrderPlaced");
    assert_eq!(event["data"]["total"], 1);
}

fn check_protobuf(message: &PubsubMessage) {
    use prost::Message;
    let event = outbox_event::ProtobufEvent::decode(message.data.as_ref()).unwrap();
    assert_eq!(event.r#type, "OrderPlaced");
    assert_eq!(event.payload, "{\"total\": 1}".as_bytes());
}

#[tokio::test(flavor = "multi_thread")]
async fn changes_other_than_inserts_are_counted_and_warned_about_and_never_published() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    database
        .execute(
            "ALTER PUBLICATION postrider SET (publish = 'insert, update, delete, truncate'); \
             ALTER TABLE outbox.events DISABLE TRIGGER ALL",
        )
        .await;
    let relay = Relay::start(&database, &emulator);
    harness::insert_orders(&database, 3, 1).await;
    database
        .execute(
            "UPDATE outbox.events SET event_type = 'Changed'; \
             DELETE FROM outbox.events WHERE version = 1; TRUNCATE outbox.events",
        )
        .await;
    for kind in ["update", "delete", "truncate"] {
        relay.wait_for_log(&format!("kind=\"{kind}\"")).await;
    }
    database.wait_until_confirmed().await;
    assert_eq!(
        emulator.journal().counts().stored_messages,
        3,
        "{}",
        relay.log()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn under_halt_an_unmappable_or_too_large_event_stops_the_relay_and_nothing_is_lost() {
    for (insert, code) in [
        (
            "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, payload) \
          VALUES ('order', 'o-1', 'Big', to_jsonb(repeat('x', 10000001)))",
            "event-too-large",
        ),
        (
            "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type) \
          VALUES ('order', repeat('k', 1025), 'LongKey')",
            "event-invalid",
        ),
        (
            "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type) \
          VALUES ('', 'o-1', 'NoTopic')",
            "event-invalid",
        ),
    ] {
        let database = Database::start().await;
        let emulator = harness::emulator().await;
        harness::insert_orders(&database, 5, 1).await;
        database.execute(insert).await;
        let before_bad = database
            .number("SELECT count(*) FROM outbox.events WHERE event_type = 'OrderPlaced'")
            .await;
        let addr = emulator.addr().to_string();
        let policy = [("POSTRIDER_ON_BAD_EVENT", "halt")];
        let relay = Relay::start_with(&database, &addr, &policy);
        relay.wait_for_error(code).await;
        let log = relay.log();
        assert_eq!(relay.wait().await.code(), Some(5), "{log}");
        assert!(
            !log.contains("xxxxxxxx") && !log.contains("panicked"),
            "{log}"
        );
        assert!(
            log.contains("outbox.events") && log.contains("hint:"),
            "{log}"
        );
        // The next relay stops with the same error. The confirmed position is still before the bad row, so
        // PostgreSQL streams the row again.
        let relay = Relay::start_with(&database, &addr, &policy);
        relay.wait_for_error(code).await;
        assert_eq!(relay.wait().await.code(), Some(5));
        let recorded = database
            .number("SELECT count(*) FROM outbox.dispatch")
            .await;
        assert!(recorded <= before_bad);
        let report = harness::check_streamed(&database, &emulator).await;
        assert!(report.duplicates.is_empty(), "{report}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_least_privileged_role_is_enough_and_cannot_change_the_outbox() {
    let mut database = Database::private().await;
    let emulator = harness::emulator().await;
    database
        .execute("CREATE ROLE careful LOGIN REPLICATION; GRANT postrider_relay TO careful")
        .await;
    database.url = database.url.replace("postgres@", "careful@");
    harness::insert_orders(&database, 50, 3).await;
    let relay = Relay::start(&database, &emulator);
    database.wait_until_recorded().await;
    relay.stop().await;
    let (client, connection) = tokio_postgres::connect(&database.url, tokio_postgres::NoTls)
        .await
        .unwrap();
    tokio::spawn(connection);
    for sql in [
        "UPDATE outbox.events SET version = 0",
        "DELETE FROM outbox.events",
        "TRUNCATE outbox.events",
        "INSERT INTO outbox.events DEFAULT VALUES",
    ] {
        let error = client.batch_execute(sql).await.unwrap_err();
        assert_eq!(error.code().unwrap().code(), "42501", "{sql}");
    }
}
