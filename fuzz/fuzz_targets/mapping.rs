//! Fuzzes `inputs/mapping.rs`.

#![no_main]

#[path = "../inputs/mapping.rs"]
mod mapping;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: mapping::Input<'_>| mapping::check_input(&input));
