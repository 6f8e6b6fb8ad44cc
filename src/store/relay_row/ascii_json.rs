//! JSON that can be stored in a database of any encoding. An encoding such as WIN1252 lacks most characters,
//! but the JSON may contain any, for example in an error text from Pub/Sub.

use serde::Serialize;

/// A value as JSON, with only ASCII characters, in two forms.
pub(super) struct AsciiJson {
    /// The exact value, for databases in UTF-8: JSON escapes such as `\u2192` replace the characters outside
    /// ASCII. A database whose encoding lacks such a character cannot convert this form to `jsonb`.
    pub(super) exact: String,
    /// A form for databases of any encoding: plain text such as `\u{2192}` replaces each character outside
    /// ASCII.
    pub(super) readable: String,
}

impl AsciiJson {
    pub(super) fn of(value: &impl Serialize) -> Self {
        let json = serde_json::to_string(value).expect("invariant: our values have a JSON form");
        let escaped = |escape: fn(char) -> String| {
            let escape = |c: char| if c.is_ascii() { c.into() } else { escape(c) };
            json.chars().map(escape).collect()
        };
        Self {
            exact: escaped(|c| {
                let units = c.encode_utf16(&mut [0; 2]).to_vec();
                units.iter().map(|unit| format!("\\u{unit:04x}")).collect()
            }),
            readable: escaped(|c| format!("\\{}", c.escape_unicode())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms_are_ascii_and_one_has_the_exact_value() {
        let text = "a\\u{e9} → \"é\" 😀";
        let json = AsciiJson::of(&text);
        assert!(json.exact.is_ascii() && json.readable.is_ascii());
        let exact: String = serde_json::from_str(&json.exact).unwrap();
        assert_eq!(exact, text);
        let readable: String = serde_json::from_str(&json.readable).unwrap();
        assert_eq!(readable, "a\\u{e9} \\u{2192} \"\\u{e9}\" \\u{1f600}");
    }
}
