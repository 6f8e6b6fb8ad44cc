//! Subscription filters, which select messages by their attributes.
//!
//! The language is described at <https://cloud.google.com/pubsub/docs/subscription-message-filter>:
//! `attributes:key`, `attributes.key = "v"`, `attributes.key != "v"`, `hasPrefix(attributes.key,
//! "v")`, `NOT` (or `-`), `AND`, `OR`, parentheses. `AND` and `OR` may not be combined without
//! parentheses. A filter is evaluated once per message, when the message is published.

use std::iter::Peekable;
use std::str::Chars;

use crate::wire::MessageView;

/// Maximum length of a filter in bytes, as in the service. This limit also keeps the parser from recursing
/// deeply.
const MAX_FILTER_BYTES: usize = 256;

/// A parsed filter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Filter {
    Has { key: String },
    Equals { key: String, value: String },
    HasPrefix { key: String, prefix: String },
    Not(Box<Filter>),
    All(Vec<Filter>),
    Any(Vec<Filter>),
}

/// Why a filter is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum FilterError {
    #[error("the filter has {bytes} bytes, the maximum is {MAX_FILTER_BYTES}; shorten it")]
    TooLong { bytes: usize },
    #[error("expected {expected}, found {found}")]
    Unexpected {
        expected: &'static str,
        found: String,
    },
    #[error("a string literal has no closing quotation mark")]
    OpenString,
    #[error("AND and OR are combined without parentheses; put parentheses around one of them")]
    MixedOperators,
}

impl Filter {
    /// Parses a filter. Returns `None` for an empty filter, which accepts every message.
    pub(crate) fn parse(text: &str) -> Result<Option<Self>, FilterError> {
        if text.len() > MAX_FILTER_BYTES {
            return Err(FilterError::TooLong { bytes: text.len() });
        }
        if text.trim().is_empty() {
            return Ok(None);
        }
        let mut parser = Parser {
            tokens: tokenize(text)?.into_iter().peekable(),
        };
        let filter = parser.expression()?;
        match parser.tokens.next() {
            None => Ok(Some(filter)),
            Some(token) => Err(unexpected("AND, OR or the end", Some(token))),
        }
    }

    pub(crate) fn matches(&self, message: MessageView<'_>) -> bool {
        match self {
            Self::Has { key } => message.attribute(key).is_some(),
            Self::Equals { key, value } => message.attribute(key) == Some(value),
            Self::HasPrefix { key, prefix } => message
                .attribute(key)
                .is_some_and(|value| value.starts_with(prefix)),
            Self::Not(inner) => !inner.matches(message),
            Self::All(parts) => parts.iter().all(|part| part.matches(message)),
            Self::Any(parts) => parts.iter().any(|part| part.matches(message)),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Token {
    /// A key, an operator in letters, or `attributes`.
    Word(String),
    Text(String),
    /// One of `: . , ( ) = -`, or `!` for `!=`.
    Symbol(char),
}

fn tokenize(text: &str) -> Result<Vec<Token>, FilterError> {
    let mut tokens = Vec::new();
    let mut chars = text.chars().peekable();
    while let Some(&next) = chars.peek() {
        match next {
            c if c.is_whitespace() => {
                chars.next();
            }
            '"' => tokens.push(Token::Text(string_literal(&mut chars)?)),
            ':' | '.' | ',' | '(' | ')' | '=' | '-' => {
                chars.next();
                tokens.push(Token::Symbol(next));
            }
            '!' => {
                chars.next();
                match chars.next() {
                    Some('=') => tokens.push(Token::Symbol('!')),
                    other => {
                        let found = other.map_or("the end".to_owned(), String::from);
                        return Err(FilterError::Unexpected {
                            expected: "= after !",
                            found,
                        });
                    }
                }
            }
            c if is_key_char(c) => {
                let mut word = String::new();
                while let Some(c) = chars.next_if(|c| is_key_char(*c)) {
                    word.push(c);
                }
                tokens.push(Token::Word(word));
            }
            c => {
                let expected = "a key, a string in quotation marks or an operator";
                return Err(FilterError::Unexpected {
                    expected,
                    found: c.to_string(),
                });
            }
        }
    }
    Ok(tokens)
}

/// Whether the character can be part of a key without quotation marks. A leading `-` never gets here,
/// because the tokenizer reads it as an operator.
fn is_key_char(c: char) -> bool {
    c.is_alphanumeric() || matches!(c, '_' | '-')
}

fn string_literal(chars: &mut Peekable<Chars<'_>>) -> Result<String, FilterError> {
    chars.next();
    let mut literal = String::new();
    loop {
        match chars.next().ok_or(FilterError::OpenString)? {
            '"' => return Ok(literal),
            '\\' => literal.push(match chars.next().ok_or(FilterError::OpenString)? {
                'n' => '\n',
                't' => '\t',
                'r' => '\r',
                same @ ('"' | '\\' | '\'') => same,
                other => {
                    let expected = "one of \\n \\t \\r \\\" \\' \\\\ in a string";
                    return Err(FilterError::Unexpected {
                        expected,
                        found: format!("\\{other}"),
                    });
                }
            }),
            other => literal.push(other),
        }
    }
}

fn unexpected(expected: &'static str, found: Option<Token>) -> FilterError {
    let found = match found {
        None => "the end".to_owned(),
        Some(Token::Word(word)) => word,
        Some(Token::Text(text)) => format!("{text:?}"),
        Some(Token::Symbol('!')) => "!=".to_owned(),
        Some(Token::Symbol(symbol)) => symbol.to_string(),
    };
    FilterError::Unexpected { expected, found }
}

struct Parser {
    tokens: Peekable<std::vec::IntoIter<Token>>,
}

impl Parser {
    fn expression(&mut self) -> Result<Filter, FilterError> {
        let first = self.term()?;
        let operator = if self.next_is_word("AND") {
            "AND"
        } else if self.next_is_word("OR") {
            "OR"
        } else {
            return Ok(first);
        };
        let mut parts = vec![first];
        while self.next_is_word(operator) {
            self.tokens.next();
            parts.push(self.term()?);
        }
        if self.next_is_word("AND") || self.next_is_word("OR") {
            return Err(FilterError::MixedOperators);
        }
        Ok(if operator == "AND" {
            Filter::All(parts)
        } else {
            Filter::Any(parts)
        })
    }

    fn term(&mut self) -> Result<Filter, FilterError> {
        const EXPECTED: &str = "attributes, hasPrefix, NOT or (";
        match self.tokens.next() {
            Some(Token::Symbol('-')) => Ok(Filter::Not(Box::new(self.term()?))),
            Some(Token::Symbol('(')) => {
                let inner = self.expression()?;
                self.symbol(')', ")")?;
                Ok(inner)
            }
            Some(Token::Word(word)) => match word.as_str() {
                "NOT" => Ok(Filter::Not(Box::new(self.term()?))),
                "attributes" => self.comparison(),
                "hasPrefix" => self.has_prefix(),
                _ => Err(unexpected(EXPECTED, Some(Token::Word(word)))),
            },
            other => Err(unexpected(EXPECTED, other)),
        }
    }

    /// Parses the comparison after `attributes`.
    fn comparison(&mut self) -> Result<Filter, FilterError> {
        match self.tokens.next() {
            Some(Token::Symbol(':')) => Ok(Filter::Has { key: self.key()? }),
            Some(Token::Symbol('.')) => {
                let key = self.key()?;
                match self.tokens.next() {
                    Some(Token::Symbol('=')) => Ok(Filter::Equals {
                        key,
                        value: self.text()?,
                    }),
                    Some(Token::Symbol('!')) => Ok(Filter::Not(Box::new(Filter::Equals {
                        key,
                        value: self.text()?,
                    }))),
                    other => Err(unexpected("= or !=", other)),
                }
            }
            other => Err(unexpected(": or . after attributes", other)),
        }
    }

    fn has_prefix(&mut self) -> Result<Filter, FilterError> {
        self.symbol('(', "( after hasPrefix")?;
        if !self.next_is_word("attributes") {
            return Err(unexpected("attributes", self.tokens.next()));
        }
        self.tokens.next();
        self.symbol('.', ". after attributes")?;
        let key = self.key()?;
        self.symbol(',', ",")?;
        let prefix = self.text()?;
        self.symbol(')', ")")?;
        Ok(Filter::HasPrefix { key, prefix })
    }

    fn key(&mut self) -> Result<String, FilterError> {
        match self.tokens.next() {
            Some(Token::Word(key) | Token::Text(key)) => Ok(key),
            other => Err(unexpected("an attribute key", other)),
        }
    }

    fn text(&mut self) -> Result<String, FilterError> {
        match self.tokens.next() {
            Some(Token::Text(text)) => Ok(text),
            other => Err(unexpected("a string in quotation marks", other)),
        }
    }

    fn symbol(&mut self, symbol: char, expected: &'static str) -> Result<(), FilterError> {
        match self.tokens.next() {
            Some(Token::Symbol(found)) if found == symbol => Ok(()),
            other => Err(unexpected(expected, other)),
        }
    }

    fn next_is_word(&mut self, word: &str) -> bool {
        matches!(self.tokens.peek(), Some(Token::Word(next)) if next == word)
    }
}

#[cfg(test)]
mod tests;
