//! Decodes arbitrary bytes as a frame. Checks that decoding does not panic, that the offset in an
//! error lies within the input, and that an accepted frame encodes back to the same bytes. Does not
//! decode the payload of WAL data, because the fuzz target `message` tests that.

use decoder::frame::decode_frame;

/// Panics if one of these checks fails.
pub(crate) fn check_input(body: &[u8]) {
    match decode_frame(body) {
        Ok(frame) => assert_eq!(crate::encoder::encode_frame(&frame), body),
        Err(error) => assert!(error.offset <= body.len(), "{error}"),
    }
}
