//! Runs each input of the corpora in fuzz/corpus/ through its fuzz target. This checks that the targets
//! compile with the current code, and that faults found by fuzzing stay fixed.

#[path = "../fuzz/inputs/mapping.rs"]
mod mapping;
#[path = "../fuzz/inputs/settings.rs"]
mod settings;

use std::fs;

use arbitrary::{Arbitrary, Unstructured};

/// Calls `check` with each file of the corpus.
fn each_input(corpus: &str, mut check: impl FnMut(Unstructured<'_>)) {
    let folder = format!("{}/fuzz/corpus/{corpus}", env!("CARGO_MANIFEST_DIR"));
    let mut inputs = 0;
    for file in fs::read_dir(folder).expect("the corpus is there") {
        let bytes = fs::read(file.expect("an entry").path()).expect("a readable input");
        check(Unstructured::new(&bytes));
        inputs += 1;
    }
    assert!(inputs > 1_000, "only {inputs} inputs");
}

#[test]
fn every_input_of_the_corpus_is_mapped_without_a_fault() {
    let mut mapped = 0;
    each_input("mapping", |bytes| {
        if let Ok(input) = mapping::Input::arbitrary_take_rest(bytes) {
            mapping::check_input(&input);
            mapped += 1;
        }
    });
    assert!(mapped > 1_000, "only {mapped} inputs describe a table");
}

#[test]
fn every_input_of_the_corpus_is_read_as_settings_without_a_fault() {
    let mut read = 0;
    each_input("settings", |bytes| {
        if let Ok(input) = settings::Input::arbitrary_take_rest(bytes) {
            settings::check_input(&input);
            read += 1;
        }
    });
    assert!(read > 1_000, "only {read} inputs describe settings");
}
