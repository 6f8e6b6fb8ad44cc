//! Checks each input of the corpora in `decoder/fuzz/corpus/` as its fuzz target does. So a fault that fuzzing has
//! found cannot return unnoticed. Also, an ordinary build does not compile the fuzz targets, but these tests do compile
//! the checks in `decoder/fuzz/inputs/`.

#[path = "../../fuzz/inputs/frame.rs"]
mod frame;
#[path = "../../fuzz/inputs/message.rs"]
mod message;
#[path = "../../fuzz/inputs/relation_cache.rs"]
mod relation_cache;

use std::fs;

/// Calls `check` with each file of the corpus. Panics if the corpus has fewer than `least` files.
fn each_input(corpus: &str, least: usize, check: fn(&[u8])) {
    let folder = format!("{}/fuzz/corpus/{corpus}", env!("CARGO_MANIFEST_DIR"));
    let mut inputs = 0;
    for file in fs::read_dir(folder).unwrap() {
        check(&fs::read(file.unwrap().path()).unwrap());
        inputs += 1;
    }
    assert!(inputs >= least, "only {inputs} inputs");
}

#[test]
fn every_message_of_the_corpus_is_decoded_or_refused() {
    each_input("message", 300, message::check_input);
}

#[test]
fn every_frame_of_the_corpus_is_decoded_or_refused() {
    each_input("frame", 10, frame::check_input);
}

#[test]
fn the_cache_agrees_with_a_map_for_every_sequence_of_the_corpus() {
    each_input("relation_cache", 500, relation_cache::check_input);
}
