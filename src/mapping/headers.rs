//! Reads the `headers` column: one JSON object whose entries become attributes.
//!
//! A string is sent as its text. An entry with the value null is skipped. Any other value (number,
//! boolean, list, object) is sent as its JSON text, exactly as PostgreSQL printed it. If two entries have
//! the same name (which `json` allows and `jsonb` does not), the first one wins.
//!
//! All names and values are stored in one buffer, which is reused for every row.

use outbox_event::attribute;
use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, Visitor};
use serde_json::value::RawValue;
use std::fmt;

/// Maximum capacity in bytes that each buffer keeps between rows, so that a large row does not hold its
/// memory forever.
const KEPT_BYTES: usize = 64 * 1024;

/// The headers of one row.
#[derive(Debug, Clone, Default)]
pub(super) struct Headers {
    text: String,
    /// Where the name and the value of each entry end in `text`.
    ends: Vec<(usize, usize)>,
}

/// The location of the first fault in headers that are not a JSON object. Line and column count from 1; 0
/// means before the first character. The text itself is not included, because headers may contain secrets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct NotAnObject {
    pub(super) line: usize,
    pub(super) column: usize,
}

impl Headers {
    /// Replaces the entries with the entries of a JSON object. `None` and JSON null have no entries.
    pub(super) fn read(&mut self, json: Option<&str>) -> Result<(), NotAnObject> {
        self.text.clear();
        self.text.shrink_to(KEPT_BYTES);
        self.ends.clear();
        self.ends
            .shrink_to(KEPT_BYTES / size_of::<(usize, usize)>());
        let Some(json) = json else { return Ok(()) };
        if self.read_plain(json).is_some() {
            return Ok(());
        }
        self.text.clear();
        self.ends.clear();
        self.read_json(json)
    }

    /// Reads an object in which all names and values are strings without escapes. Nearly all producers write
    /// such headers, and reading them this way takes a quarter of the time of a JSON parser. Returns `None`
    /// for any other text, valid or not.
    fn read_plain(&mut self, json: &str) -> Option<()> {
        let mut rest = Plain(json);
        rest.token('{')?;
        if rest.token('}').is_none() {
            loop {
                self.text.push_str(rest.string()?);
                let name_end = self.text.len();
                rest.token(':')?;
                self.text.push_str(rest.string()?);
                self.ends.push((name_end, self.text.len()));
                if rest.token(',').is_none() {
                    break;
                }
            }
            rest.token('}')?;
        }
        rest.is_over().then_some(())
    }

    fn read_json(&mut self, json: &str) -> Result<(), NotAnObject> {
        let mut deserializer = serde_json::Deserializer::from_str(json);
        deserializer
            .deserialize_any(&mut *self)
            .and_then(|()| deserializer.end())
            .map_err(|error| NotAnObject {
                line: error.line(),
                column: error.column(),
            })
    }

    /// The name and value of each entry.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        let mut start = 0;
        self.ends.iter().map(move |&(name_end, value_end)| {
            let entry = (&self.text[start..name_end], &self.text[name_end..value_end]);
            start = value_end;
            entry
        })
    }

    /// The payload's media type, if there is a header `content-type` (in upper or lower case).
    pub(super) fn content_type(&self) -> Option<&str> {
        self.iter()
            .find(|(name, _)| name.eq_ignore_ascii_case(attribute::CONTENT_TYPE))
            .map(|(_, value)| value)
    }
}

/// The unread rest of a JSON text, for [`Headers::read_plain`].
struct Plain<'a>(&'a str);

impl<'a> Plain<'a> {
    const SPACE: [char; 4] = [' ', '\n', '\r', '\t'];

    /// Consumes this character and any whitespace before it. Returns `None` if another character comes
    /// next.
    #[inline]
    fn token(&mut self, token: char) -> Option<()> {
        self.0 = match self.0.strip_prefix(token) {
            Some(rest) => rest,
            None => self.0.trim_start_matches(Self::SPACE).strip_prefix(token)?,
        };
        Some(())
    }

    /// Consumes a string without escapes.
    #[inline]
    fn string(&mut self) -> Option<&'a str> {
        self.token('"')?;
        // A control character ends the string too, and makes this method return `None`: JSON does not allow the
        // character, so `read_json` then reports its location.
        let ends = |byte| matches!(byte, b'"' | b'\\' | 0..0x20);
        let (string, rest) = self.0.split_at_checked(self.0.bytes().position(ends)?)?;
        self.0 = rest.strip_prefix('"')?;
        Some(string)
    }

    fn is_over(&self) -> bool {
        self.0.trim_start_matches(Self::SPACE).is_empty()
    }
}

impl<'de> Visitor<'de> for &mut Headers {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_unit<E: Error>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<(), A::Error> {
        loop {
            let start = self.text.len();
            if entries.next_key_seed(Append(&mut self.text))?.is_none() {
                return Ok(());
            }
            let name_end = self.text.len();
            let value: &'de RawValue = entries.next_value()?;
            match value.get() {
                "null" => {
                    self.text.truncate(start);
                    continue;
                }
                string if string.starts_with('"') => {
                    let mut string = serde_json::Deserializer::from_str(string);
                    Append(&mut self.text)
                        .deserialize(&mut string)
                        .map_err(A::Error::custom)?;
                }
                other => self.text.push_str(other),
            }
            self.ends.push((name_end, self.text.len()));
        }
    }
}

/// Appends the text of a JSON string, without quotes and escapes.
struct Append<'a>(&'a mut String);

impl<'de> DeserializeSeed<'de> for Append<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for Append<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<(), E> {
        self.0.push_str(text);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn read(json: &str) -> Result<Vec<(String, String)>, NotAnObject> {
        let mut headers = Headers::default();
        headers.read(Some("{\"left\":\"over\"}")).unwrap();
        headers.read(Some(json))?;
        Ok(headers
            .iter()
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .collect())
    }

    #[test]
    fn strings_are_sent_as_text_null_is_skipped_and_the_rest_is_json_text() {
        let json = r#"{"a": "x\"\u00e9\n", "b": null, "n": 12345678901234567890.10,
                       "t": true, "l": [1, {"k": "v"}], "o": {}, "": "empty"}"#;
        let expected = [
            ("a", "x\"é\n"),
            ("n", "12345678901234567890.10"),
            ("t", "true"),
            ("l", "[1, {\"k\": \"v\"}]"),
            ("o", "{}"),
            ("", "empty"),
        ];
        let expected: Vec<_> = expected.map(|(k, v)| (k.to_owned(), v.to_owned())).into();
        assert_eq!(read(json).unwrap(), expected);
    }

    #[test]
    fn null_and_missing_headers_have_no_entries() {
        assert_eq!(read("null").unwrap(), []);
        assert_eq!(read("{}").unwrap(), []);
        let mut headers = Headers::default();
        headers.read(None).unwrap();
        assert_eq!(headers.iter().count(), 0);
    }

    #[test]
    fn headers_that_are_not_an_object_are_refused_and_only_the_position_is_reported() {
        for json in [
            "",
            "[]",
            "\"a\"",
            "7",
            "true",
            "{",
            "{\"a\":",
            "{\"a\":1}x",
            "{a:1}",
        ] {
            assert!(read(json).is_err(), "{json}");
        }
        assert_eq!(read("{\n  oops}"), Err(NotAnObject { line: 2, column: 3 }));
    }

    #[test]
    fn the_content_type_is_found_in_any_case() {
        let mut headers = Headers::default();
        headers
            .read(Some(r#"{"a":"b","Content-Type":"application/avro"}"#))
            .unwrap();
        assert_eq!(headers.content_type(), Some("application/avro"));
    }

    #[test]
    fn a_large_buffer_is_released() {
        let mut headers = Headers::default();
        headers
            .read(Some(&format!("{{\"a\":\"{}\"}}", "x".repeat(1_000_000))))
            .unwrap();
        headers.read(None).unwrap();
        assert!(headers.text.capacity() <= KEPT_BYTES);
    }

    /// The headers as the JSON parser alone reads them.
    fn parsed(json: &str) -> Result<Vec<(String, String)>, NotAnObject> {
        let mut headers = Headers::default();
        headers.read_json(json)?;
        Ok(headers
            .iter()
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .collect())
    }

    #[test]
    fn plain_headers_are_read_without_the_parser() {
        for json in [
            "{}",
            " { } ",
            r#"{"tenant": "acme"}"#,
            "{\n\t\"a\" :\"\" ,\"\": \"h\u{f6}he\"\r}\n",
        ] {
            assert!(Headers::default().read_plain(json).is_some(), "{json}");
            assert_eq!(read(json), parsed(json));
        }
    }

    proptest! {
        #[test]
        fn any_strings_are_read_back(entries in proptest::collection::btree_map(".{0,20}", ".{0,40}", 0..8)) {
            let json = serde_json::to_string(&entries).unwrap();
            prop_assert_eq!(read(&json).unwrap(), entries.into_iter().collect::<Vec<_>>());
        }

        #[test]
        fn no_text_causes_a_panic(json in "[\\[\\]{}:,\"\\\\a0 ]{0,30}") {
            let _ = read(&json);
        }

        #[test]
        fn reading_with_and_without_the_parser_gives_the_same_result(
            json in "[ \t\r\n]?\\{[ \n]?(\"[an\u{e9}\u{1}\n\\\\]{0,3}\"[ \t]?[:,]?[ \n]?([\"1][a]{0,2}\"?|null)[ ]?,?){0,3}[}]?[ \u{a0}x]?",
        ) {
            prop_assert_eq!(read(&json), parsed(&json));
        }
    }
}
