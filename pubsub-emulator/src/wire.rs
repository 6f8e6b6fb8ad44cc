//! Messages on the wire. Pub/Sub messages stay encoded from the publisher to the subscriber.
//!
//! Decoding each message into maps and strings would cost more time than everything else that the
//! emulator does. So the request and response types here have the wire format of the types with the
//! same names in `google.pubsub.v1`, but hold each `PubsubMessage` as its encoded bytes. (An
//! embedded message and a `bytes` field look the same on the wire.) [`MessageView`] reads fields
//! from these bytes without copying them. `limits.rs` decides which requests the service refuses.

use bytes::{BufMut, Bytes, BytesMut};
use prost::Message;
use prost_types::Timestamp;

use crate::proto::streaming_pull_response::SubscriptionProperties;

/// `google.protobuf.Empty`, which `prost` maps to the unit type.
pub(crate) type Empty = ();

/// `google.pubsub.v1.PublishRequest` with encoded messages.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct PublishRequest {
    #[prost(string, tag = "1")]
    pub(crate) topic: String,
    #[prost(bytes = "bytes", repeated, tag = "2")]
    pub(crate) messages: Vec<Bytes>,
}

/// `google.pubsub.v1.ReceivedMessage` with an encoded message.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct ReceivedMessage {
    #[prost(string, tag = "1")]
    pub(crate) ack_id: String,
    #[prost(bytes = "bytes", tag = "2")]
    pub(crate) message: Bytes,
}

/// `google.pubsub.v1.PullResponse` with encoded messages.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct PullResponse {
    #[prost(message, repeated, tag = "1")]
    pub(crate) received_messages: Vec<ReceivedMessage>,
}

/// `google.pubsub.v1.StreamingPullResponse` with encoded messages.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct StreamingPullResponse {
    #[prost(message, repeated, tag = "1")]
    pub(crate) received_messages: Vec<ReceivedMessage>,
    #[prost(message, optional, tag = "4")]
    pub(crate) subscription_properties: Option<SubscriptionProperties>,
}

/// `google.iam.v1.TestIamPermissionsRequest`.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct TestIamPermissionsRequest {
    #[prost(string, tag = "1")]
    pub(crate) resource: String,
    #[prost(string, repeated, tag = "2")]
    pub(crate) permissions: Vec<String>,
}

/// `google.iam.v1.TestIamPermissionsResponse`: the requested permissions that the caller has.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct TestIamPermissionsResponse {
    #[prost(string, repeated, tag = "1")]
    pub(crate) permissions: Vec<String>,
}

/// Field numbers of `google.pubsub.v1.PubsubMessage`.
mod field {
    pub(super) const DATA: u64 = 1;
    pub(super) const ATTRIBUTES: u64 = 2;
    pub(super) const MESSAGE_ID: u64 = 3;
    pub(super) const PUBLISH_TIME: u64 = 4;
    pub(super) const ORDERING_KEY: u64 = 5;
    // Field numbers of an entry of the attribute map:
    pub(super) const MAP_KEY: u64 = 1;
    pub(super) const MAP_VALUE: u64 = 2;
}

/// Wire types of the protobuf encoding: <https://protobuf.dev/programming-guides/encoding/>.
mod wire_type {
    pub(super) const VARINT: u64 = 0;
    pub(super) const FIXED64: u64 = 1;
    pub(super) const LEN: u64 = 2;
    pub(super) const FIXED32: u64 = 5;
}

/// The bytes are not a `PubsubMessage`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the bytes are not an encoded google.pubsub.v1.PubsubMessage")]
pub(crate) struct Malformed;

/// A view of an encoded `PubsubMessage` that reads fields without copying them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MessageView<'a> {
    encoded: &'a [u8],
    pub(crate) data: &'a [u8],
    pub(crate) ordering_key: &'a str,
    /// Whether the publisher set fields that only the service may set.
    has_service_fields: bool,
}

impl<'a> MessageView<'a> {
    /// Creates a view. Reads the whole message once, so that later reads cannot fail.
    pub(crate) fn parse(encoded: &'a [u8]) -> Result<Self, Malformed> {
        let mut view = Self {
            encoded,
            data: &[],
            ordering_key: "",
            has_service_fields: false,
        };
        let mut rest = encoded;
        while !rest.is_empty() {
            match next_field(&mut rest)? {
                (field::DATA, Some(data)) => view.data = data,
                (field::ATTRIBUTES, Some(entry)) => {
                    parse_entry(entry)?;
                }
                (field::ORDERING_KEY, Some(key)) => view.ordering_key = text(key)?,
                (field::MESSAGE_ID | field::PUBLISH_TIME, Some(_)) => {
                    view.has_service_fields = true;
                }
                (field::DATA..=field::ORDERING_KEY, None) => return Err(Malformed),
                (_unknown, _) => {}
            }
        }
        Ok(view)
    }

    /// The attributes in the order in which they were sent.
    pub(crate) fn attributes(self) -> impl Iterator<Item = (&'a str, &'a str)> {
        let mut rest = self.encoded;
        std::iter::from_fn(move || {
            loop {
                if rest.is_empty() {
                    return None;
                }
                if let (field::ATTRIBUTES, Some(entry)) = next_field(&mut rest).ok()? {
                    return parse_entry(entry).ok();
                }
            }
        })
    }

    /// The value of an attribute. If the attribute occurs more than once, the last value counts, as
    /// in every protobuf map.
    pub(crate) fn attribute(self, name: &str) -> Option<&'a str> {
        self.attributes()
            .filter(|(key, _)| *key == name)
            .last()
            .map(|(_, value)| value)
    }

    /// The encoded message as subscribers get it, with its id and publish time. The bytes are
    /// copied, so that one unacknowledged message does not keep its whole request in memory.
    pub(crate) fn stored(self, message_id: u64, publish_time: &Timestamp) -> Bytes {
        let service_fields = ServiceFields {
            message_id: message_id.to_string(),
            publish_time: Some(*publish_time),
        };
        let mut stored = BytesMut::with_capacity(self.encoded.len() + service_fields.encoded_len());
        if self.has_service_fields {
            self.put_publisher_fields(&mut stored);
        } else {
            stored.put_slice(self.encoded);
        }
        service_fields.encode_raw(&mut stored);
        stored.freeze()
    }

    fn put_publisher_fields(self, stored: &mut BytesMut) {
        let mut rest = self.encoded;
        while !rest.is_empty() {
            let before = rest;
            let Ok((number, _)) = next_field(&mut rest) else {
                return;
            };
            if !matches!(number, field::MESSAGE_ID | field::PUBLISH_TIME) {
                stored.put_slice(&before[..before.len() - rest.len()]);
            }
        }
    }
}

/// The fields of a `PubsubMessage` that the service sets.
#[derive(Clone, PartialEq, Message)]
struct ServiceFields {
    #[prost(string, tag = "3")]
    message_id: String,
    #[prost(message, optional, tag = "4")]
    publish_time: Option<Timestamp>,
}

/// Takes one field off the front of `rest`. Returns the field's number, and its bytes if it is
/// length-delimited.
fn next_field<'a>(rest: &mut &'a [u8]) -> Result<(u64, Option<&'a [u8]>), Malformed> {
    let key = varint(rest)?;
    let number = key >> 3;
    if number == 0 || number > u64::from(u32::MAX >> 3) {
        return Err(Malformed);
    }
    match key & 7 {
        wire_type::VARINT => varint(rest).map(|_| (number, None)),
        wire_type::FIXED64 => take(rest, 8).map(|_| (number, None)),
        wire_type::FIXED32 => take(rest, 4).map(|_| (number, None)),
        wire_type::LEN => {
            let length = usize::try_from(varint(rest)?).map_err(|_| Malformed)?;
            take(rest, length).map(|bytes| (number, Some(bytes)))
        }
        _group => Err(Malformed),
    }
}

fn varint(rest: &mut &[u8]) -> Result<u64, Malformed> {
    let mut value = 0_u64;
    for (index, byte) in rest.iter().take(10).enumerate() {
        value |= u64::from(byte & 0x7f) << (7 * index);
        if byte & 0x80 == 0 {
            *rest = &rest[index + 1..];
            return Ok(value);
        }
    }
    Err(Malformed)
}

fn take<'a>(rest: &mut &'a [u8], length: usize) -> Result<&'a [u8], Malformed> {
    let (taken, left) = rest.split_at_checked(length).ok_or(Malformed)?;
    *rest = left;
    Ok(taken)
}

fn parse_entry(mut entry: &[u8]) -> Result<(&str, &str), Malformed> {
    let (mut key, mut value) = ("", "");
    while !entry.is_empty() {
        match next_field(&mut entry)? {
            (field::MAP_KEY, Some(bytes)) => key = text(bytes)?,
            (field::MAP_VALUE, Some(bytes)) => value = text(bytes)?,
            (field::MAP_KEY | field::MAP_VALUE, None) => return Err(Malformed),
            (_unknown, _) => {}
        }
    }
    Ok((key, value))
}

fn text(bytes: &[u8]) -> Result<&str, Malformed> {
    std::str::from_utf8(bytes).map_err(|_| Malformed)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::collection::{hash_map, vec};
    use proptest::prelude::*;

    use super::*;
    use crate::proto::PubsubMessage;

    const PUBLISH_TIME: Timestamp = Timestamp {
        seconds: 1_700_000_000,
        nanos: 5,
    };

    fn message() -> impl Strategy<Value = PubsubMessage> {
        (
            vec(any::<u8>(), 0..40),
            hash_map(".{0,8}", ".{0,8}", 0..5),
            ".{0,8}",
            "[0-9]{0,3}",
            proptest::option::of((any::<i64>(), 0..1_000_000_000_i32)),
        )
            .prop_map(
                |(data, attributes, ordering_key, message_id, time)| PubsubMessage {
                    data: data.into(),
                    attributes,
                    ordering_key,
                    message_id,
                    publish_time: time.map(|(seconds, nanos)| Timestamp { seconds, nanos }),
                },
            )
    }

    proptest! {
        #[test]
        fn a_view_reads_messages_that_prost_wrote(message in message()) {
            let encoded = message.encode_to_vec();
            let view = MessageView::parse(&encoded).expect("valid");
            prop_assert_eq!(view.data, &message.data[..]);
            prop_assert_eq!(view.ordering_key, &message.ordering_key);
            let attributes: HashMap<String, String> =
                view.attributes().map(|(k, v)| (k.to_owned(), v.to_owned())).collect();
            prop_assert_eq!(&attributes, &message.attributes);
            for (key, value) in &message.attributes {
                prop_assert_eq!(view.attribute(key), Some(value.as_str()));
            }
        }

        #[test]
        fn a_stored_message_differs_only_in_the_fields_of_the_service(message in message()) {
            let encoded = message.encode_to_vec();
            let stored = MessageView::parse(&encoded).expect("valid").stored(42, &PUBLISH_TIME);
            let expected = PubsubMessage {
                message_id: "42".to_owned(),
                publish_time: Some(PUBLISH_TIME),
                ..message
            };
            prop_assert_eq!(PubsubMessage::decode(stored).expect("valid"), expected);
        }

        #[test]
        fn any_bytes_are_read_or_refused_without_a_panic(bytes in vec(any::<u8>(), 0..200)) {
            if let Ok(view) = MessageView::parse(&bytes) {
                view.attributes().count();
                view.stored(1, &PUBLISH_TIME);
            }
        }

        #[test]
        fn a_truncated_message_never_reads_past_its_end(message in message(), cut in 0.0..1.0_f64) {
            let encoded = message.encode_to_vec();
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
            let end = (encoded.len() as f64 * cut) as usize;
            if let Ok(view) = MessageView::parse(&encoded[..end]) {
                prop_assert!(message.data.starts_with(view.data));
            }
        }
    }

    #[test]
    fn a_request_is_read_without_decoding_its_messages() {
        let message = PubsubMessage {
            data: Bytes::from_static(b"x"),
            ..Default::default()
        };
        let request = crate::proto::PublishRequest {
            topic: "projects/p/topics/abc".to_owned(),
            messages: vec![message.clone(), message.clone()],
        };
        let read = PublishRequest::decode(&request.encode_to_vec()[..]).expect("valid");
        assert_eq!(read.topic, request.topic);
        assert_eq!(read.messages, vec![message.encode_to_vec(); 2]);
        assert_eq!(read.encoded_len(), request.encoded_len());
    }
}
