//! Fuzzes `inputs/frame.rs`.

#![no_main]

#[path = "../../tests/wire/encoder.rs"]
#[allow(dead_code, reason = "each target encodes either messages or frames")]
mod encoder;
#[path = "../inputs/frame.rs"]
mod frame;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| frame::check_input(input));
