//! Wraps text by words at the width of the terminal.

use std::io::IsTerminal;

use ratatui::crossterm::terminal;
use textwrap::core::display_width;
use textwrap::{Options, WordSplitter};

/// Minimum width, in characters, of the texts in a list of error codes or findings. Normally, each text stands to the
/// right of its code. If the terminal leaves less room for the texts, each text begins in the line below its code.
pub(super) const NARROWEST_COLUMN: usize = 40;

/// Minimum width of the text in columns, even on a narrower terminal.
const NARROWEST: usize = 24;

/// Returns the width in columns of the terminal on standard output. `None` for a pipe or a file: lines are not
/// wrapped there, so that `grep` can match whole lines.
pub(super) fn terminal_width() -> Option<usize> {
    if !std::io::stdout().is_terminal() {
        return None;
    }
    columns()
}

/// Like [`terminal_width`], for the terminal on standard error.
pub(super) fn error_width() -> Option<usize> {
    if !std::io::stderr().is_terminal() {
        return None;
    }
    columns()
}

/// Returns the width of the terminal in columns. `None` if the terminal reports 0 columns, which means that it does
/// not know its size.
fn columns() -> Option<usize> {
    let (columns, _) = terminal::size().ok()?;
    (columns > 0).then_some(columns.into())
}

/// Wraps each line that is too long. The rest of the line continues under the line's second column. If there is no
/// second column, or if that column begins in the right half of the terminal, the rest has the line's own indent.
pub(super) fn lines(text: &str, width: Option<usize>) -> String {
    let Some(columns) = width else {
        return text.to_owned();
    };
    let wrap_line = |line: &str| {
        if display_width(line) <= columns {
            return line.to_owned();
        }
        let indent = second_column(line).filter(|indent| indent * 2 <= columns);
        let indent = indent.unwrap_or(line.len() - line.trim_start().len());
        let (start, rest) = line.split_at(indent);
        start.to_owned() + &wrapped(rest, display_width(start), width)
    };
    let wrapped: Vec<String> = text.split('\n').map(wrap_line).collect();
    wrapped.join("\n")
}

/// Returns the byte at which the second column of a line begins: after a word and two or more spaces.
fn second_column(line: &str) -> Option<usize> {
    let indent = line.len() - line.trim_start().len();
    let gap = indent + line[indent..].find("  ")?;
    let rest = line[gap..].trim_start();
    (!rest.is_empty()).then_some(line.len() - rest.len())
}

/// Returns the length of the mark at the start of a list item, such as `- ` or `2. `. 0 if the line does not
/// begin an item.
fn list_mark(line: &str) -> usize {
    let digits = line.bytes().take_while(u8::is_ascii_digit).count();
    match &line[digits..] {
        rest if digits > 0 && rest.starts_with(". ") => digits + 2,
        rest if digits == 0 && rest.starts_with("- ") => 2,
        _ => 0,
    }
}

/// Wraps the paragraphs of a page in Markdown. Headings, tables and code stay as they are.
pub(super) fn markdown(page: &str, width: Option<usize>) -> String {
    let mut text = String::new();
    let mut paragraph = String::new();
    let mut is_code = false;
    let flush = |paragraph: &mut String, text: &mut String| {
        if !paragraph.is_empty() {
            let indent = list_mark(paragraph);
            let (start, rest) = paragraph.split_at(indent);
            *text += &format!("{start}{}\n", wrapped(rest, indent, width));
            paragraph.clear();
        }
    };
    for line in page.lines() {
        is_code ^= line.starts_with("```");
        let is_whole = is_code
            || ["    ", "|", "#", "```"]
                .iter()
                .any(|p| line.starts_with(p));
        if is_whole || line.is_empty() || list_mark(line) > 0 {
            flush(&mut paragraph, &mut text);
        }
        if is_whole || line.is_empty() {
            text += line;
            text += "\n";
        } else {
            if !paragraph.is_empty() {
                paragraph.push(' ');
            }
            paragraph += line.trim();
        }
    }
    flush(&mut paragraph, &mut text);
    text
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
    fn long_lines_continue_under_their_second_column() {
        let text = "error[topic-missing]: the topic of the event does not exist\n  hint:  create it, or \
                    run with create_topics\nshort";
        assert_eq!(
            lines(text, Some(40)),
            "error[topic-missing]: the topic of the\nevent does not exist\n  hint:  create it, or run \
             with\n         create_topics\nshort"
        );
        assert_eq!(lines(text, None), text);
    }

    #[test]
    fn paragraphs_of_a_page_are_wrapped_and_code_stays_whole() {
        let command = "    gcloud pubsub topics create a-topic-with-a-long-name --project=shop";
        let page = format!(
            "# title\n\nOne sentence that is\nlonger than the terminal is wide.\n\n- an item of a \
             list\n  with more words\n- two\n\n1. first a step that is long\n2. second\n\n{command}\n"
        );
        assert_eq!(
            markdown(&page, Some(30)),
            format!(
                "# title\n\nOne sentence that is longer\nthan the terminal is wide.\n\n- an item of a \
                 list with more\n  words\n- two\n\n1. first a step that is long\n2. second\n\n{command}\n"
            )
        );
    }

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
