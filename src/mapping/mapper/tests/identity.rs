//! Tests the event ids, which consumers use to deduplicate.

use super::*;

const NUMBERED: [(&str, Oid); 5] = [
    ("id", pg_type::INT8),
    ("aggregatetype", pg_type::TEXT),
    ("aggregateid", pg_type::TEXT),
    ("event_type", pg_type::TEXT),
    ("payload", pg_type::JSONB),
];

/// Maps row 1 of a table with numbered ids.
fn first_of(identity: &str, toml: &str) -> (Mapped, PubsubMessage) {
    let (types, identity) = (ColumnTypes::default(), TableIdentity::new(identity));
    let relation = relation(&NUMBERED);
    let mut mapper = Mapper::resolve(&relation, &types, &settings(toml), &identity, "p").unwrap();
    let row = ["1", "order", "o-1", "Placed", "{}"].map(|text| Value::Text(text.as_bytes()));
    let mapped = mapper.map_row(&row, AT).unwrap();
    let message = read(&mapped);
    (mapped, message)
}

#[test]
fn the_same_number_in_two_tables_gives_two_event_ids() {
    let (a, b) = (first_of("public.a", ""), first_of("public.b", ""));
    assert_ne!(a.1.attributes["event_id"], b.1.attributes["event_id"]);
    assert_eq!(a.1.attributes["source_id"], "1");
    assert_eq!(b.1.attributes["source_id"], "1");
}

#[test]
fn a_message_carries_the_uuid_that_the_dispatch_table_records() {
    // The expected value is the result of: select md5('public.a:1')::uuid
    let expected = "85f1a594-458a-4f7f-6fce-4215fe1761f5";
    for envelope in [
        "raw",
        "cloudevents-binary",
        "cloudevents-structured",
        "protobuf",
    ] {
        let (mapped, message) = first_of("public.a", &format!("envelope = '{envelope}'"));
        let recorded = uuid::Uuid::from_bytes(mapped.event_id.uuid).to_string();
        assert_eq!(message.attributes["event_id"], recorded, "{envelope}");
        assert_eq!(message.attributes["source_id"], "1", "{envelope}");
        let id = match envelope {
            "cloudevents-binary" => message.attributes["ce-id"].clone(),
            "cloudevents-structured" => {
                let document: serde_json::Value = serde_json::from_slice(&message.data).unwrap();
                document["id"].as_str().unwrap().to_owned()
            }
            "protobuf" => {
                let event = ProtobufEvent::decode(message.data).unwrap();
                assert_eq!(event.source_id.as_deref(), Some("1"));
                event.id
            }
            _ => recorded.clone(),
        };
        assert_eq!(id, recorded, "{envelope}");
        assert_eq!(recorded, expected);
    }
}

#[test]
fn a_renamed_table_keeps_its_identity() {
    // The table was renamed to outbox.events.
    let (mapped, message) = first_of("public.before", "envelope = 'cloudevents-binary'");
    assert_eq!(
        mapped.event_id.source_id.as_deref(),
        Some("public.before:1")
    );
    assert_eq!(message.attributes["ce-source"], "/public.before");
}

#[test]
fn with_a_uuid_id_the_attribute_source_id_is_free_for_a_column() {
    let message = map("", &[]);
    assert_eq!(message.attributes["event_id"], UUID);
    assert!(!message.attributes.contains_key("source_id"));

    let mut columns = OUTBOX.to_vec();
    columns.push(("source_id", pg_type::TEXT));
    let mut mapper = mapper(&columns, "attributes = ['source_id']");
    let mut row = outbox_row(&[]);
    row.push(Value::Text(b"erp"));
    let message = read(&mapper.map_row(&row, AT).unwrap());
    assert_eq!(message.attributes["source_id"], "erp");

    let mut columns = NUMBERED.to_vec();
    columns.push(("source_id", pg_type::TEXT));
    let refused = resolve(&columns, "attributes = ['source_id']").unwrap_err();
    assert_eq!(refused.code(), "setting-invalid");
}

#[test]
fn a_header_cannot_replace_an_id() {
    let mut columns = NUMBERED.to_vec();
    columns.push(("headers", pg_type::JSONB));
    let headers = br#"{"source_id": "forged", "event_id": "forged"}"#;
    let texts: [&[u8]; 6] = [b"1", b"order", b"o-1", b"Placed", b"{}", headers];
    let message = read(
        &mapper(&columns, "")
            .map_row(&texts.map(Value::Text), AT)
            .unwrap(),
    );
    assert_eq!(message.attributes["source_id"], "1");
    assert_ne!(message.attributes["event_id"], "forged");
}
