//! Decodes any bytes as a frame: no panic, an error offset within the input, and an accepted frame
//! encodes back to the same bytes. The payload of WAL data is covered by the target `message`.

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
