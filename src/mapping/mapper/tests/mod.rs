//! Maps whole rows, and reads the messages back with Google's message type.

mod column_types;
mod envelopes;
mod faults;
mod identity;
mod messages;
mod random;
mod times;
mod topics;

use crate::event::{CommittedAt, EventPosition};
use std::collections::HashMap;

use decoder::{Lsn, Message as WalMessage, Oid, OwnedColumn, PgTimestamp, ReplicaIdentity};
use googleapis_tonic_google_pubsub_v1::google::pubsub::v1::PubsubMessage;
use outbox_event::ProtobufEvent;
use proptest::prelude::*;
use prost::Message;

use super::*;

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
const AT: CommittedAt = CommittedAt {
    position: EventPosition {
        commit: replication::CommitLsn::new(Lsn::new(0x1_0000_00A0)),
        ordinal: 3,
    },
    time: PgTimestamp::from_micros(1_500_000),
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
    resolve(columns, toml).unwrap()
}

fn resolve(columns: &[(&str, Oid)], toml: &str) -> Result<Mapper, MapError> {
    let (types, identity) = (ColumnTypes::default(), TableIdentity::new("outbox.events"));
    Mapper::resolve(&relation(columns), &types, &settings(toml), &identity, "p")
}

/// A row of `outbox.events` with the usual values, except for those in `other`.
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
