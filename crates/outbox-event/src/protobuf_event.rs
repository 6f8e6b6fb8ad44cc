//! The message `postrider.v1.Event`, as `docs/reference/event.proto` defines it for consumers.
//!
//! The derive replaces generated code, so building this crate needs no protoc. A test compares the
//! derive with the `.proto` file field by field.

use std::collections::BTreeMap;

use bytes::Bytes;
use prost::Message;

/// A point in time, in Protobuf's own type.
pub use prost_types::Timestamp;

/// One outbox event, with everything that is known about it.
#[derive(Clone, PartialEq, Message)]
pub struct ProtobufEvent {
    /// The attribute `event_id`: the event's uuid.
    #[prost(string, tag = "1")]
    pub id: String,
    /// The origin of the event: the setting `source`, by default `/schema.table`.
    #[prost(string, tag = "2")]
    pub source: String,
    /// The type of the event.
    #[prost(string, tag = "3")]
    pub r#type: String,
    /// The kind of aggregate.
    #[prost(string, tag = "4")]
    pub aggregate_type: String,
    /// The id of the aggregate.
    #[prost(string, tag = "5")]
    pub aggregate_id: String,
    /// The version of the aggregate, as text because the column may have any type.
    #[prost(string, optional, tag = "6")]
    pub version: Option<String>,
    /// The version of the payload's schema, as text.
    #[prost(string, optional, tag = "7")]
    pub schema_version: Option<String>,
    /// When the event happened; absent if the column does not contain a point in time.
    #[prost(message, optional, tag = "8")]
    pub occurred_at: Option<Timestamp>,
    /// When the event's transaction was committed.
    #[prost(message, optional, tag = "9")]
    pub committed_at: Option<Timestamp>,
    /// Position of the commit in the WAL, in bytes.
    #[prost(uint64, tag = "10")]
    pub commit_lsn: u64,
    /// Number of the insert within its transaction, starting at 1.
    #[prost(uint32, tag = "11")]
    pub ordinal: u32,
    /// The headers.
    #[prost(btree_map = "string, string", tag = "12")]
    pub headers: BTreeMap<String, String>,
    /// The media type of the payload.
    #[prost(string, tag = "13")]
    pub content_type: String,
    /// The id as the table has it, if that id is not a uuid.
    #[prost(string, optional, tag = "14")]
    pub source_id: Option<String>,
    /// The payload, byte for byte.
    #[prost(bytes = "bytes", tag = "15")]
    pub payload: Bytes,
}

impl ProtobufEvent {
    /// Number of the field `payload`. It is the last field, so a writer can encode all other fields
    /// first and then copy the payload directly behind them.
    pub const PAYLOAD_TAG: u32 = 15;
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads the fields of the message from the `.proto` file: (name, number).
    fn published_fields() -> Vec<(&'static str, u32)> {
        let proto = include_str!(concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../../docs/reference/event.proto"
        ));
        let field = |line: &'static str| {
            let (declaration, number) = line.trim().strip_suffix(';')?.split_once(" = ")?;
            Some((declaration.split_whitespace().last()?, number.parse().ok()?))
        };
        proto.lines().filter_map(field).collect()
    }

    #[test]
    fn the_proto_file_and_the_derive_have_the_same_fields() {
        let source = include_str!("protobuf_event.rs");
        let body = source
            .split_once("pub struct ProtobufEvent {")
            .unwrap()
            .1
            .split_once("\n}")
            .unwrap()
            .0;
        let mut derived = Vec::new();
        let mut number = None;
        for line in body.lines().map(str::trim) {
            if let Some((_, tag)) = line.split_once("tag = \"") {
                number = tag.split_once('"').unwrap().0.parse().ok();
            } else if let Some(field) = line.strip_prefix("pub ") {
                let name = field.split_once(':').unwrap().0;
                derived.push((name.trim_start_matches("r#"), number.take().unwrap()));
            }
        }
        assert_eq!(derived, published_fields());
        assert_eq!(
            derived.last(),
            Some(&("payload", ProtobufEvent::PAYLOAD_TAG))
        );
    }
}
