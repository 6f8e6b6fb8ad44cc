//! The result of a poll of the supervisor.

use crate::error::{Code, Error};

/// The result of a poll.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::session) enum Supervision {
    PublicationRight,
    /// The publication is wrong, or cannot be checked.
    PublicationUnsure,
    /// The server is shutting down: it accepts no new sessions or writes, and waits until this
    /// relay has confirmed the WAL or has disconnected.
    ServerStopping {
        /// Whether the publication was right at the last check. While the server shuts down, nobody can alter the
        /// publication, because the server accepts no writes.
        publication_was_right: bool,
    },
    /// A captured table shares rows with a table that another slot captures, so the relay must stop at once.
    TableCaptured {
        what: String,
        hint: String,
    },
}

impl Supervision {
    /// Returns the result of a poll that has failed with the error `table-captured`, because another slot captures rows
    /// of a captured table.
    ///
    /// # Errors
    /// Returns any other error unchanged.
    pub(super) fn of_another_slot(error: Error) -> Result<Self, Error> {
        match error.code() {
            Code::TableCaptured => Ok(Self::TableCaptured {
                what: error.what().to_owned(),
                hint: error.hint_text().to_owned(),
            }),
            _ => Err(error),
        }
    }

    pub(in crate::session) fn publication_is_right(&self) -> bool {
        match self {
            Self::PublicationRight => true,
            Self::PublicationUnsure | Self::TableCaptured { .. } => false,
            Self::ServerStopping {
                publication_was_right,
            } => *publication_was_right,
        }
    }

    /// Returns the error with which the session must end now. `None` if the session may continue.
    pub(in crate::session) fn ends_session(&self) -> Option<Error> {
        match self {
            Self::PublicationRight | Self::PublicationUnsure | Self::ServerStopping { .. } => None,
            Self::TableCaptured { what, hint } => {
                Some(Error::new(Code::TableCaptured, what.clone()).hint(hint.clone()))
            }
        }
    }
}
