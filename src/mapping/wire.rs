//! Encodes a `google.pubsub.v1.PubsubMessage` in protobuf's wire format, in one allocation of the
//! exact size.
//!
//! The publisher copies these bytes unchanged into its request, so a message is encoded only once even if
//! it is sent several times. Not here: what the fields contain, and their limits.

use bytes::Bytes;
use prost::encoding::encoded_len_varint;

use super::data::MessageData;
use super::limits;

/// Key of field 1, `data`, length-delimited.
const DATA: u8 = 1 << 3 | 2;
/// Key of field 2, an entry of the map `attributes`.
const ATTRIBUTE: u8 = 2 << 3 | 2;
/// Key of field 5, `ordering_key`.
const ORDERING_KEY: u8 = 5 << 3 | 2;
/// Key of field 1 of a map entry, which is the attribute's name.
const ENTRY_KEY: u8 = 1 << 3 | 2;
/// Key of field 2 of a map entry, which is the attribute's value.
const ENTRY_VALUE: u8 = 2 << 3 | 2;

/// Maximum length of an attribute's name for [`put_fixed_attribute_key`], in bytes.
pub(super) const FIXED_KEY_BYTES: usize = 16;

/// Encodes the message. `attributes` has entries as [`put_attribute_key`] writes them. An empty ordering
/// key is left out, which makes the message unordered.
pub(super) fn message(body: MessageData<'_>, attributes: &[u8], ordering_key: &str) -> Bytes {
    let size = message_size(body.len(), attributes.len(), ordering_key.len());
    let mut out = Vec::with_capacity(size);
    if body.len() > 0 {
        out.push(DATA);
        put_length(&mut out, body.len());
        body.write(&mut out);
    }
    out.extend_from_slice(attributes);
    if !ordering_key.is_empty() {
        out.push(ORDERING_KEY);
        put_length(&mut out, ordering_key.len());
        out.extend_from_slice(ordering_key.as_bytes());
    }
    debug_assert_eq!(out.len(), size, "the size is exact");
    Bytes::from(out)
}

/// Size in bytes of an encoded message whose parts have these sizes.
pub(super) fn message_size(body: usize, attributes: usize, ordering_key: usize) -> usize {
    let field = |len: usize| if len == 0 { 0 } else { field_size(len) };
    field(body) + attributes + field(ordering_key)
}

/// Size in bytes of an encoded `PublishRequest` with a single message of `message` bytes, to a topic
/// whose name has `topic` bytes.
pub(super) fn request_size(topic: usize, message: usize) -> usize {
    field_size(topic) + field_size(message)
}

/// Whether a message of this size fits into a request by itself.
pub(super) fn fits_a_request(topic: usize, message: usize) -> bool {
    request_size(topic, message) <= limits::REQUEST_BYTES
}

/// Size in bytes of a length-delimited field (key, length and content) whose field number is at most 15.
pub(super) fn field_size(len: usize) -> usize {
    1 + encoded_len_varint(len as u64) + len
}

/// Appends an entry of the map `attributes`, except for its value. The caller then appends the value,
/// which must have `value_len` bytes. Returns the index in `out` at which the key begins.
#[inline]
pub(super) fn put_attribute_key(out: &mut Vec<u8>, key: &[u8], value_len: usize) -> usize {
    let short = key.len() + value_len + 4;
    if short >= 0x80 {
        return put_long_attribute_key(out, key, value_len);
    }
    // The usual case: the entry is so short that each of its lengths fits into one byte.
    out.extend_from_slice(&[ATTRIBUTE, short as u8, ENTRY_KEY, key.len() as u8]);
    let key_start = out.len();
    out.extend_from_slice(key);
    out.extend_from_slice(&[ENTRY_VALUE, value_len as u8]);
    key_start
}

/// Does the same as [`put_attribute_key`], but faster. The name must be known at compile time, and have at most
/// [`FIXED_KEY_BYTES`]. A single write appends everything before the value, and the compiler knows its length.
#[inline(always)]
pub(super) fn put_fixed_attribute_key(out: &mut Vec<u8>, key: &str, value_len: usize) {
    let short = key.len() + value_len + 4;
    if short >= 0x80 {
        put_long_attribute_key(out, key.as_bytes(), value_len);
        return;
    }
    let mut head = [0; 6 + FIXED_KEY_BYTES];
    head[..4].copy_from_slice(&[ATTRIBUTE, short as u8, ENTRY_KEY, key.len() as u8]);
    head[4..4 + key.len()].copy_from_slice(key.as_bytes());
    head[4 + key.len()..6 + key.len()].copy_from_slice(&[ENTRY_VALUE, value_len as u8]);
    out.extend_from_slice(&head[..6 + key.len()]);
}

#[cold]
fn put_long_attribute_key(out: &mut Vec<u8>, key: &[u8], value_len: usize) -> usize {
    out.push(ATTRIBUTE);
    put_length(out, field_size(key.len()) + field_size(value_len));
    out.push(ENTRY_KEY);
    put_length(out, key.len());
    let key_start = out.len();
    out.extend_from_slice(key);
    out.push(ENTRY_VALUE);
    put_length(out, value_len);
    key_start
}

/// Appends a length as a varint: seven bits per byte, lowest first, with the top bit set on all bytes but the last.
/// Faster than prost's own writer for lengths below 128, which nearly all lengths here are.
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
            put_attribute_key(&mut entries, key.as_bytes(), value.len());
            entries.extend_from_slice(value.as_bytes());
        }
        message(MessageData::Plain(data), &entries, ordering_key)
    }

    proptest! {
        #[test]
        fn googles_types_read_back_the_message_that_was_written(
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
        fn a_fixed_attribute_key_is_encoded_like_any_other(key in "[a-z_]{0,16}", value_len in 0_usize..1_100) {
            let (mut fixed, mut any) = (Vec::new(), Vec::new());
            put_fixed_attribute_key(&mut fixed, &key, value_len);
            put_attribute_key(&mut any, key.as_bytes(), value_len);
            prop_assert_eq!(fixed, any);
        }

        #[test]
        fn the_size_of_a_request_matches_googles_types(
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
