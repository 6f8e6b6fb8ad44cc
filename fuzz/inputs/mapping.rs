//! Maps arbitrary rows of arbitrary tables with arbitrary settings. Checks that nothing panics, that the
//! message is the same each time, and that Pub/Sub would accept it.
//!
//! Most names come from a short list, because otherwise the columns of the tables would never match the
//! settings.

use arbitrary::Arbitrary;
use decoder::{Lsn, Oid, OwnedColumn, OwnedRelation, PgTimestamp, ReplicaIdentity, Value};
use googleapis_tonic_google_pubsub_v1::google::pubsub::v1::PubsubMessage;
use postrider::event::{CommittedAt, EventPosition};
use postrider::mapping::{
    ColumnSettings, ColumnTypes, MapError, Mapped, Mapper, TableSettings, limits,
};
use prost::Message;
use replication::CommitLsn;

/// The input of the target.
#[derive(Debug, Arbitrary)]
pub(crate) struct Input<'a> {
    columns: Vec<(Name<'a>, DataType)>,
    settings: Settings<'a>,
    rows: Vec<Vec<Field<'a>>>,
    position: (u64, u32, i64),
}

#[derive(Debug, Arbitrary)]
enum Name<'a> {
    Usual(u8),
    Any(&'a str),
}

const NAMES: [&str; 12] = [
    "id",
    "aggregatetype",
    "aggregateid",
    "event_type",
    "version",
    "schema_version",
    "payload",
    "headers",
    "occurred_at",
    "topic",
    "tenant",
    "googlish",
];

impl Name<'_> {
    fn text(&self) -> &str {
        match self {
            Name::Usual(n) => NAMES[usize::from(*n) % NAMES.len()],
            Name::Any(text) => text,
        }
    }
}

#[derive(Debug, Arbitrary)]
enum DataType {
    Usual(u8),
    Any(u32),
}

/// OIDs of uuid, text, varchar, int4, int8, bool, json, jsonb, bytea, timestamptz and timestamp.
const TYPES: [u32; 11] = [2950, 25, 1043, 23, 20, 16, 114, 3802, 17, 1184, 1114];

impl DataType {
    fn oid(&self) -> Oid {
        match self {
            DataType::Usual(n) => Oid(TYPES[usize::from(*n) % TYPES.len()]),
            DataType::Any(oid) => Oid(*oid),
        }
    }
}

#[derive(Debug, Arbitrary)]
struct Settings<'a> {
    named: [Option<Name<'a>>; 11],
    topic: Option<&'a str>,
    rules: Vec<(&'a str, &'a str)>,
    ordering: u8,
    envelope: u8,
    attributes: Vec<Name<'a>>,
    source: Option<&'a str>,
}

const ORDERINGS: [&str; 4] = ["key", "none", "bucketed(1)", "bucketed(10000)"];
const ENVELOPES: [&str; 4] = [
    "raw",
    "cloudevents-binary",
    "cloudevents-structured",
    "protobuf",
];

impl Settings<'_> {
    /// Builds the settings. Returns `None` if one of the texts cannot be parsed.
    fn build(&self) -> Option<TableSettings> {
        let named = |n: usize| self.named[n].as_ref().map(|name| name.text().to_owned());
        let mut settings = TableSettings {
            columns: ColumnSettings {
                id: named(0),
                aggregatetype: named(1),
                aggregateid: named(2),
                event_type: named(3),
                version: named(4),
                schema_version: named(5),
                payload: named(6),
                headers: named(7),
                occurred_at: named(8),
                topic: named(9),
                tracingspancontext: None,
                seq: named(10),
            },
            topic_rules: self
                .rules
                .iter()
                .map(|(kind, topic)| ((*kind).to_owned(), (*topic).to_owned()))
                .collect(),
            ordering: ORDERINGS[usize::from(self.ordering) % ORDERINGS.len()]
                .parse()
                .ok()?,
            envelope: ENVELOPES[usize::from(self.envelope) % ENVELOPES.len()]
                .parse()
                .ok()?,
            attributes: self
                .attributes
                .iter()
                .map(|name| name.text().to_owned())
                .collect(),
            source: self.source.map(ToOwned::to_owned),
            ..TableSettings::default()
        };
        if let Some(topic) = self.topic {
            settings.topic = topic.parse().ok()?;
        }
        Some(settings)
    }
}

#[derive(Debug, Arbitrary)]
enum Field<'a> {
    Null,
    UnchangedToast,
    Text(&'a str),
    Bytes(&'a [u8]),
    Binary(&'a [u8]),
    Uuid(&'a str),
    Time,
    Json(&'a str),
    Long(u8, u16),
}

/// Returns the text of each field of a row. The [`values`] of the row borrow from these texts.
fn texts(row: &[Field<'_>]) -> Vec<Vec<u8>> {
    row.iter()
        .map(|field| match field {
            Field::Null | Field::UnchangedToast => Vec::new(),
            Field::Text(text) => text.as_bytes().to_vec(),
            Field::Bytes(bytes) | Field::Binary(bytes) => bytes.to_vec(),
            Field::Uuid(tail) => {
                let mut uuid = b"0af76519-16cd-43dd-8448-eb211c80319c".to_vec();
                let at = uuid.len().saturating_sub(tail.len());
                uuid.truncate(at);
                uuid.extend(tail.as_bytes());
                uuid
            }
            Field::Time => b"2026-11-21 15:30:00.123456+00".to_vec(),
            Field::Json(text) => format!("{{\"traceparent\": {text:?}, \"n\": 1}}").into_bytes(),
            Field::Long(byte, times) => vec![byte & 0x7f; usize::from(*times)],
        })
        .collect()
}

fn values<'a>(row: &[Field<'_>], texts: &'a [Vec<u8>]) -> Vec<Value<'a>> {
    row.iter()
        .zip(texts)
        .map(|(field, text)| match field {
            Field::Null => Value::Null,
            Field::UnchangedToast => Value::UnchangedToast,
            Field::Binary(_) => Value::Binary(text),
            Field::Text(_)
            | Field::Bytes(_)
            | Field::Uuid(_)
            | Field::Time
            | Field::Json(_)
            | Field::Long(..) => Value::Text(text),
        })
        .collect()
}

/// Panics if the code has a fault with this input.
pub(crate) fn check_input(input: &Input<'_>) {
    let Some(settings) = input.settings.build() else {
        return;
    };
    let relation = OwnedRelation {
        oid: Oid(1),
        namespace: "outbox".into(),
        name: "events".into(),
        replica_identity: ReplicaIdentity::Default,
        columns: input
            .columns
            .iter()
            .map(|(name, data_type)| OwnedColumn {
                is_key: false,
                name: name.text().to_owned(),
                type_oid: data_type.oid(),
                type_modifier: -1,
            })
            .collect(),
    };
    let types = ColumnTypes::default();
    let mut mapper =
        match Mapper::resolve(&relation, &types, &settings, &settings.identity(), "demo") {
            Ok(mapper) => mapper,
            Err(error) => return drop(error.to_string()),
        };
    let fresh = mapper.clone();
    let (commit, ordinal, time) = input.position;
    let at = CommittedAt {
        position: EventPosition {
            commit: CommitLsn::new(Lsn::new(commit)),
            ordinal,
        },
        time: PgTimestamp::from_micros(time),
    };
    for row in &input.rows {
        let texts = texts(row);
        let values = values(row, &texts);
        // Compare a mapper that has mapped other rows with a fresh mapper.
        let mapped = mapper.map_row(&values, at);
        let again = fresh.clone().map_row(&values, at);
        match (mapped, again) {
            (Ok(mapped), Ok(again)) => {
                assert_eq!(mapped, again);
                check_message(&mapped);
            }
            (Err(error), Err(again)) => check_error(&error, &again),
            (mapped, again) => panic!("once {mapped:?}, once {again:?}"),
        }
    }
}

fn check_message(mapped: &Mapped) {
    let id = mapped.topic.strip_prefix("projects/").expect("a full name");
    let (_, id) = id.split_once("/topics/").expect("a full name");
    assert!(limits::TOPIC_ID_CHARS.contains(&id.chars().count()), "{id}");
    let message = PubsubMessage::decode(mapped.message.clone()).expect("a PubsubMessage");
    assert_eq!(message.ordering_key, mapped.ordering_key.as_str());
    assert!(message.ordering_key.len() <= limits::ORDERING_KEY_BYTES);
    assert!(message.attributes.len() <= limits::ATTRIBUTES);
    assert!(message.attributes.contains_key("event_id"));
    for (key, value) in &message.attributes {
        assert!(
            !key.is_empty() && key.len() <= limits::ATTRIBUTE_KEY_BYTES,
            "{key:?}"
        );
        assert!(value.len() <= limits::ATTRIBUTE_VALUE_BYTES, "{key:?}");
        assert!(!limits::is_reserved_attribute(key), "{key:?}");
    }
    assert!(mapped.message.len() + mapped.topic.len() + 16 <= limits::REQUEST_BYTES);
}

fn check_error(error: &MapError, again: &MapError) {
    assert_eq!(error.to_string(), again.to_string());
    assert!(
        error.to_string().len() < 4_096,
        "the error is too long for one line"
    );
}
