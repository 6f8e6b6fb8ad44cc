//! Compares the messages of random rows with an expectation that is computed independently.

use super::*;

/// A random row. Each nullable column has a random value or null; headers are JSON.
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
    fn any_row_is_read_back_as_it_was_written(random in random_row()) {
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
    fn no_row_causes_a_panic_in_any_envelope(
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
