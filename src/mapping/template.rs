//! Parses a template: a text with column names in braces, such as `{aggregatetype}.events`.
//!
//! A brace cannot be escaped, because no topic name contains a brace. Not here: the check that the columns exist
//! (`topic.rs`).

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

/// A parsed template.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Template {
    parts: Vec<TemplatePart>,
}

/// A piece of a [`Template`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum TemplatePart {
    /// Literal text.
    Text(String),
    /// The value of the column of this name.
    Column(String),
}

/// The error for a text that is not a template.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ParseTemplateError {
    /// The text is empty.
    #[error("the template is empty: write a topic's name, such as {{aggregatetype}}.events")]
    Empty,
    /// An opening or closing brace without its counterpart.
    #[error("{input:?} has an unbalanced brace: write columns as {{aggregatetype}}")]
    UnbalancedBrace {
        /// The text as it was given.
        input: String,
    },
    /// Braces with no name between them.
    #[error("{input:?} has braces without a column's name: write columns as {{aggregatetype}}")]
    EmptyName {
        /// The text as it was given.
        input: String,
    },
}

impl Template {
    pub(super) fn parts(&self) -> &[TemplatePart] {
        &self.parts
    }

    /// The names in braces.
    pub fn columns(&self) -> impl Iterator<Item = &str> {
        self.parts.iter().filter_map(|part| match part {
            TemplatePart::Column(name) => Some(name.as_str()),
            TemplatePart::Text(_) => None,
        })
    }
}

impl FromStr for Template {
    type Err = ParseTemplateError;

    fn from_str(input: &str) -> Result<Self, Self::Err> {
        let unbalanced = || ParseTemplateError::UnbalancedBrace {
            input: input.to_owned(),
        };
        let mut parts = Vec::new();
        let mut rest = input;
        while !rest.is_empty() {
            let text_end = rest.find(['{', '}']).unwrap_or(rest.len());
            if text_end > 0 {
                parts.push(TemplatePart::Text(rest[..text_end].to_owned()));
                rest = &rest[text_end..];
                continue;
            }
            let after = rest.strip_prefix('{').ok_or_else(unbalanced)?;
            let name_end = after.find(['{', '}']).ok_or_else(unbalanced)?;
            let (name, tail) = after.split_at(name_end);
            rest = tail.strip_prefix('}').ok_or_else(unbalanced)?;
            if name.is_empty() {
                return Err(ParseTemplateError::EmptyName {
                    input: input.to_owned(),
                });
            }
            parts.push(TemplatePart::Column(name.to_owned()));
        }
        if parts.is_empty() {
            return Err(ParseTemplateError::Empty);
        }
        Ok(Self { parts })
    }
}

impl fmt::Display for Template {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.parts.iter().try_for_each(|part| match part {
            TemplatePart::Text(text) => f.write_str(text),
            TemplatePart::Column(name) => write!(f, "{{{name}}}"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_template_is_split_into_text_and_columns() {
        let template: Template = "a-{x}{y}.events".parse().unwrap();
        let (text, column) = (
            |t: &str| TemplatePart::Text(t.into()),
            |c: &str| TemplatePart::Column(c.into()),
        );
        assert_eq!(
            template.parts(),
            [text("a-"), column("x"), column("y"), text(".events")]
        );
        assert_eq!(template.columns().collect::<Vec<_>>(), ["x", "y"]);
    }

    #[test]
    fn a_plain_name_has_no_columns() {
        let template: Template = "orders".parse().unwrap();
        assert_eq!(template.columns().count(), 0);
    }

    #[test]
    fn a_template_that_is_not_well_formed_is_refused() {
        assert_eq!("".parse::<Template>(), Err(ParseTemplateError::Empty));
        for text in ["{", "}", "a{b", "a}b", "{a{b}}", "{a}}"] {
            let refused = text.parse::<Template>().unwrap_err();
            assert_eq!(
                refused,
                ParseTemplateError::UnbalancedBrace {
                    input: text.to_owned()
                }
            );
        }
        assert!(matches!(
            "a{}".parse::<Template>(),
            Err(ParseTemplateError::EmptyName { .. })
        ));
    }

    proptest! {
        #[test]
        fn every_template_survives_a_round_trip_through_text(text in "[a-z{}.]{0,20}") {
            if let Ok(template) = text.parse::<Template>() {
                prop_assert_eq!(template.to_string(), text);
            }
        }
    }
}
