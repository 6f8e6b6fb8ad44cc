//! Decodes arbitrary bytes as a message. Checks that decoding does not panic, that the offset in an
//! error lies within the input, and that an accepted message encodes back to the same bytes. The
//! initial corpus consists of messages that were captured from servers.

use crate::encoder::OwnedMessage;

/// Panics if one of these checks fails.
pub(crate) fn check_input(payload: &[u8]) {
    match decoder::decode(payload) {
        Ok(message) => {
            let owned = OwnedMessage::from(message);
            // On the wire, an empty string and `pg_catalog` name the same schema. The encoder always writes the
            // empty string, so its bytes can differ from the payload.
            let names_pg_catalog = match &owned {
                OwnedMessage::Relation(relation) => relation.namespace == "pg_catalog",
                OwnedMessage::Type { namespace, .. } => namespace == "pg_catalog",
                _ => false,
            };
            assert!(names_pg_catalog || owned.encode() == payload);
        }
        Err(error) => assert!(error.offset <= payload.len(), "{error}"),
    }
}
