//! Defines the one error type of the relay and its commands: a code, what happened, and a hint.
//!
//! Library crates and modules have their own error enums. An error that reaches the operator becomes
//! an [`Error`]. The program's reaction depends only on its [`Code`] ([`Code::disposition`]), never on
//! its text. Nothing here prints or logs.

mod code;
mod map;
mod postgres;
mod pubsub;
mod replication;
mod slot;

pub use code::{Code, Disposition};
pub(crate) use postgres::LoginFor;

use std::fmt;

use printable::{printable, printable_lines};

/// Maximum length of an error's text in a log line, in characters. PostgreSQL may quote a value of any
/// size.
const LOGGED_CHARS: usize = 2_000;

/// An error as `postrider` reports it to an operator.
#[derive(Debug)]
pub struct Error {
    code: Code,
    what: String,
    hint: Option<String>,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

/// Result with the operator's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// An error with the code's own hint.
    ///
    /// `what` says what happened and where. `what` must not contain a password, token or payload.
    pub fn new(code: Code, what: impl Into<String>) -> Self {
        Self {
            code,
            what: what.into(),
            hint: None,
            source: None,
        }
    }

    /// Replaces the code's general hint with a specific one.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Adds the underlying error, which [`Report`] shows as `cause:`.
    #[must_use]
    pub fn caused_by(
        mut self,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        self.source = Some(source.into());
        self
    }

    /// The code, stable across versions.
    pub fn code(&self) -> Code {
        self.code
    }

    /// What happened, without the code, cause and hint.
    pub fn what(&self) -> &str {
        &self.what
    }

    /// What to run or change.
    pub fn hint_text(&self) -> &str {
        self.hint.as_deref().unwrap_or_else(|| self.code.hint())
    }

    /// The texts of the underlying errors, outermost first. Leaves out a text that the message or the
    /// previous cause already contains.
    pub fn causes(&self) -> Vec<String> {
        let mut causes: Vec<String> = Vec::new();
        let mut next = self
            .source
            .as_ref()
            .map(|s| &**s as &(dyn std::error::Error + 'static));
        while let Some(cause) = next {
            let text = cause.to_string();
            if causes.last().is_none_or(|last| !last.contains(&text)) && !self.what.contains(&text)
            {
                causes.push(text);
            }
            next = cause.source();
        }
        causes
    }
}

/// The form for a log line: what happened and why, escaped, on one line of bounded length. Messages of
/// PostgreSQL and Pub/Sub may quote text of any kind that somebody wrote into a row.
impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = self.what.clone();
        for cause in self.causes() {
            text.push_str(": ");
            text.push_str(&cause);
        }
        match text.char_indices().nth(LOGGED_CHARS) {
            Some((end, _)) => write!(f, "{}...", printable(&text[..end])),
            None => f.write_str(&printable(&text)),
        }
    }
}

impl std::error::Error for Error {}

/// The form for a terminal: code, what, causes, hint and where to read more.
pub struct Report<'a>(pub &'a Error);

impl fmt::Display for Report<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Report(error) = self;
        let what = printable_lines(&error.what);
        writeln!(f, "error[{}]: {what}", error.code)?;
        for cause in error.causes() {
            writeln!(f, "  cause: {}", printable_lines(&cause))?;
        }
        writeln!(f, "  hint:  {}", printable_lines(error.hint_text()))?;
        write!(f, "  more:  postrider explain {}", error.code)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_shows_code_cause_and_hint_once() {
        let error = Error::new(Code::PortInUse, "cannot listen on 127.0.0.1:9464")
            .caused_by(std::io::Error::other("address already in use"));
        let text = Report(&error).to_string();
        assert!(text.starts_with("error[port-in-use]: cannot listen on 127.0.0.1:9464\n"));
        assert!(text.contains("cause: address already in use"));
        assert!(text.contains("hint:  "));
        assert!(text.ends_with("postrider explain port-in-use"));
    }

    #[test]
    fn the_text_for_a_log_is_one_line_of_bounded_length() {
        let forged = "invalid value: \"x\n2026-01-01 ERROR forged \u{1b}[31m\"";
        let error = Error::new(Code::PostgresStatement, forged).caused_by("b\r\nc");
        let text = error.to_string();
        assert!(!text.contains(char::is_control), "{text}");
        assert!(text.contains("x\\n2026"), "{text}");
        let long = Error::new(Code::PostgresStatement, "\u{e9}".repeat(1_000_000));
        assert_eq!(long.to_string().chars().count(), LOGGED_CHARS + 3);
    }

    #[test]
    fn a_cause_already_in_the_message_is_not_repeated() {
        let error = Error::new(Code::Internal, "x: broken pipe").caused_by("broken pipe");
        assert_eq!(error.to_string(), "x: broken pipe");
    }
}
