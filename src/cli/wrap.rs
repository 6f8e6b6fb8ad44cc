//! Wraps text by words at the width of the terminal.

use std::io::IsTerminal;

use ratatui::crossterm::terminal;
use textwrap::{Options, WordSplitter};

/// Minimum width of the text in columns, even on a narrower terminal.
const NARROWEST: usize = 24;

/// The width in columns of the terminal on standard output. `None` for a pipe or a file: there, lines
/// stay whole, so that `grep` finds them.
pub(super) fn terminal_width() -> Option<usize> {
    if !std::io::stdout().is_terminal() {
        return None;
    }
    terminal::size().ok().map(|(columns, _)| columns.into())
}

/// Wraps text that begins at column `indent`. The following lines are indented by the same width. Words
/// stay whole, so that statements can be copied.
pub(super) fn wrapped(text: &str, indent: usize, width: Option<usize>) -> String {
    let Some(width) = width else {
        return text.to_owned();
    };
    let columns = width.saturating_sub(indent).max(NARROWEST);
    let options = Options::new(columns)
        .break_words(false)
        .word_splitter(WordSplitter::NoHyphenation);
    let lines = textwrap::wrap(text, options);
    lines.join(&format!("\n{:indent$}", ""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_end_between_words_and_are_indented() {
        let text = "grant pg_read_all_stats to the role of the relay, then run it again";
        assert_eq!(
            wrapped(text, 4, Some(44)),
            "grant pg_read_all_stats to the role of\n    the relay, then run it again"
        );
        assert_eq!(wrapped(text, 4, None), text);
        // A word that is too long stays whole, and so does a word with hyphens.
        let text = "run `postrider slot advance --slot shop-relay-europe-west1`";
        let whole = wrapped(text, 0, Some(48));
        assert!(whole.contains("shop-relay-europe-west1"), "{whole}");
        let long = "x".repeat(60);
        assert_eq!(wrapped(&long, 4, Some(30)), long);
    }
}
