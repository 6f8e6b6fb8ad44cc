//! Text of others as it may reach a terminal.
//!
//! Whoever may insert a row chooses its id, its key and what its errors quote. A control character
//! among them could move the cursor, forge a line, or change the terminal, so it is shown as an escape
//! such as `\n` or `\u{1b}`. The same goes for the characters that turn the direction of writing
//! round, by which a text can be made to look like another.
//!
//! JSON output has its own escapes and does not need this.

use std::borrow::Cow;

/// One line: every control character is shown as its escape.
pub(crate) fn printable(text: &str) -> Cow<'_, str> {
    escaped(text, is_unsafe)
}

/// The same for a text of ours that quotes others: our own line breaks stay.
pub(crate) fn printable_lines(text: &str) -> Cow<'_, str> {
    escaped(text, |c| is_unsafe(c) && c != '\n')
}

fn escaped(text: &str, is_unsafe: impl Fn(char) -> bool) -> Cow<'_, str> {
    if !text.contains(&is_unsafe) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 8);
    for c in text.chars() {
        match is_unsafe(c) {
            // Debug escapes are short for the usual ones, and default ones exist for all others.
            true if c.is_control() => out.extend(c.escape_debug()),
            true => out.extend(c.escape_unicode()),
            false => out.push(c),
        }
    }
    Cow::Owned(out)
}

fn is_unsafe(c: char) -> bool {
    c.is_control()
        || matches!(c,
            '\u{200e}' | '\u{200f}' | '\u{61c}' | '\u{2028}' | '\u{2029}'
            | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_terminal_would_act_on_is_shown_as_an_escape() {
        assert_eq!(printable("ctl\nx\x1b[31mred"), "ctl\\nx\\u{1b}[31mred");
        assert_eq!(printable("a\u{9b}31mb\u{7f}"), "a\\u{9b}31mb\\u{7f}");
        assert_eq!(printable("a\u{202e}b"), "a\\u{202e}b");
        assert_eq!(printable_lines("one\ntwo\r\x07"), "one\ntwo\\r\\u{7}");
    }

    #[test]
    fn any_other_text_stays_as_it_is() {
        for text in ["", "order-7", "Bestellung \"ü\" \\n 日本 👍🏽"] {
            assert!(matches!(printable(text), Cow::Borrowed(same) if same == text));
        }
    }
}
