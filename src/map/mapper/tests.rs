//! Whole rows through a mapper, read back with Google's own message type.

use std::collections::HashMap;

use decoder::{Message as WalMessage, Oid, OwnedColumn, ReplicaIdentity};
use googleapis_tonic_google_pubsub_v1::google::pubsub::v1::PubsubMessage;
use proptest::prelude::*;
use prost::Message;

use super::*;
use crate::map::envelope::protobuf::Event;

const UUID: &str = "5a246b35-2bea-4931-9cfc-3e071ccb09c0";
const OUTBOX: [(&str, Oid); 9] = [
    ("id", pg_type::UUID),
    ("aggregatetype", pg_type::TEXT),
    ("aggregateid", pg_type::TEXT),
    ("event_type", pg_type::TEXT),
    ("version", pg_type::INT8),
    ("schema_version", pg_type::INT4),
    ("payload", pg_type::JSONB),
    ("headers", pg_type::JSONB),
    ("occurred_at", pg_type::TIMESTAMPTZ),
];
const AT: EventPosition = EventPosition {
    commit_lsn: Lsn::new(0x1_0000_00A0),
    ordinal: 3,
    commit_time: PgTimestamp::from_micros(1_500_000),
};

fn relation(columns: &[(&str, Oid)]) -> OwnedRelation {
    let column = |&(name, type_oid): &(&str, Oid)| OwnedColumn {
        is_key: false,
        name: name.to_owned(),
        type_oid,
        type_modifier: -1,
    };
    OwnedRelation {
        oid: Oid(16_384),
        namespace: "outbox".to_owned(),
        name: "events".to_owned(),
        replica_identity: ReplicaIdentity::Default,
        columns: columns.iter().map(column).collect(),
    }
}

fn settings(toml: &str) -> TableSettings {
    toml::from_str(toml).unwrap()
}

fn mapper(columns: &[(&str, Oid)], toml: &str) -> Mapper {
    Mapper::resolve(&relation(columns), &settings(toml), "p").unwrap()
}

/// A row of `outbox.events` with the values given in place of the usual ones.
fn outbox_row(other: &[(&str, Value<'static>)]) -> Vec<Value<'static>> {
    let mut row = [
        UUID,
        "order",
        "order-7",
        "OrderPlaced",
        "12",
        "1",
        r#"{"total": 1.50}"#,
        r#"{"tenant": "acme", "traceparent": "00-ab-cd-01"}"#,
        "2026-11-21 11:40:44.123456+00",
    ]
    .map(|text| Value::Text(text.as_bytes()));
    for (name, value) in other {
        row[OUTBOX.iter().position(|column| column.0 == *name).unwrap()] = *value;
    }
    row.into()
}

fn read(mapped: &Mapped) -> PubsubMessage {
    PubsubMessage::decode(mapped.message.clone()).unwrap()
}

fn map(toml: &str, other: &[(&str, Value<'static>)]) -> PubsubMessage {
    read(
        &mapper(&OUTBOX, toml)
            .map_row(&outbox_row(other), AT)
            .unwrap(),
    )
}

fn fault(toml: &str, other: &[(&str, Value<'static>)]) -> EventFault {
    match mapper(&OUTBOX, toml).map_row(&outbox_row(other), AT) {
        Err(MapError::Event(event)) => event.fault,
        other => panic!("not refused: {other:?}"),
    }
}

fn leaked(text: String) -> Value<'static> {
    Value::Text(text.leak().as_bytes())
}

#[test]
fn a_row_becomes_a_message_with_the_fixed_attributes_and_the_headers() {
    let mapped = mapper(&OUTBOX, "").map_row(&outbox_row(&[]), AT).unwrap();
    assert_eq!(&*mapped.topic, "projects/p/topics/order.events");
    assert_eq!(mapped.ordering_key.as_str(), "order-7");
    assert_eq!(mapped.event_id.to_string(), UUID);
    let attributes = [
        ("event_id", UUID),
        ("event_type", "OrderPlaced"),
        ("aggregate_type", "order"),
        ("aggregate_id", "order-7"),
        ("version", "12"),
        ("schema_version", "1"),
        ("occurred_at", "2026-11-21T11:40:44.123456Z"),
        ("tenant", "acme"),
        ("traceparent", "00-ab-cd-01"),
        ("googclient_traceparent", "00-ab-cd-01"),
    ];
    let expected = PubsubMessage {
        data: r#"{"total": 1.50}"#.into(),
        attributes: attributes.map(|(k, v)| (k.to_owned(), v.to_owned())).into(),
        ordering_key: "order-7".to_owned(),
        ..PubsubMessage::default()
    };
    assert_eq!(read(&mapped), expected);
}

#[test]
fn an_insert_as_it_comes_from_the_server_is_mapped_also_from_a_wide_table() {
    for padding in [0, 30] {
        let mut columns = OUTBOX.to_vec();
        columns.extend(std::iter::repeat_n(("unused", pg_type::BYTEA), padding));
        let mut payload = b"I\x00\x00\x40\x00N".to_vec();
        payload.extend((columns.len() as u16).to_be_bytes());
        for value in outbox_row(&[]) {
            let Value::Text(text) = value else {
                unreachable!()
            };
            payload.push(b't');
            payload.extend((text.len() as u32).to_be_bytes());
            payload.extend(text);
        }
        // Columns that nobody uses may be anything, even what would be refused elsewhere.
        payload.extend(std::iter::repeat_n(b'u', padding));
        let Ok(WalMessage::Insert(insert)) = decoder::decode(&payload) else {
            unreachable!()
        };
        let mapped = mapper(&columns, "").map(&insert.tuple, AT).unwrap();
        assert_eq!(
            mapped,
            mapper(&OUTBOX, "").map_row(&outbox_row(&[]), AT).unwrap()
        );
    }
}

#[test]
fn nothing_of_one_row_is_left_in_the_next() {
    let mut mapper = mapper(&OUTBOX, "envelope = 'cloudevents-structured'");
    let full = outbox_row(&[]);
    let bare = outbox_row(&[
        ("headers", Value::Null),
        ("payload", Value::Null),
        ("occurred_at", Value::Null),
        ("aggregateid", Value::Null),
    ]);
    let first = mapper.map_row(&full, AT).unwrap();
    let second = mapper.map_row(&bare, AT).unwrap();
    mapper
        .map_row(&outbox_row(&[("headers", Value::Text(b"[]"))]), AT)
        .unwrap_err();
    assert_eq!(mapper.map_row(&full, AT).unwrap(), first);
    assert_eq!(mapper.map_row(&bare, AT).unwrap(), second);
}

#[test]
fn nulls_are_left_out_and_a_null_payload_is_an_empty_body() {
    let nulls = [
        "aggregateid",
        "event_type",
        "version",
        "schema_version",
        "payload",
        "headers",
    ]
    .map(|column| (column, Value::Null));
    let message = map("", &nulls);
    assert!(message.data.is_empty() && message.ordering_key.is_empty());
    let mut names: Vec<_> = message.attributes.keys().map(String::as_str).collect();
    names.sort_unstable();
    assert_eq!(names, ["aggregate_type", "event_id", "occurred_at"]);
}

#[test]
fn a_header_does_not_replace_a_fixed_attribute() {
    let headers = Value::Text(br#"{"event_id": "forged", "version": "99"}"#);
    let message = map("", &[("headers", headers), ("version", Value::Null)]);
    assert_eq!(message.attributes["event_id"], UUID);
    assert_eq!(
        message.attributes["version"], "99",
        "where there is none, a header may say it"
    );
}

#[test]
fn debeziums_outbox_and_a_serial_id_are_mapped() {
    let columns = [
        ("id", pg_type::INT8),
        ("aggregatetype", pg_type::VARCHAR),
        ("aggregateid", pg_type::VARCHAR),
        ("type", pg_type::VARCHAR),
        ("payload", pg_type::JSON),
    ];
    let mut mapper = mapper(
        &columns,
        "columns = { event_type = 'type' }\ntopic = 'outbox.event.{aggregatetype}'",
    );
    let row = ["7", "order", "o-1", "Placed", "{}"].map(|text| Value::Text(text.as_bytes()));
    let mapped = mapper.map_row(&row, AT).unwrap();
    assert_eq!(&*mapped.topic, "projects/p/topics/outbox.event.order");
    assert_eq!(
        mapped.event_id.source_id.as_deref(),
        Some("outbox.events:7")
    );
    let message = read(&mapped);
    assert_eq!(message.attributes["event_id"], "7");
    assert_eq!(message.attributes["event_type"], "Placed");
}

#[test]
fn topics_come_from_the_column_then_a_rule_then_the_template() {
    let mut columns = OUTBOX.to_vec();
    columns.push(("dest", pg_type::TEXT));
    let toml = "columns = { topic = 'dest' }\ntopic = '{aggregatetype}-{dest}'\n\
                topic_rules = { refund = 'money' }";
    let mut mapper = mapper(&columns, &toml.replace("-{dest}", "-{event_type}"));
    let mut topic = |aggregate_type: &'static str, dest: Value<'static>| {
        let mut row = outbox_row(&[("aggregatetype", Value::Text(aggregate_type.as_bytes()))]);
        row.push(dest);
        mapper.map_row(&row, AT).unwrap().topic
    };
    assert_eq!(
        &*topic("refund", Value::Text(b"special")),
        "projects/p/topics/special"
    );
    assert_eq!(
        &*topic("refund", Value::Text(b"projects/q/topics/abc")),
        "projects/q/topics/abc"
    );
    assert_eq!(&*topic("refund", Value::Null), "projects/p/topics/money");
    assert_eq!(
        &*topic("order", Value::Text(b"")),
        "projects/p/topics/order-OrderPlaced"
    );
    let (one, other) = (topic("order", Value::Null), topic("order", Value::Null));
    assert!(Arc::ptr_eq(&one, &other), "names are shared");
}

#[test]
fn a_template_may_name_roles_by_their_default_name_and_any_column() {
    let columns = [
        ("seq", pg_type::INT8),
        ("kind", pg_type::TEXT),
        ("body", pg_type::TEXT),
        ("tenant", pg_type::TEXT),
        ("topic", pg_type::TEXT),
    ];
    let toml = "topic = '{aggregatetype}.{tenant}.{topic}'\nordering = 'none'\n\
                columns = { id = 'seq', aggregatetype = 'kind', aggregateid = '', \
                            event_type = '', payload = 'body' }";
    let row = ["1", "order", "x", "acme", "eu"].map(|text| Value::Text(text.as_bytes()));
    let mapped = mapper(&columns, toml).map_row(&row, AT).unwrap();
    assert_eq!(&*mapped.topic, "projects/p/topics/order.acme.eu");
    assert!(mapped.ordering_key.is_unordered());
}

#[test]
fn extra_columns_go_out_as_attributes_before_headers() {
    let mut columns = OUTBOX.to_vec();
    columns.push(("tenant", pg_type::TEXT));
    let mut row = outbox_row(&[]);
    row.push(Value::Text(b"from-column"));
    let mapped = mapper(&columns, "attributes = ['tenant']")
        .map_row(&row, AT)
        .unwrap();
    assert_eq!(read(&mapped).attributes["tenant"], "from-column");
}

#[test]
fn bytea_goes_out_as_bytes_from_either_format() {
    let mut columns = OUTBOX;
    columns[6].1 = pg_type::BYTEA;
    for payload in [Value::Text(b"\\x00ff10"), Value::Binary(b"\x00\xff\x10")] {
        let row = outbox_row(&[("payload", payload)]);
        let mapped = mapper(&columns, "").map_row(&row, AT).unwrap();
        assert_eq!(read(&mapped).data, &b"\x00\xff\x10"[..]);
    }
}

#[test]
fn a_row_in_binary_format_becomes_the_same_message() {
    let time = PgTimestamp::from_unix_micros(1_795_261_244_123_456)
        .as_micros()
        .to_be_bytes();
    let uuid = uuid::Uuid::parse_str(UUID).unwrap().into_bytes();
    let row = [
        Value::Binary(&uuid),
        Value::Binary(b"order"),
        Value::Binary(b"order-7"),
        Value::Binary(b"OrderPlaced"),
        Value::Binary(&[0, 0, 0, 0, 0, 0, 0, 12]),
        Value::Binary(&[0, 0, 0, 1]),
        Value::Binary(b"\x01{\"total\": 1.50}"),
        Value::Binary(b"\x01{\"tenant\": \"acme\", \"traceparent\": \"00-ab-cd-01\"}"),
        Value::Binary(&time),
    ];
    let binary = mapper(&OUTBOX, "").map_row(&row, AT).unwrap();
    assert_eq!(
        binary,
        mapper(&OUTBOX, "").map_row(&outbox_row(&[]), AT).unwrap()
    );
}

#[test]
fn cloudevents_in_binary_mode_have_the_context_in_attributes() {
    let message = map("envelope = 'cloudevents-binary'\nsource = '/shop'", &[]);
    let expected = [
        ("ce-specversion", "1.0"),
        ("ce-id", UUID),
        ("ce-source", "/shop"),
        ("ce-type", "OrderPlaced"),
        ("ce-time", "2026-11-21T11:40:44.123456Z"),
        ("ce-subject", "order-7"),
        ("content-type", "application/json"),
        ("event_type", "OrderPlaced"),
    ];
    for (name, value) in expected {
        assert_eq!(message.attributes[name], value, "{name}");
    }
    assert_eq!(message.data, r#"{"total": 1.50}"#);
}

#[test]
fn the_commit_time_stands_in_for_an_occurrence_that_is_no_point_in_time() {
    let message = map(
        "envelope = 'cloudevents-binary'",
        &[
            ("occurred_at", Value::Text(b"infinity")),
            ("aggregateid", Value::Null),
        ],
    );
    assert_eq!(message.attributes["ce-time"], "2000-01-01T00:00:01.500000Z");
    assert_eq!(message.attributes["occurred_at"], "infinity");
    assert!(!message.attributes.contains_key("ce-subject"));
}

#[test]
fn the_producer_may_name_the_content_type() {
    let headers = (
        "headers",
        Value::Text(br#"{"content-type": "application/x-avro"}"#),
    );
    let binary = map("envelope = 'cloudevents-binary'", &[headers]);
    assert_eq!(binary.attributes["content-type"], "application/x-avro");
    let structured = map("envelope = 'cloudevents-structured'", &[headers]);
    assert_eq!(
        structured.attributes["content-type"],
        "application/cloudevents+json"
    );
    let document: serde_json::Value = serde_json::from_slice(&structured.data).unwrap();
    assert_eq!(document["datacontenttype"], "application/x-avro");
}

#[test]
fn cloudevents_in_structured_mode_are_one_json_document() {
    let message = map("envelope = 'cloudevents-structured'", &[]);
    let expected = format!(
        "{{\"specversion\":\"1.0\",\"id\":\"{UUID}\",\"source\":\"/outbox.events\",\
         \"type\":\"OrderPlaced\",\"subject\":\"order-7\",\
         \"time\":\"2026-11-21T11:40:44.123456Z\",\"traceparent\":\"00-ab-cd-01\",\
         \"datacontenttype\":\"application/json\",\"data\":{{\"total\": 1.50}}}}"
    );
    assert_eq!(std::str::from_utf8(&message.data).unwrap(), expected);
    assert_eq!(message.attributes["event_id"], UUID);
}

#[test]
fn structured_cloudevents_carry_text_as_a_string_and_bytes_in_base64() {
    let document = |type_oid, payload| {
        let mut columns = OUTBOX;
        columns[6].1 = type_oid;
        let mut mapper = mapper(&columns, "envelope = 'cloudevents-structured'");
        let row = outbox_row(&[("payload", payload), ("event_type", Value::Text(b"a\"b"))]);
        let data = read(&mapper.map_row(&row, AT).unwrap()).data;
        serde_json::from_slice::<serde_json::Value>(&data).unwrap()
    };
    let text = document(pg_type::TEXT, Value::Text("say \"hé\"\n".as_bytes()));
    assert_eq!(text["data"], "say \"hé\"\n");
    assert_eq!(text["type"], "a\"b");
    assert_eq!(text["datacontenttype"], "text/plain; charset=utf-8");
    let bytes = document(pg_type::BYTEA, Value::Text(b"\\x00ff"));
    assert_eq!(bytes["data_base64"], "AP8=");
    assert_eq!(bytes["datacontenttype"], "application/octet-stream");
    let null = document(pg_type::JSONB, Value::Null);
    assert!(null.get("data").is_none() && null.get("datacontenttype").is_none());
}

#[test]
fn a_text_payload_that_is_no_text_is_an_error_that_names_its_column() {
    let mut columns = OUTBOX;
    columns[6] = ("body", pg_type::TEXT);
    let toml = "envelope = 'cloudevents-structured'\ncolumns.payload = 'body'";
    let row = outbox_row(&[("payload", Value::Text(b"\xFF"))]);
    let refused = mapper(&columns, toml).map_row(&row, AT).unwrap_err();
    let MapError::Event(event) = refused else {
        unreachable!()
    };
    assert_eq!(
        event.fault,
        EventFault::NotUtf8 {
            column: "body".to_owned()
        }
    );
}

#[test]
fn the_protobuf_envelope_carries_everything_that_is_known() {
    let message = map("envelope = 'protobuf'", &[]);
    let event = Event::decode(message.data).unwrap();
    assert_eq!(event.id, UUID);
    assert_eq!(event.source, "/outbox.events");
    assert_eq!(event.r#type, "OrderPlaced");
    assert_eq!(
        (event.aggregate_type.as_str(), event.aggregate_id.as_str()),
        ("order", "order-7")
    );
    assert_eq!(event.version.as_deref(), Some("12"));
    assert_eq!(event.schema_version.as_deref(), Some("1"));
    let occurred_at = event.occurred_at.unwrap();
    assert_eq!(
        (occurred_at.seconds, occurred_at.nanos),
        (1_795_261_244, 123_456_000)
    );
    let committed_at = event.committed_at.unwrap();
    assert_eq!(
        (committed_at.seconds, committed_at.nanos),
        (946_684_801, 500_000_000)
    );
    assert_eq!((event.commit_lsn, event.ordinal), (0x1_0000_00A0, 3));
    assert_eq!(event.headers["tenant"], "acme");
    assert_eq!(event.content_type, "application/json");
    assert_eq!(event.payload, r#"{"total": 1.50}"#);
    assert!(message.attributes["content-type"].contains("postrider.v1.Event"));
}

#[test]
fn nulls_where_a_value_is_needed_are_errors_that_name_the_column() {
    for (toml, column) in [
        ("", "id"),
        ("", "aggregatetype"),
        ("envelope = 'cloudevents-binary'", "event_type"),
        ("envelope = 'cloudevents-structured'", "event_type"),
    ] {
        for value in [Value::Null, Value::Text(b"")] {
            let refused = fault(toml, &[(column, value)]);
            assert!(
                matches!(&refused, EventFault::Null { column: c, .. } if c == column),
                "{column}: {refused:?}"
            );
        }
    }
}

#[test]
fn an_error_names_the_row_and_never_shows_what_is_in_it() {
    let secret = leaked(format!("{{\"password\": \"{}\"}}", "hunter2".repeat(200)));
    let refused = mapper(&OUTBOX, "")
        .map_row(&outbox_row(&[("headers", secret)]), AT)
        .unwrap_err();
    let shown = format!("{refused} {refused:?} {}", refused.hint());
    assert!(
        shown.contains(UUID) && shown.contains("outbox.events"),
        "{shown}"
    );
    assert!(shown.contains("commit 1/A0, ordinal 3"), "{shown}");
    assert!(shown.contains("1400") && shown.contains("1024"), "{shown}");
    assert!(!shown.contains("hunter2"), "{shown}");
    assert_eq!(refused.code(), "event-invalid");

    let malformed = Value::Text(b"\"hunter2\"");
    let refused = mapper(&OUTBOX, "")
        .map_row(&outbox_row(&[("headers", malformed)]), AT)
        .unwrap_err();
    assert!(!format!("{refused} {refused:?}").contains("hunter2"));
}

#[test]
fn a_message_that_just_fits_a_request_is_taken_and_one_byte_more_is_not() {
    let mut mapper = mapper(&OUTBOX, "");
    let mut map_payload = |len: usize| {
        let text = "x".repeat(len);
        let mut row = outbox_row(&[]);
        row[6] = Value::Text(text.as_bytes());
        mapper.map_row(&row, AT)
    };
    let overhead = {
        let mapped = map_payload(9_000_000).unwrap();
        wire::request_size(mapped.topic.len(), mapped.message.len()) - 9_000_000
    };
    let fits = limits::REQUEST_BYTES - overhead;
    let mapped = map_payload(fits).unwrap();
    assert_eq!(
        wire::request_size(mapped.topic.len(), mapped.message.len()),
        10_000_000
    );
    let refused = map_payload(fits + 1).unwrap_err();
    assert_eq!(refused.code(), "event-too-large");
    let MapError::Event(event) = refused else {
        unreachable!()
    };
    let expected = EventFault::OverLimit {
        limit: Limit::Request,
        found: 10_000_001,
    };
    assert_eq!(event.fault, expected);
    assert_eq!(
        map_payload(20_000_000).unwrap_err().code(),
        "event-too-large"
    );
}

#[test]
fn a_row_of_another_shape_than_described_is_refused() {
    let mut row = outbox_row(&[]);
    row.pop();
    let refused = mapper(&OUTBOX, "").map_row(&row, AT).unwrap_err();
    let MapError::Event(event) = refused else {
        unreachable!()
    };
    assert_eq!(
        event.fault,
        EventFault::ColumnCount {
            expected: 9,
            found: 8
        }
    );
}

#[test]
fn values_that_no_insert_can_have_are_errors() {
    assert!(matches!(
        fault("", &[("payload", Value::UnchangedToast)]),
        EventFault::UnchangedToast { column } if column == "payload"
    ));
    assert!(matches!(
        fault("", &[("event_type", Value::Text(b"\xFF"))]),
        EventFault::NotUtf8 { column } if column == "event_type"
    ));
    assert!(matches!(
        fault("", &[("id", Value::Text(b"seven"))]),
        EventFault::UuidMalformed { column } if column == "id"
    ));
    assert!(matches!(
        fault("", &[("aggregatetype", Value::Text(b"Order Item"))]),
        EventFault::Topic { topic, .. } if topic == "Order Item.events"
    ));
}

#[test]
fn a_missing_column_is_told_with_its_setting_and_the_columns_there_are() {
    let without = |name: &str| {
        let columns: Vec<_> = OUTBOX
            .into_iter()
            .filter(|column| column.0 != name)
            .collect();
        move |toml: &str| Mapper::resolve(&relation(&columns), &settings(toml), "p")
    };
    for name in [
        "id",
        "aggregatetype",
        "aggregateid",
        "event_type",
        "payload",
    ] {
        let refused = without(name)("").unwrap_err();
        let MapError::ColumnMissing {
            column,
            setting,
            present,
            ..
        } = &refused
        else {
            panic!("{refused:?}")
        };
        assert_eq!(
            (column.as_str(), setting.as_str()),
            (name, &*format!("columns.{name}"))
        );
        assert_eq!(present.len(), 8);
    }
    for name in ["version", "schema_version", "headers", "occurred_at"] {
        without(name)("").unwrap();
        let named = format!("columns = {{ {name} = '{name}' }}");
        assert_eq!(without(name)(&named).unwrap_err().code(), "column-missing");
    }
    for toml in [
        "topic = '{tenant}.events'",
        "attributes = ['tenant']",
        "columns.topic = 'to'",
    ] {
        let refused = Mapper::resolve(&relation(&OUTBOX), &settings(toml), "p").unwrap_err();
        assert_eq!(refused.code(), "column-missing", "{toml}");
    }
}

#[test]
fn settings_that_contradict_each_other_are_refused_when_the_table_is_seen() {
    for toml in [
        "columns.id = ''",
        "columns.payload = ''",
        "columns.aggregateid = ''",
        "columns.aggregatetype = ''",
        "columns.aggregatetype = ''\ntopic = 'fixed'\ntopic_rules = { a = 'bcd' }",
        "columns.event_type = ''\nenvelope = 'cloudevents-binary'",
        "attributes = ['event_id']",
        "topic = 'a topic'",
        "topic_rules = { order = 'ab' }",
    ] {
        let refused = Mapper::resolve(&relation(&OUTBOX), &settings(toml), "p").unwrap_err();
        assert_eq!(refused.code(), "setting-invalid", "{toml}: {refused}");
        assert!(!refused.hint().is_empty());
    }
    let toml = "columns = { aggregatetype = '', aggregateid = '', event_type = '' }\n\
                topic = 'fixed'\nordering = 'none'";
    Mapper::resolve(&relation(&OUTBOX), &settings(toml), "p").unwrap();
}

/// A random row: null or any text in each column that may be so, JSON where it is due.
#[derive(Debug, Clone)]
struct RandomRow {
    aggregate_type: String,
    aggregate_id: Option<String>,
    event_type: Option<String>,
    version: Option<i64>,
    payload: Option<String>,
    headers: Option<std::collections::BTreeMap<String, String>>,
}

fn random_row() -> impl Strategy<Value = RandomRow> {
    let header_name = "(event_id|version|traceparent|tracestate|[a-f]{0,3}|.{1,8})";
    (
        "[a-z]{1,12}",
        proptest::option::of(".{0,40}"),
        proptest::option::of(".{0,40}"),
        proptest::option::of(any::<i64>()),
        proptest::option::of(".{0,300}"),
        proptest::option::of(proptest::collection::btree_map(
            header_name,
            ".{0,60}",
            0..6,
        )),
    )
        .prop_map(
            |(aggregate_type, aggregate_id, event_type, version, payload, headers)| RandomRow {
                aggregate_type,
                aggregate_id,
                event_type,
                version,
                payload,
                headers,
            },
        )
}

impl RandomRow {
    fn expected(&self) -> PubsubMessage {
        let mut attributes: HashMap<String, String> = self
            .headers
            .clone()
            .unwrap_or_default()
            .into_iter()
            .collect();
        for name in ["traceparent", "tracestate"] {
            if let Some(value) = attributes.get(name).cloned() {
                attributes
                    .entry(format!("googclient_{name}"))
                    .or_insert(value);
            }
        }
        let fixed = [
            ("event_id", Some(UUID.to_owned())),
            ("aggregate_type", Some(self.aggregate_type.clone())),
            ("aggregate_id", self.aggregate_id.clone()),
            ("event_type", self.event_type.clone()),
            ("version", self.version.map(|version| version.to_string())),
        ];
        for (name, value) in fixed {
            attributes.extend(value.map(|value| (name.to_owned(), value)));
        }
        PubsubMessage {
            data: self.payload.clone().unwrap_or_default().into(),
            attributes,
            ordering_key: self.aggregate_id.clone().unwrap_or_default(),
            ..PubsubMessage::default()
        }
    }
}

proptest! {
    #[test]
    fn any_row_reads_back_as_it_was(random in random_row()) {
        let version = random.version.map(|version| version.to_string());
        let headers = random.headers.as_ref().map(|headers| serde_json::to_string(headers).unwrap());
        let texts = [
            Some(UUID),
            Some(random.aggregate_type.as_str()),
            random.aggregate_id.as_deref(),
            random.event_type.as_deref(),
            version.as_deref(),
            None,
            random.payload.as_deref(),
            headers.as_deref(),
            None,
        ];
        let row = texts.map(|text| text.map_or(Value::Null, |text| Value::Text(text.as_bytes())));
        let mapped = mapper(&OUTBOX, "").map_row(&row, AT).unwrap();
        prop_assert_eq!(read(&mapped), random.expected());
        prop_assert_eq!(mapped.ordering_key.as_str(), random.aggregate_id.unwrap_or_default());
    }

    #[test]
    fn no_row_makes_it_panic_in_any_envelope(
        kinds in proptest::collection::vec(0_u8..4, 9),
        bytes in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..20), 9),
        envelope in "(raw|cloudevents-binary|cloudevents-structured|protobuf)",
    ) {
        let row: Vec<_> = kinds.iter().zip(&bytes).map(|(kind, bytes)| match kind {
            0 => Value::Null,
            1 => Value::UnchangedToast,
            2 => Value::Text(bytes),
            _ => Value::Binary(bytes),
        }).collect();
        let _ = mapper(&OUTBOX, &format!("envelope = '{envelope}'")).map_row(&row, AT);
    }
}
