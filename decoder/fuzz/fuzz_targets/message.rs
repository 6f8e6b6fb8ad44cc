//! Fuzzes `inputs/message.rs`.

#![no_main]

#[path = "../../tests/wire/encoder.rs"]
#[allow(dead_code, reason = "each target encodes either messages or frames")]
mod encoder;
#[path = "../inputs/message.rs"]
mod message;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| message::check_input(input));
