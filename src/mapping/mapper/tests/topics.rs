//! Tests the topic of a row, and which columns a template may name.

use super::*;

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
fn extra_columns_are_sent_as_attributes_and_take_precedence_over_headers() {
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
fn a_topic_column_suffices_when_there_is_no_aggregate_type() {
    let mut columns = OUTBOX.to_vec();
    columns[1].0 = "destination";
    let toml = "columns = { aggregatetype = '', topic = 'destination' }";
    let mut mapper = mapper(&columns, toml);
    let mapped = mapper.map_row(&outbox_row(&[]), AT).unwrap();
    assert_eq!(&*mapped.topic, "projects/p/topics/order");
    // The settings have no `topic`, and the default topic needs an aggregate type. So a null topic column is an error.
    let mut row = outbox_row(&[]);
    row[1] = Value::Null;
    let refused = mapper.map_row(&row, AT).unwrap_err();
    assert!(
        refused.to_string().contains("\"destination\" is null"),
        "{refused}"
    );
    assert_eq!(refused.code(), "event-invalid");
    // The template `topic` in the settings applies to rows whose topic column is null. So the table must have every
    // column that the template names. This template names the aggregate type, but the table has none.
    let refused = resolve(&columns, &format!("topic = '{{aggregatetype}}.x'\n{toml}"));
    assert_eq!(refused.unwrap_err().code(), "setting-invalid");
}

#[test]
fn a_value_in_a_template_cannot_choose_the_project() {
    let of = |aggregate_type: &str, toml: &str| {
        let mut row: Vec<Value<'_>> = outbox_row(&[]);
        row[1] = Value::Text(aggregate_type.as_bytes());
        let mapped = mapper(&OUTBOX, toml).map_row(&row, AT);
        mapped.map(|mapped| mapped.topic)
    };
    let project = "p".repeat(900_000);
    for name in [
        "projects/q/topics/abc",
        &format!("projects/{project}/topics/abc"),
    ] {
        for toml in ["", "topic = '{aggregatetype}'"] {
            let refused = of(name, toml).unwrap_err();
            assert_eq!(refused.code(), "event-invalid");
            assert!(refused.to_string().contains("not '/'"), "{refused}");
            assert!(refused.to_string().len() < 1_000);
        }
    }
    let toml = "topic = 'projects/q/topics/{aggregatetype}.events'";
    assert_eq!(
        &*of("order", toml).unwrap(),
        "projects/q/topics/order.events"
    );
}
