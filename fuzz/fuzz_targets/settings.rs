//! Fuzzes `inputs/settings.rs`.

#![no_main]

#[path = "../inputs/settings.rs"]
mod settings;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: settings::Input<'_>| settings::check_input(&input));
