//! Tests all envelopes except `raw`.

use super::*;

#[test]
fn binary_cloudevents_carry_the_context_in_attributes() {
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
fn the_commit_time_is_used_when_occurred_at_is_not_a_point_in_time() {
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
fn the_producer_may_set_the_content_type() {
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
fn structured_cloudevents_are_one_json_document() {
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
fn a_text_payload_that_is_not_utf_8_is_an_error_that_names_its_column() {
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
fn the_protobuf_envelope_carries_every_known_field() {
    let message = map("envelope = 'protobuf'", &[]);
    let event = ProtobufEvent::decode(message.data).unwrap();
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
