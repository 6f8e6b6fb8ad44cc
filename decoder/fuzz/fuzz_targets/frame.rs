//! Decodes any bytes as a frame. Checks that decoding does not panic, that the offset of an error
//! lies within the input, and that an accepted frame encodes back to the same bytes. The target
//! `message` covers the payload of WAL data.

#![no_main]

#[path = "../../tests/wire/encoder.rs"]
#[allow(dead_code, reason = "messages are encoded by another target")]
mod encoder;

use decoder::frame::decode_frame;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|body: &[u8]| {
    match decode_frame(body) {
        Ok(frame) => assert_eq!(encoder::encode_frame(&frame), body),
        Err(error) => assert!(error.offset <= body.len(), "{error}"),
    }
});
