//! Decodes any bytes as a message. Checks that decoding does not panic, that the offset of an error
//! lies within the input, and that an accepted message encodes back to the same bytes. The initial
//! corpus consists of messages captured from servers.

#![no_main]

#[path = "../../tests/wire/encoder.rs"]
#[allow(dead_code, reason = "frames are encoded by another target")]
mod encoder;

use encoder::OwnedMessage;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|payload: &[u8]| {
    match decoder::decode(payload) {
        Ok(message) => {
            let owned = OwnedMessage::from(message);
            // The schema `pg_catalog` has two forms on the wire: its name and the empty string.
            let names_pg_catalog = match &owned {
                OwnedMessage::Relation(relation) => relation.namespace == "pg_catalog",
                OwnedMessage::Type { namespace, .. } => namespace == "pg_catalog",
                _ => false,
            };
            assert!(names_pg_catalog || owned.encode() == payload);
        }
        Err(error) => assert!(error.offset <= payload.len(), "{error}"),
    }
});
