//! Makes untrusted text safe to show in a terminal or a log.
//!
//! A service that inserts a row chooses the row's id and key, and other text that our errors quote.
//! Control characters in such text could move the cursor, forge a line, or reconfigure the
//! terminal, so they are shown as escapes such as `\n` or `\u{1b}`. Characters that change the
//! direction of writing are escaped too, because they can make one text look like another.
//!
//! ```
//! assert_eq!(printable::printable("order-7\r\u{1b}[2J"), "order-7\\r\\u{1b}[2J");
//! ```
//!
//! [`shown_path`] hides a value that should be a path but does not look like one, because the value may be a
//! secret. [`may_contain_password`] recognises a connection string in a setting that should be something
//! else.
//!
//! JSON output has its own escapes, so it does not need this crate.

#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a test fails by panicking"))]

mod password;
mod shown_path;

use std::borrow::Cow;

pub use password::may_contain_password;
pub use shown_path::shown_path;

/// Escapes every control character and every character that changes the direction of writing. The
/// result is a single line.
pub fn printable(text: &str) -> Cow<'_, str> {
    escaped(text, is_unsafe)
}

/// Like [`printable`], but keeps line breaks. Use it for our own messages, which may have line breaks and may
/// quote untrusted text.
pub fn printable_lines(text: &str) -> Cow<'_, str> {
    escaped(text, |c| is_unsafe(c) && c != '\n')
}

fn escaped(text: &str, is_unsafe: impl Fn(char) -> bool) -> Cow<'_, str> {
    if !text.contains(&is_unsafe) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 8);
    for c in text.chars() {
        if !is_unsafe(c) {
            out.push(c);
        } else if c.is_control() {
            // `escape_debug` produces short escapes such as `\n`.
            out.extend(c.escape_debug());
        } else {
            out.extend(c.escape_unicode());
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

/// Shortens a text that has more than `chars` characters. A shortened text has exactly `chars` characters and
/// ends with `..`.
pub fn start_of(text: &str, chars: usize) -> String {
    if text.chars().nth(chars).is_none() {
        return text.to_owned();
    }
    let start: String = text.chars().take(chars - 2).collect();
    format!("{start}..")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_and_direction_characters_are_escaped() {
        assert_eq!(printable("ctl\nx\x1b[31mred"), "ctl\\nx\\u{1b}[31mred");
        assert_eq!(printable("a\u{9b}31mb\u{7f}"), "a\\u{9b}31mb\\u{7f}");
        assert_eq!(printable("a\u{202e}b"), "a\\u{202e}b");
        assert_eq!(printable_lines("one\ntwo\r\x07"), "one\ntwo\\r\\u{7}");
    }

    #[test]
    fn other_text_stays_unchanged() {
        for text in ["", "order-7", "Bestellung \"ü\" \\n 日本 👍🏽"] {
            assert!(matches!(printable(text), Cow::Borrowed(same) if same == text));
        }
    }
}
