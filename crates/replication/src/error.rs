//! Why a connection or a session failed.
//!
//! Callers branch on the [`ErrorKind`] and the SQLSTATE in it, never on a text. The texts contain no
//! password and no part of a URL.

use printable::printable;
use thiserror::Error;

/// The kind of a failure.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ErrorKind {
    /// The URL, a connection parameter or a variable of libpq is wrong.
    InvalidTarget,
    /// No server can be reached, or it does not answer in time.
    Unreachable,
    /// A TLS connection of the kind that `sslmode` requires could not be opened.
    Tls,
    /// The command that prints the password has failed.
    PasswordCommand,
    /// We cannot log in: no password, a password file that others may read, a login method that is not
    /// supported, or a server that does not prove who it is.
    Authentication,
    /// The server is a standby server, but `target_session_attrs` requires a primary.
    Standby,
    /// The server refused the login.
    LoginRefused {
        /// SQLSTATE.
        sqlstate: String,
        /// The function of the server that reported the error. It tells apart several limits that
        /// share one SQLSTATE.
        routine: String,
    },
    /// The server refused a command, such as START_REPLICATION.
    CommandRefused {
        /// SQLSTATE.
        sqlstate: String,
    },
    /// The server refused to create the slot.
    SlotRefused {
        /// SQLSTATE.
        sqlstate: String,
    },
    /// The server ended the stream with an error.
    StreamEnded {
        /// SQLSTATE.
        sqlstate: String,
    },
    /// The connection broke, or the server closed it without a reason.
    ConnectionLost,
    /// Another session has the slot, or may soon get it.
    LeaseLost,
    /// The server sends a row that is too large to be an event.
    RowTooLarge,
    /// The server sent something that is not in the protocol.
    Protocol,
    /// The operating system refused to start a thread, or this crate has a bug.
    Internal,
}

/// A failure: its kind, what happened, often a hint, and the cause.
#[derive(Debug, Error)]
#[error("{what}")]
pub struct ReplicationError {
    kind: ErrorKind,
    what: String,
    hint: Option<String>,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

/// Result with a [`ReplicationError`].
pub(crate) type Result<T, E = ReplicationError> = std::result::Result<T, E>;

impl ReplicationError {
    /// `what` says what happened and where. It must not contain a password.
    pub(crate) fn new(kind: ErrorKind, what: impl Into<String>) -> Self {
        Self {
            kind,
            what: what.into(),
            hint: None,
            source: None,
        }
    }

    /// Adds what the operator should run or change.
    #[must_use]
    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Adds the cause.
    #[must_use]
    pub(crate) fn caused_by(
        mut self,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        self.source = Some(source.into());
        self
    }

    /// The kind.
    pub fn kind(&self) -> &ErrorKind {
        &self.kind
    }

    /// What the operator should run or change. Empty if the error has no hint of its own.
    pub fn hint_text(&self) -> &str {
        self.hint.as_deref().unwrap_or_default()
    }

    /// What happened and why, on one line, for a log.
    pub(crate) fn with_cause(&self) -> String {
        let text = match &self.source {
            Some(source) => format!("{}: {source}", self.what),
            None => self.what.clone(),
        };
        printable(&text).into_owned()
    }
}
