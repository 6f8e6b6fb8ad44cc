//! The snippets of docs/how-to/write-events.md.

use std::path::{Path, PathBuf};

pub(crate) fn examples() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/producers")
}

fn page() -> &'static str {
    include_str!("../../docs/how-to/write-events.md")
}

/// The fenced block that follows the link to this file in examples/producers/.
pub(crate) fn snippet(file: &str) -> String {
    let link = format!("](../../examples/producers/{file})");
    let (_, after) = page()
        .split_once(&link)
        .expect("the page links to the file");
    let block = after.split("\n```").nth(1).expect("a block after the link");
    let (_language, snippet) = block.split_once('\n').expect("a block has lines");
    snippet.to_owned()
}

/// The fenced block that contains this text.
pub(crate) fn block_with(text: &str) -> String {
    let mut blocks = page().split("\n```").skip(1).step_by(2);
    let block = blocks.find(|block| block.contains(text));
    let (_language, block) = block
        .and_then(|block| block.split_once('\n'))
        .expect("a block");
    block.to_owned()
}

pub(crate) fn assert_part_of_its_program(file: &str) {
    let program = std::fs::read_to_string(examples().join(file)).expect("the program");
    let snippet = snippet(file);
    assert!(
        snippet.lines().count() > 5 && program.contains(&snippet),
        "write-events.md shows code that is not in examples/producers/{file}:\n{snippet}"
    );
}
