//! The name of a table with its schema, written as in SQL.

use std::fmt;
use std::str::FromStr;

use serde::Serialize;

/// Maximum length of a name in bytes: `NAMEDATALEN - 1` in standard builds. PostgreSQL truncates
/// longer names, so we refuse them.
const LONGEST_BYTES: usize = 63;

/// Words that SQL does not accept as a bare name: the keywords that PostgreSQL 14 to 18 list as
/// reserved, or as reserved except for functions and types.
/// <https://www.postgresql.org/docs/current/sql-keywords-appendix.html>
const RESERVED: &str = "all analyse analyze and any array as asc asymmetric authorization binary both case cast \
    check collate collation column concurrently constraint create cross current_catalog \
    current_date current_role current_schema current_time current_timestamp current_user \
    default deferrable desc distinct do else end except false fetch for foreign freeze from \
    full grant group having ilike in initially inner intersect into is isnull join lateral \
    leading left like limit localtime localtimestamp natural not notnull null offset on only \
    or order outer overlaps placing primary references returning right select session_user \
    similar some symmetric system_user table tablesample then to trailing true union unique \
    user using variadic verbose when where window with";

/// A schema and a name in it, exactly as in the catalogue: without quotes, and with the case already
/// folded.
///
/// Parsed as in SQL: `outbox.Events` has the name `events`, and `outbox."Events"` has the name `Events`.
/// Displayed with quotes where SQL needs them, so that the text can be pasted into a statement.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct QualifiedName {
    /// The schema.
    pub schema: String,
    /// The name within the schema.
    pub name: String,
}

/// The error for a text that is not the name of a table with its schema.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{input:?} is not a table with its schema ({problem}): write it as in SQL, such as \
     outbox.events or \"My Schema\".\"Events\""
)]
pub struct ParseQualifiedNameError {
    /// The text as it was given.
    pub input: String,
    /// The reason why the text is not valid.
    pub problem: &'static str,
}

impl QualifiedName {
    /// Builds a name from its parts, which must be exactly as in the catalogue.
    #[must_use]
    pub fn new(schema: impl Into<String>, name: impl Into<String>) -> Self {
        Self {
            schema: schema.into(),
            name: name.into(),
        }
    }
}

impl fmt::Display for QualifiedName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = format!(
            "{}.{}",
            quoted_identifier(&self.schema),
            quoted_identifier(&self.name)
        );
        f.pad(&text)
    }
}

impl Serialize for QualifiedName {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl FromStr for QualifiedName {
    type Err = ParseQualifiedNameError;

    fn from_str(input: &str) -> Result<Self, Self::Err> {
        let fail = |problem| ParseQualifiedNameError {
            input: input.to_owned(),
            problem,
        };
        let (schema, rest) = identifier(input).map_err(fail)?;
        let rest = rest
            .strip_prefix('.')
            .ok_or_else(|| fail("the schema is missing"))?;
        let (name, rest) = identifier(rest).map_err(fail)?;
        if !rest.is_empty() {
            return Err(fail("there is more text after the table's name"));
        }
        Ok(Self { schema, name })
    }
}

/// Returns the identifier at the start of `input`, and the rest of `input`. A quoted identifier is taken
/// literally, and an unquoted one is folded to lower case.
fn identifier(input: &str) -> Result<(String, &str), &'static str> {
    let (name, rest) = match input.strip_prefix('"') {
        Some(quoted) => quoted_part(quoted)?,
        None => bare_part(input)?,
    };
    match name.len() {
        0 => Err("a name is empty"),
        1..=LONGEST_BYTES => Ok((name, rest)),
        _ => Err("a name is longer than 63 bytes"),
    }
}

fn bare_part(input: &str) -> Result<(String, &str), &'static str> {
    let end = input.find('.').unwrap_or(input.len());
    let (name, rest) = input.split_at(end);
    let allowed = |c: char| c.is_alphanumeric() || c == '_' || c == '$';
    if !name.chars().all(allowed) || name.starts_with(|c: char| c.is_ascii_digit() || c == '$') {
        return Err("a name with characters other than letters, digits and _ needs double quotes");
    }
    Ok((name.to_ascii_lowercase(), rest))
}

/// Reads a quoted identifier after its opening quote. A doubled quote stands for one quote.
fn quoted_part(input: &str) -> Result<(String, &str), &'static str> {
    let mut name = String::new();
    let mut rest = input;
    loop {
        let (part, behind) = rest.split_once('"').ok_or("a double quote is not closed")?;
        name.push_str(part);
        match behind.strip_prefix('"') {
            Some(more) => {
                name.push('"');
                rest = more;
            }
            None => return Ok((name, behind)),
        }
    }
}

/// Writes an identifier for use in SQL, with double quotes if it needs them.
#[must_use]
pub fn quoted_identifier(name: &str) -> String {
    let bare = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_';
    let stands_bare = !name.is_empty()
        && !name.starts_with(|c: char| c.is_ascii_digit())
        && name.bytes().all(bare)
        && RESERVED.split(' ').all(|word| word != name);
    if stands_bare {
        name.to_owned()
    } else {
        format!("\"{}\"", name.replace('"', "\"\""))
    }
}

/// Writes a text as an SQL literal.
#[must_use]
pub fn quoted_literal(text: &str) -> String {
    format!("'{}'", text.replace('\'', "''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(input: &str) -> QualifiedName {
        input.parse().expect(input)
    }

    #[test]
    fn bare_names_fold_to_lower_case_and_quoted_ones_do_not() {
        assert_eq!(
            parsed("outbox.events"),
            QualifiedName::new("outbox", "events")
        );
        assert_eq!(
            parsed("Outbox.EVENTS"),
            QualifiedName::new("outbox", "events")
        );
        assert_eq!(
            parsed(r#""Out.Box"."Ev""ents""#),
            QualifiedName::new("Out.Box", r#"Ev"ents"#)
        );
    }

    #[test]
    fn a_displayed_name_is_read_back_as_the_same_name() {
        for (schema, name) in [
            ("outbox", "events"),
            ("order", "user"),
            ("A b", "x\"y"),
            ("1a", "ä"),
        ] {
            let name = QualifiedName::new(schema, name);
            assert_eq!(parsed(&name.to_string()), name);
        }
    }

    #[test]
    fn a_name_is_quoted_only_if_sql_needs_it() {
        assert_eq!(
            QualifiedName::new("outbox", "events_2").to_string(),
            "outbox.events_2"
        );
        assert_eq!(
            QualifiedName::new("order", "Events").to_string(),
            r#""order"."Events""#
        );
    }

    #[test]
    fn a_text_that_is_not_a_qualified_name_is_refused() {
        let long = format!("a.{}", "x".repeat(64));
        for input in [
            "", "events", "a.", ".b", "a.b.c", "a b.c", "a.\"b", "a.\"b\"c", "1a.b", &long,
        ] {
            assert!(input.parse::<QualifiedName>().is_err(), "{input}");
        }
    }
}
