//! Tests invalid input: random bytes, and messages that are truncated, changed, or followed by more
//! bytes.
//!
//! No input may cause a panic, and the offset in an error must be within the input. Encoding an
//! accepted message must give the same bytes again, unless the message names the schema
//! `pg_catalog`, which has two forms on the wire.

use decoder::decode;
use decoder::frame::decode_frame;
use proptest::collection::vec;
use proptest::prelude::*;

use crate::encoder::{OwnedMessage, encode_frame};
use crate::fixture::every_scenario;
use crate::made_up;

/// Decodes `payload` and everything in it. Checks that an accepted message encodes to the same bytes, and
/// that an error has a hint and an offset within `payload`.
fn decode_anything(payload: &[u8]) {
    match decode(payload) {
        Ok(message) => {
            let owned = OwnedMessage::from(message);
            if !names_pg_catalog(&owned) {
                assert_eq!(owned.encode(), payload);
            }
        }
        Err(error) => {
            assert!(error.offset <= payload.len(), "{error}");
            assert!(!error.hint().is_empty());
        }
    }
}

/// Whether the message names the schema `pg_catalog`, which has two forms on the wire: its name and the
/// empty string. The encoder writes only the empty string, so the bytes can differ.
fn names_pg_catalog(message: &OwnedMessage) -> bool {
    match message {
        OwnedMessage::Relation(relation) => relation.namespace == "pg_catalog",
        OwnedMessage::Type { namespace, .. } => namespace == "pg_catalog",
        OwnedMessage::Begin(_)
        | OwnedMessage::Commit(_)
        | OwnedMessage::Origin { .. }
        | OwnedMessage::Insert { .. }
        | OwnedMessage::Update { .. }
        | OwnedMessage::Delete { .. }
        | OwnedMessage::Truncate { .. }
        | OwnedMessage::Logical { .. } => false,
    }
}

fn decode_any_frame(body: &[u8]) {
    match decode_frame(body) {
        Ok(frame) => assert_eq!(encode_frame(&frame), body),
        Err(error) => assert!(error.offset <= body.len(), "{error}"),
    }
}

/// Generates a tag of protocol 1, so that decoding random bytes gets past the first byte.
fn tag() -> impl Strategy<Value = u8> {
    proptest::sample::select(b"BCORYIUDTM".to_vec())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn random_bytes_never_cause_a_panic(bytes in vec(any::<u8>(), 0..200)) {
        decode_anything(&bytes);
        decode_any_frame(&bytes);
    }

    #[test]
    fn random_bytes_after_a_tag_never_cause_a_panic(tag in tag(), bytes in vec(any::<u8>(), 0..200)) {
        decode_anything(&[&[tag], &bytes[..]].concat());
    }

    #[test]
    fn random_small_bytes_after_a_tag_never_cause_a_panic(
        tag in tag(), bytes in vec(prop_oneof![0..4_u8, proptest::sample::select(b"NKOtnub".to_vec())], 0..60),
    ) {
        decode_anything(&[&[tag], &bytes[..]].concat());
    }

    #[test]
    fn a_message_truncated_anywhere_is_refused(message in made_up::message()) {
        let payload = message.encode();
        for end in 0..payload.len() {
            let refused = decode(&payload[..end]).expect_err("half a message");
            prop_assert!(refused.offset <= end);
        }
    }

    #[test]
    fn a_message_with_trailing_bytes_is_refused(
        message in made_up::message(), more in vec(any::<u8>(), 1..20),
    ) {
        let payload = message.encode();
        let refused = decode(&[&payload[..], &more].concat()).expect_err("more than a message");
        prop_assert_eq!(refused.offset, payload.len());
        prop_assert_eq!(refused.fault, decoder::Fault::TrailingBytes { count: more.len() });
    }

    #[test]
    fn a_message_with_one_byte_changed_never_causes_a_panic(
        message in made_up::message(), place: prop::sample::Index, byte: u8,
    ) {
        let mut payload = message.encode();
        let place = place.index(payload.len());
        payload[place] = byte;
        decode_anything(&payload);
    }
}

#[test]
fn changing_any_byte_of_a_captured_message_never_causes_a_panic() {
    for (_, _, messages) in every_scenario() {
        for message in messages
            .iter()
            .filter(|message| message.payload.len() < 200)
        {
            let mut payload = message.payload.clone();
            for place in 0..payload.len() {
                for byte in 0..=u8::MAX {
                    payload[place] = byte;
                    decode_anything(&payload);
                }
                payload[place] = message.payload[place];
            }
        }
    }
}

#[test]
fn a_truncated_captured_message_is_never_accepted() {
    for (major, name, messages) in every_scenario() {
        for message in messages {
            for end in 0..message.payload.len() {
                assert!(
                    decode(&message.payload[..end]).is_err(),
                    "{name} of pg{major}, {end}"
                );
            }
        }
    }
}
