//! Fuzzes `inputs/relation_cache.rs`.

#![no_main]

#[path = "../inputs/relation_cache.rs"]
mod relation_cache;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| relation_cache::check_input(input));
