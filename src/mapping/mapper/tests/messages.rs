//! Tests body, ordering key and attributes of messages.

use super::*;
use crate::mapping::TupleValues;

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
fn an_insert_from_the_wire_is_mapped_even_with_more_columns_than_fit_inline() {
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
        // The mapper does not read unused columns, so they may contain values that would be refused in a used
        // column.
        payload.extend(std::iter::repeat_n(b'u', padding));
        let Ok(WalMessage::Insert(insert)) = decoder::decode(&payload) else {
            unreachable!()
        };
        let row = TupleValues::of(&insert.tuple);
        let mapped = mapper(&columns, "").map_row(row.as_slice(), AT).unwrap();
        assert_eq!(
            mapped,
            mapper(&OUTBOX, "").map_row(&outbox_row(&[]), AT).unwrap()
        );
    }
}

#[test]
fn no_value_of_one_row_leaks_into_the_next() {
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
        "if the column is null, a header may supply the value"
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
    assert_eq!(
        message.attributes["event_id"],
        uuid::Uuid::from_bytes(mapped.event_id.uuid).to_string()
    );
    assert_eq!(message.attributes["source_id"], "7");
    assert_eq!(message.attributes["event_type"], "Placed");
}

#[test]
fn bytea_in_text_and_binary_format_is_sent_as_the_same_bytes() {
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
fn debeziums_trace_context_becomes_the_attributes_of_the_trace() {
    let columns = [&OUTBOX[..], &[("tracingspancontext", pg_type::TEXT)]].concat();
    let map = |headers: &'static str, context: Value<'static>| {
        let mut row = outbox_row(&[("headers", Value::Text(headers.as_bytes()))]);
        row.push(context);
        read(&mapper(&columns, "").map_row(&row, AT).unwrap()).attributes
    };
    let context = Value::Text(b"#comment\ntraceparent=00-ef-01-01\ntracestate=a\\=1\n");
    let attributes = map("{}", context);
    for name in ["traceparent", "googclient_traceparent"] {
        assert_eq!(attributes[name], "00-ef-01-01");
    }
    assert_eq!(attributes["tracestate"], "a=1");
    assert!(!attributes.contains_key("tracingspancontext"));

    let attributes = map(r#"{"traceparent": "00-ab-cd-01"}"#, context);
    assert_eq!(attributes["traceparent"], "00-ab-cd-01");
    assert!(!attributes.contains_key("tracestate"), "of another trace");
    assert!(!map("{}", Value::Null).contains_key("traceparent"));
    assert!(!map("{}", Value::Text(b"no properties")).contains_key("traceparent"));
}

#[test]
fn a_trace_context_without_room_is_left_out() {
    let columns = [&OUTBOX[..], &[("tracingspancontext", pg_type::TEXT)]].concat();
    let all = limits::ATTRIBUTES - map("", &[("headers", Value::Null)]).attributes.len();
    for (headers, has_trace) in [(all, false), (all - 3, false), (all - 4, true)] {
        let names = (0..headers).map(|n| format!("\"h{n}\":\"v\""));
        let text = format!("{{{}}}", names.collect::<Vec<_>>().join(","));
        let mut row = outbox_row(&[("headers", leaked(text))]);
        row.push(Value::Text(b"traceparent=00-ab-cd-01\ntracestate=a\\=1"));
        let attributes = read(&mapper(&columns, "").map_row(&row, AT).unwrap()).attributes;
        assert_eq!(
            attributes.contains_key("traceparent"),
            has_trace,
            "{headers}"
        );
    }
}
