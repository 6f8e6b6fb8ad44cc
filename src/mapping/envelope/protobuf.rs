//! Writes the data of the envelope `protobuf`.
//!
//! Not here: the definition of [`ProtobufEvent`], which consumers share.

use std::collections::BTreeMap;

use bytes::Bytes;
use decoder::PgTimestamp;
use outbox_event::{ProtobufEvent, Timestamp};
use prost::Message;
use prost::encoding::{WireType, encode_key};

use super::{EventContext, MessageData};
use crate::mapping::wire;

/// Replaces `out` with the encoded event.
pub(super) fn write_event(event: &EventContext<'_>, out: &mut Vec<u8>) {
    let row = event.row;
    let mut headers = BTreeMap::new();
    for (name, value) in event.headers.iter() {
        headers
            .entry(name.to_owned())
            .or_insert_with(|| value.to_owned());
    }
    let without_payload = ProtobufEvent {
        id: event.event_id.to_owned(),
        source: event.source.to_owned(),
        r#type: event.event_type.to_owned(),
        aggregate_type: row.aggregate_type.unwrap_or_default().to_owned(),
        aggregate_id: row.aggregate_id.unwrap_or_default().to_owned(),
        version: row.version.map(str::to_owned),
        schema_version: row.schema_version.map(str::to_owned),
        occurred_at: event.occurred_at.map(|(time, _)| timestamp(time.instant())),
        committed_at: Some(timestamp(event.at.time)),
        commit_lsn: event.at.position.commit.lsn().as_u64(),
        ordinal: event.at.position.ordinal,
        headers,
        content_type: event.content_type().to_owned(),
        source_id: event.source_id.map(str::to_owned),
        payload: Bytes::new(),
    };
    // Append the payload after the other fields. As a field of the struct it would be copied twice.
    let payload = row.payload.unwrap_or(MessageData::Plain(b""));
    out.clear();
    out.reserve(without_payload.encoded_len() + 16 + payload.len());
    without_payload.encode_raw(out);
    if payload.len() > 0 {
        encode_key(ProtobufEvent::PAYLOAD_TAG, WireType::LengthDelimited, out);
        wire::put_length(out, payload.len());
        payload.write(out);
    }
}

fn timestamp(time: PgTimestamp) -> Timestamp {
    let micros = time.as_unix_micros();
    let nanos = micros.rem_euclid(1_000_000) * 1_000;
    Timestamp {
        seconds: micros.div_euclid(1_000_000),
        nanos: nanos as i32,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_before_1970_have_positive_nanos() {
        let before = timestamp(PgTimestamp::from_unix_micros(-1));
        assert_eq!((before.seconds, before.nanos), (-1, 999_999_000));
    }
}
