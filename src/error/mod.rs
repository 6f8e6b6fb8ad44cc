//! Defines the one error type of the relay and its commands. An error has a code, a text that says what
//! happened, and a hint.
//!
//! Library crates and modules have their own error enums. An error that is reported to the operator is
//! converted to an [`Error`]. The reaction to an error depends only on its [`Code`]
//! ([`Code::disposition`]), never on its text. Nothing here prints or logs.

mod code;
mod listening;
mod map;
mod postgres;
mod pubsub;
mod replication;
mod slot;

pub use code::{Code, Disposition};
pub(crate) use postgres::LoginFor;

use std::fmt;

use printable::{printable, printable_lines};
use serde::Serialize;
use slot_manager::quoted_identifier;

/// Maximum length of an error's text in a log line, in characters before escaping. Without a limit, a line
/// could be of any length, because PostgreSQL's messages may quote a whole value.
const LOGGED_CHARS: usize = 2_000;

/// An error as `postrider` reports it to an operator.
#[derive(Debug)]
pub struct Error {
    code: Code,
    what: String,
    hint: Option<String>,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

/// An error in the JSON output of commands and of the HTTP port, always as the member `error`. Programs
/// depend on these fields, so their names must not change.
#[derive(Debug, Serialize)]
pub(crate) struct ErrorJson<'a> {
    code: &'static str,
    /// What happened and why, on one line.
    what: String,
    hint: &'a str,
}

/// A result whose error is an [`Error`] for the operator.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// Creates an error with the general hint of its code.
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

    /// Creates the error for a failed system call that normally fails only at the limit on open files. If the
    /// call failed for another reason, the code is `internal`.
    pub(crate) fn of_system(what: impl Into<String>, error: std::io::Error) -> Self {
        let code = if is_open_files_limit(&error) {
            Code::OpenFilesLimit
        } else {
            Code::Internal
        };
        Self::new(code, what).caused_by(error)
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

    /// Replaces the placeholders `<relay user>` and `<database>` in the hint with these names.
    #[must_use]
    pub(crate) fn for_role(self, role: &str, database: &str) -> Self {
        let names = [("<relay user>", role), ("<database>", database)];
        let mut hint = self.hint_text().to_owned();
        for (placeholder, name) in names {
            if hint.contains(placeholder) {
                hint = hint.replace(placeholder, &quoted_identifier(name));
            }
        }
        if hint == self.hint_text() {
            return self;
        }
        self.hint(hint)
    }

    /// Puts the place of the mistake, such as file and line, before the text.
    #[must_use]
    pub(crate) fn at(mut self, place: &str) -> Self {
        self.what = format!("{place}: {}", self.what);
        self
    }

    /// Replaces `variable`, the name of an environment variable, with `place` in the text. `place` names the source
    /// from which the value really came.
    #[must_use]
    pub(crate) fn at_place(mut self, variable: &str, place: &str) -> Self {
        // Drop an underlying error that has the same text as this error. At present `causes` hides it. But the text
        // of this error changes below, so `causes` would then show the old text as a cause.
        if let Some(source) = self.source.take()
            && source.to_string() != self.what
        {
            self.source = Some(source);
        }
        self.what = self.what.replace(variable, place);
        self
    }

    /// Replaces a hint that holds only for the relay with a hint for a command. The two differ because the relay
    /// retries by itself and a command does not. A specific hint is replaced only if it begins with
    /// `no action needed: the relay`. Other specific hints hold for commands too.
    #[must_use]
    pub(crate) fn for_command(self) -> Self {
        if self.has_own_hint() {
            let only_waits = self.hint_text().starts_with("no action needed: the relay ");
            return if only_waits {
                self.hint("run the command again")
            } else {
                self
            };
        }
        let hint = match self.code {
            Code::PostgresTimeout => {
                "run the command again; if it repeats, look for locks and high load in PostgreSQL"
            }
            Code::PostgresConnectionLost | Code::PostgresStopping => {
                "run the command again once PostgreSQL answers"
            }
            code => match code.hint().split_once("; the relay ") {
                Some((advice, _)) => advice,
                None => return self,
            },
        };
        self.hint(hint)
    }

    /// Whether the error has a hint that is more specific than the hint of its code.
    pub(crate) fn has_own_hint(&self) -> bool {
        self.hint.is_some()
    }

    /// The code, which is stable across versions.
    pub fn code(&self) -> Code {
        self.code
    }

    /// What happened, without the code, the causes and the hint.
    pub fn what(&self) -> &str {
        &self.what
    }

    /// What the operator should run or change.
    pub fn hint_text(&self) -> &str {
        self.hint.as_deref().unwrap_or_else(|| self.code.hint())
    }

    pub(crate) fn json(&self) -> ErrorJson<'_> {
        ErrorJson {
            code: self.code.name(),
            what: self.to_string(),
            hint: self.hint_text(),
        }
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

/// Whether the operating system has refused to open a file because the process or the machine has too many
/// open files.
pub(crate) fn is_open_files_limit(error: &std::io::Error) -> bool {
    /// EMFILE and ENFILE, the same numbers on Linux and macOS.
    const TOO_MANY: [i32; 2] = [24, 23];
    error
        .raw_os_error()
        .is_some_and(|number| TOO_MANY.contains(&number))
}

/// Formats the error for a log line: what happened and why, on one line of bounded length. The text is escaped,
/// because PostgreSQL and Pub/Sub quote values of rows in their messages, and a row may contain anything.
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

/// Formats the error for a terminal: the code, what happened, the causes, the hint, and where to read
/// more.
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
    fn a_hint_names_the_role_and_the_database() {
        let error = Error::new(Code::ReplicationRight, "no").for_role("Shop relay", "shop");
        let hint = error.hint_text();
        assert!(
            hint.starts_with("ALTER ROLE \"Shop relay\" REPLICATION"),
            "{hint}"
        );
        let error = Error::new(Code::SlotMissing, "no").for_role("a", "b");
        assert!(!error.has_own_hint());
    }

    #[test]
    fn a_command_does_not_say_that_the_relay_retries() {
        for code in Code::ALL {
            let error = Error::new(*code, "no");
            let of_session = error.code().name().starts_with("postgres")
                || error.hint_text().contains("the relay retries");
            if of_session {
                let error = error.for_command();
                let hint = error.hint_text();
                for of_the_relay in ["; the relay ", "the relay re", "no action needed"] {
                    assert!(!hint.contains(of_the_relay), "{code}: {hint}");
                }
            }
        }
        let error = Error::new(Code::PostgresTimeout, "no")
            .hint("mine")
            .for_command();
        assert_eq!(error.hint_text(), "mine");
    }

    #[test]
    fn a_cause_already_in_the_message_is_not_repeated() {
        let error = Error::new(Code::Internal, "x: broken pipe").caused_by("broken pipe");
        assert_eq!(error.to_string(), "x: broken pipe");
    }
}
