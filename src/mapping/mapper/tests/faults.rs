//! Tests which rows and settings are refused, and the text of the error.

use super::*;

#[test]
fn a_null_in_a_required_column_is_an_error_that_names_the_column() {
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
fn an_error_names_the_row_and_never_shows_its_contents() {
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
fn a_message_that_just_fits_a_request_is_accepted_and_one_byte_more_is_refused() {
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
fn a_row_with_another_number_of_columns_than_described_is_refused() {
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
fn each_value_that_cannot_become_a_message_has_its_own_error() {
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
fn a_missing_column_is_reported_with_its_setting_and_the_existing_columns() {
    let without = |name: &str| {
        let columns: Vec<_> = OUTBOX
            .into_iter()
            .filter(|column| column.0 != name)
            .collect();
        move |toml: &str| resolve(&columns, toml)
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
        let refused = resolve(&OUTBOX, toml).unwrap_err();
        assert_eq!(refused.code(), "column-missing", "{toml}");
    }
}

#[test]
fn contradictory_settings_are_refused_when_the_table_is_described() {
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
        let refused = resolve(&OUTBOX, toml).unwrap_err();
        assert_eq!(refused.code(), "setting-invalid", "{toml}: {refused}");
        assert!(!refused.hint().is_empty());
    }
    let toml = "columns = { aggregatetype = '', aggregateid = '', event_type = '' }\n\
                topic = 'fixed'\nordering = 'none'";
    resolve(&OUTBOX, toml).unwrap();
}
