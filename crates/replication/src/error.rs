//! The error type of this crate: why a connection or a session failed.
//!
//! Callers branch on the [`ErrorKind`] and its SQLSTATE, never on a text. No text contains a password. A text may
//! name the user, server and database of a connection. But an error about an invalid URL shows no part of the URL.

use printable::printable;
use thiserror::Error;

/// The kind of a failure.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ErrorKind {
    /// The URL, a connection parameter or an environment variable of libpq is wrong.
    InvalidTarget,
    /// No server can be reached, or it does not answer in time.
    Unreachable,
    /// A TLS connection of the kind that `sslmode` requires could not be opened.
    Tls,
    /// `password_command` failed.
    PasswordCommand,
    /// We cannot log in. For example, there is no usable password, the server asks for an unsupported login
    /// method, or the server does not prove its identity. A password file that other users may access counts
    /// as unusable.
    Authentication,
    /// The server is a standby server, but `target_session_attrs` requires a primary.
    Standby,
    /// The server refused the login.
    LoginRefused {
        /// The SQLSTATE that the server reported.
        sqlstate: String,
        /// The function in the server's source that reported the error. It distinguishes several
        /// limits that share one SQLSTATE.
        routine: String,
    },
    /// The server refused a command, such as START_REPLICATION.
    CommandRefused {
        /// The SQLSTATE that the server reported.
        sqlstate: String,
    },
    /// The server refused to create the slot.
    SlotRefused {
        /// The SQLSTATE that the server reported.
        sqlstate: String,
    },
    /// The server ended the stream with an error.
    StreamEnded {
        /// The SQLSTATE that the server reported.
        sqlstate: String,
    },
    /// The connection broke, or the server closed it without giving a reason.
    ConnectionLost,
    /// Another session has the slot, or may soon have it.
    LeaseLost,
    /// The server sends a row that is too large to be an event.
    RowTooLarge,
    /// The server sent something that violates the protocol.
    Protocol,
    /// The operating system refused to start a thread, or this crate has a bug.
    Internal,
}

/// A failure: its kind, what happened, often a hint for the operator, and the cause.
#[derive(Debug, Error)]
#[error("{what}")]
pub struct ReplicationError {
    kind: ErrorKind,
    what: String,
    hint: Option<String>,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

/// A `Result` with [`ReplicationError`] as its default error type.
pub(crate) type Result<T, E = ReplicationError> = std::result::Result<T, E>;

impl ReplicationError {
    /// Creates an error. `what` says what happened and where, and must not contain a password.
    pub(crate) fn new(kind: ErrorKind, what: impl Into<String>) -> Self {
        Self {
            kind,
            what: what.into(),
            hint: None,
            source: None,
        }
    }

    /// Adds a hint: what the operator should run or change.
    #[must_use]
    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Adds the underlying error as the cause.
    #[must_use]
    pub(crate) fn caused_by(
        mut self,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        self.source = Some(source.into());
        self
    }

    /// The kind of the failure.
    pub fn kind(&self) -> &ErrorKind {
        &self.kind
    }

    /// The hint: what the operator should run or change. Empty if the error has no hint.
    pub fn hint_text(&self) -> &str {
        self.hint.as_deref().unwrap_or_default()
    }

    /// What happened and why, on one line, for the relay's log.
    pub(crate) fn with_cause(&self) -> String {
        let text = match &self.source {
            Some(source) => format!("{}: {source}", self.what),
            None => self.what.clone(),
        };
        printable(&text).into_owned()
    }
}
