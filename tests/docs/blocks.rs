//! Finds the code blocks on a page: fenced blocks, and blocks that are indented by four spaces or more.

use std::path::{Path, PathBuf};

/// Words with which a shell script may begin. They identify shell scripts in indented blocks and in
/// fences without a language.
const SHELL_WORDS: [&str; 13] = [
    "alias",
    "cargo",
    "cd",
    "curl",
    "docker",
    "export",
    "gcloud",
    "make",
    "pg_dump",
    "postrider",
    "psql",
    "pubsub-emulator",
    "sudo",
];

/// A block of code without its indentation.
pub(crate) struct Block {
    pub(crate) page: PathBuf,
    /// The number of the block's first line, from 1.
    pub(crate) line: usize,
    /// The language that the fence names. If there is none: `sh` if the block begins with a shell command,
    /// otherwise empty.
    pub(crate) language: String,
    pub(crate) text: String,
}

fn is_shell(text: &str) -> bool {
    let first = text.split_whitespace().next().unwrap_or_default();
    let is_assignment = first.split_once('=').is_some_and(|(name, _)| {
        !name.is_empty() && name.chars().all(|c| c.is_ascii_uppercase() || c == '_')
    });
    is_assignment || SHELL_WORDS.contains(&first)
}

fn indent(line: &str) -> usize {
    line.len() - line.trim_start().len()
}

/// Removes the indentation of the first line from all lines.
fn dedented(lines: &[&str]) -> String {
    let width = lines.first().map_or(0, |line| indent(line));
    let cut = |line: &&str| format!("{}\n", &line[width.min(indent(line))..]);
    lines.iter().map(cut).collect()
}

/// The blocks of a page from top to bottom. Tables, outputs and drawings have the language "".
pub(crate) fn blocks(page: &Path, text: &str) -> Vec<Block> {
    let lines: Vec<&str> = text.lines().collect();
    let mut found = Vec::new();
    let mut at = 0;
    while at < lines.len() {
        let begin = at;
        let fence = lines[at].trim_start().strip_prefix("```");
        let is_inside = |line: &&&str| match fence {
            Some(_) => !line.trim_start().starts_with("```"),
            None => indent(line) >= 4,
        };
        let skipped = usize::from(fence.is_some());
        let inside: Vec<&str> = lines[at + skipped..]
            .iter()
            .take_while(is_inside)
            .copied()
            .collect();
        at += inside.len() + 2 * skipped;
        let follows_text = begin > 0 && !lines[begin - 1].trim().is_empty();
        if fence.is_none() && (inside.is_empty() || follows_text) {
            at = at.max(begin + 1);
            continue;
        }
        let text = dedented(&inside);
        let language = match fence.unwrap_or_default() {
            "" if is_shell(&text) => "sh",
            language => language,
        };
        found.push(Block {
            page: page.to_owned(),
            line: begin + 1,
            language: language.to_owned(),
            text,
        });
    }
    found
}
