//! Writes a `google.pubsub.v1.PubsubMessage` in protobuf's wire format, in one allocation of the
//! exact size.
//!
//! The publisher places these bytes verbatim in its request, so a message is encoded once, however
//! often it is sent. Not here: what the fields hold, and the limits on them.

use bytes::Bytes;
use prost::encoding::encoded_len_varint;

use super::limits;
use super::payload::Bytea;

/// Key of field 1, `data`, length-delimited.
const DATA: u8 = 1 << 3 | 2;
/// Key of field 2, an entry of the map `attributes`.
const ATTRIBUTE: u8 = 2 << 3 | 2;
/// Key of field 5, `ordering_key`.
const ORDERING_KEY: u8 = 5 << 3 | 2;
/// Keys of the two fields of a map entry.
const ENTRY_KEY: u8 = 1 << 3 | 2;
const ENTRY_VALUE: u8 = 2 << 3 | 2;

/// The message's data, not yet copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Body<'a> {
    /// As it is.
    Plain(&'a [u8]),
    /// To be decoded from hexadecimal digits while it is copied.
    Bytea(Bytea<'a>),
}

impl Body<'_> {
    /// Bytes when written.
    pub(super) fn len(&self) -> usize {
        match self {
            Body::Plain(bytes) => bytes.len(),
            Body::Bytea(bytea) => bytea.len(),
        }
    }

    /// Appends the bytes.
    pub(super) fn write(&self, out: &mut Vec<u8>) {
        match self {
            Body::Plain(bytes) => out.extend_from_slice(bytes),
            Body::Bytea(bytea) => bytea.write(out),
        }
    }
}

/// The encoded message. `attributes` are entries as [`put_attribute`] writes them. An empty
/// ordering key is left out: the message is unordered.
pub(super) fn message(body: Body<'_>, attributes: &[u8], ordering_key: &str) -> Bytes {
    let size = message_size(body.len(), attributes.len(), ordering_key.len());
    let mut out = Vec::with_capacity(size);
    if body.len() > 0 {
        out.push(DATA);
        put_length(&mut out, body.len());
        body.write(&mut out);
    }
    out.extend_from_slice(attributes);
    if !ordering_key.is_empty() {
        put_bytes(&mut out, ORDERING_KEY, ordering_key.as_bytes());
    }
    debug_assert_eq!(out.len(), size, "the size is exact");
    Bytes::from(out)
}

/// Bytes of the encoded message with parts of these sizes.
pub(super) fn message_size(body: usize, attributes: usize, ordering_key: usize) -> usize {
    let field = |len: usize| if len == 0 { 0 } else { field_size(len) };
    field(body) + attributes + field(ordering_key)
}

/// Bytes of the encoded `PublishRequest` that carries one message of `message` bytes and nothing
/// else, to a topic with a name of `topic` bytes. Each further message adds its own
/// [`field_size`].
pub(super) fn request_size(topic: usize, message: usize) -> usize {
    field_size(topic) + field_size(message)
}

/// Whether a message of this size still fits into a request of its own.
pub(super) fn fits_a_request(topic: usize, message: usize) -> bool {
    request_size(topic, message) <= limits::REQUEST_BYTES
}

/// Bytes of a length-delimited field with a number up to 15: its key, its length and itself.
pub(super) fn field_size(len: usize) -> usize {
    1 + encoded_len_varint(len as u64) + len
}

/// Appends one entry of the map `attributes`; gives back where the key and the value begin.
pub(super) fn put_attribute(out: &mut Vec<u8>, key: &[u8], value: &[u8]) -> (usize, usize) {
    let entry_size = field_size(key.len()) + field_size(value.len());
    out.reserve(field_size(entry_size));
    out.push(ATTRIBUTE);
    put_length(out, entry_size);
    let key_start = put_bytes(out, ENTRY_KEY, key);
    let value_start = put_bytes(out, ENTRY_VALUE, value);
    (key_start, value_start)
}

/// Appends a length-delimited field; gives back where its content begins.
fn put_bytes(out: &mut Vec<u8>, field_key: u8, content: &[u8]) -> usize {
    out.push(field_key);
    put_length(out, content.len());
    let start = out.len();
    out.extend_from_slice(content);
    start
}

/// Appends a length as a varint: seven bits a byte, the lowest first, the top bit set on all but
/// the last. Nearly all lengths here are below 128, which prost's own writer does not favour.
#[inline]
pub(super) fn put_length(out: &mut Vec<u8>, mut length: usize) {
    while length >= 0x80 {
        out.push(length as u8 | 0x80);
        length >>= 7;
    }
    out.push(length as u8);
}

#[cfg(test)]
mod tests {
    use super::*;
    use googleapis_tonic_google_pubsub_v1::google::pubsub::v1::{PublishRequest, PubsubMessage};
    use proptest::prelude::*;
    use prost::Message;
    use std::collections::HashMap;

    fn encode(data: &[u8], attributes: &HashMap<String, String>, ordering_key: &str) -> Bytes {
        let mut entries = Vec::new();
        for (key, value) in attributes {
            put_attribute(&mut entries, key.as_bytes(), value.as_bytes());
        }
        message(Body::Plain(data), &entries, ordering_key)
    }

    proptest! {
        #[test]
        fn googles_own_types_read_back_what_was_written(
            data in proptest::collection::vec(any::<u8>(), 0..400),
            attributes in proptest::collection::hash_map(".{0,40}", ".{0,300}", 0..12),
            ordering_key in ".{0,150}",
        ) {
            let encoded = encode(&data, &attributes, &ordering_key);
            let read = PubsubMessage::decode(encoded).unwrap();
            let expected = PubsubMessage {
                data: data.into(), attributes, ordering_key, ..PubsubMessage::default()
            };
            prop_assert_eq!(read, expected);
        }

        #[test]
        fn the_size_of_a_request_is_what_googles_own_types_need(
            topic in "projects/p/topics/[a-z]{3,200}",
            len in 0_usize..40_000,
        ) {
            let data = vec![7; len];
            let encoded = encode(&data, &HashMap::new(), "key");
            let request = PublishRequest {
                topic: topic.clone(),
                messages: vec![PubsubMessage {
                    data: data.into(), ordering_key: "key".into(), ..PubsubMessage::default()
                }],
            };
            prop_assert_eq!(request_size(topic.len(), encoded.len()), request.encoded_len());
        }
    }
}
