//! Parses a connection string of the form `host=db.example dbname=shop` into libpq's parameters.
//!
//! A space or a quote without a backslash can end a password too early, so that the rest of the
//! password is read as a parameter. To detect such mistakes, this parser refuses two things that
//! libpq accepts: text directly after a closing quote, and a backslash at the end. Errors show
//! nothing of the text except libpq's own parameter names.
//!
//! Source: <https://www.postgresql.org/docs/current/libpq-connect.html#LIBPQ-CONNSTRING-KEYWORD-VALUE>

use std::iter::Peekable;
use std::str::Chars;

use super::parameters::{self, Parameters, invalid};
use crate::error::{ReplicationError, Result};

const QUOTE: &str = "put a value with spaces, quotes or backslashes into single quotes, and write a \
    backslash before each quote and backslash in it: password='it\\'s'";

/// Parses the text. If a parameter occurs twice, the last value counts, as in libpq.
///
/// # Errors
/// `InvalidTarget`.
pub(super) fn parse(text: &str) -> Result<Parameters> {
    let mut found = Parameters::new();
    let mut rest = text.chars().peekable();
    for nth in 1.. {
        skip_spaces(&mut rest);
        if rest.peek().is_none() {
            break;
        }
        let location = format!("parameter {nth} of DATABASE_URL");
        let name = name(&mut rest);
        skip_spaces(&mut rest);
        if rest.next_if_eq(&'=').is_none() {
            return Err(refused(format!("{location} is not of the form name=value")));
        }
        skip_spaces(&mut rest);
        let value = match rest.next_if_eq(&'\'') {
            Some(_) => quoted(&mut rest, &location)?,
            None => unquoted(&mut rest, &location)?,
        };
        let known = parameters::named(&name, &location, QUOTE)?;
        parameters::set(&mut found, known, &value, "DATABASE_URL")?;
    }
    Ok(found)
}

fn skip_spaces(rest: &mut Peekable<Chars<'_>>) {
    while rest.next_if(char::is_ascii_whitespace).is_some() {}
}

fn name(rest: &mut Peekable<Chars<'_>>) -> String {
    let ends = |c: &char| *c == '=' || c.is_ascii_whitespace();
    std::iter::from_fn(|| rest.next_if(|c| !ends(c))).collect()
}

/// Reads the rest of a quoted value, from after its opening quote up to and including its closing
/// quote.
fn quoted(rest: &mut Peekable<Chars<'_>>, location: &str) -> Result<String> {
    let mut value = String::new();
    loop {
        match rest.next() {
            Some('\'') => break,
            Some('\\') => value.push(escaped(rest, location)?),
            Some(c) => value.push(c),
            None => return Err(refused(format!("{location} has a quote without an end"))),
        }
    }
    match rest.peek() {
        Some(c) if !c.is_ascii_whitespace() => {
            let what = format!("{location} has text directly after its closing quote");
            Err(refused(what))
        }
        _ => Ok(value),
    }
}

/// Reads a value without quotes, up to the next space.
fn unquoted(rest: &mut Peekable<Chars<'_>>, location: &str) -> Result<String> {
    let mut value = String::new();
    while let Some(c) = rest.next_if(|c| !c.is_ascii_whitespace()) {
        value.push(match c {
            '\\' => escaped(rest, location)?,
            c => c,
        });
    }
    Ok(value)
}

/// Reads the character that follows a backslash.
fn escaped(rest: &mut Peekable<Chars<'_>>, location: &str) -> Result<char> {
    let escaped = rest.next();
    escaped.ok_or_else(|| refused(format!("{location} ends with a single backslash")))
}

fn refused(what: String) -> ReplicationError {
    invalid(what).hint(QUOTE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn values_may_be_quoted_escaped_or_empty() {
        let text = " host = db.example port=6543\n dbname='the shop' user=us\\ er \
                    password='it\\'s \\\\ = ' sslmode='' port=6544 ";
        let found = parse(text).unwrap();
        let pairs: Vec<(&str, &str)> = found.iter().map(|(n, v)| (*n, v.as_str())).collect();
        assert_eq!(
            pairs,
            [
                ("dbname", "the shop"),
                ("host", "db.example"),
                ("password", "it's \\ = "),
                ("port", "6544"),
                ("user", "us er"),
            ]
        );
    }

    #[test]
    fn an_ambiguous_text_is_refused_without_showing_it() {
        for text in [
            "host=h password=hun ter2",
            "host=h password=hun ter2=3",
            "host=h password='hun'ter2",
            "host=h password='it''ster2'",
            "host=h password='ter2",
            "host=h password=ter2\\",
            "host=h password='ter2\\",
            "host=h =ter2",
            "host=h ter2",
            "host=h password=ter2\0",
            "hunter2://u:p@h/d?a=b",
            "host=h application_name=ter2",
        ] {
            let error = parse(text).unwrap_err();
            assert_eq!(error.kind(), &ErrorKind::InvalidTarget, "{text}");
            let shown = format!("{error} {error:?} {}", error.hint_text());
            assert!(
                !shown.contains("ter2") && !shown.contains("hun"),
                "{text}: {shown}"
            );
        }
    }
}
