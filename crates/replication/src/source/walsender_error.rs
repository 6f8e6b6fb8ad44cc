//! Turns the walsender's errors into typed errors, and logs its notices.

use fallible_iterator::FallibleIterator;
use postgres_protocol::message::backend::ErrorFields;
use printable::printable;

use crate::LOG_TARGET;
use crate::connection::Target;
use crate::error::{ErrorKind, ReplicationError};

/// Builds the error for a command that the server refused.
pub(super) fn server_error(fields: ErrorFields<'_>, what: &str) -> ReplicationError {
    let (sqlstate, message) = code_and_message(fields);
    let what = with_sqlstate(what, &message, &sqlstate);
    ReplicationError::new(ErrorKind::CommandRefused { sqlstate }, what)
}

/// Describes a failure: our own words first, then the server's message and SQLSTATE.
pub(super) fn with_sqlstate(what: &str, message: &str, sqlstate: &str) -> String {
    format!("{what}: {message} (SQLSTATE {sqlstate})")
}

/// Logs a notice of the walsender, because some faults are visible only as notices. For example,
/// PostgreSQL 18 skips the changes of a missing publication with nothing but a warning.
pub(super) fn log_notice(fields: ErrorFields<'_>) {
    let (sqlstate, message) = code_and_message(fields);
    let message = printable(&message);
    tracing::warn!(target: LOG_TARGET, %sqlstate, "warning from PostgreSQL's walsender: {message}");
}

pub(super) fn code_and_message(fields: ErrorFields<'_>) -> (String, String) {
    let ServerErrorFields {
        sqlstate, message, ..
    } = ServerErrorFields::read(fields);
    (sqlstate, message)
}

/// The fields that we read from an ErrorResponse or a NoticeResponse.
#[derive(Debug, Default)]
pub(super) struct ServerErrorFields {
    pub(super) sqlstate: String,
    /// The server's message, followed by its detail.
    pub(super) message: String,
    /// The function in the server's source that reported the error.
    pub(super) routine: String,
}

impl ServerErrorFields {
    pub(super) fn read(mut fields: ErrorFields<'_>) -> Self {
        let mut reported = Self::default();
        while let Ok(Some(field)) = fields.next() {
            let value = String::from_utf8_lossy(field.value_bytes());
            match field.type_() {
                b'C' => reported.sqlstate = value.into_owned(),
                b'M' => reported.message = value.into_owned(),
                b'D' => reported.message.push_str(&format!("; {value}")),
                b'R' => reported.routine = value.into_owned(),
                _ => {}
            }
        }
        reported
    }
}

pub(super) fn protocol(error: std::io::Error) -> ReplicationError {
    ReplicationError::new(ErrorKind::Protocol, "cannot parse PostgreSQL's answer").caused_by(error)
}

pub(super) fn unexpected(during: &str) -> ReplicationError {
    ReplicationError::new(
        ErrorKind::Protocol,
        format!("unexpected message during {during}"),
    )
}

pub(super) fn lost(what: &str) -> ReplicationError {
    ReplicationError::new(
        ErrorKind::ConnectionLost,
        format!("replication session: {what}"),
    )
}

/// Builds the error for an ErrorResponse that ends the stream.
pub(super) fn stream_error(fields: ErrorFields<'_>) -> ReplicationError {
    let (sqlstate, message) = code_and_message(fields);
    let what = with_sqlstate("the replication session ended", &message, &sqlstate);
    ReplicationError::new(ErrorKind::StreamEnded { sqlstate }, what)
}

/// Builds the error for an ErrorResponse during the login.
pub(super) fn login_refused(fields: ErrorFields<'_>, target: &Target) -> ReplicationError {
    let ServerErrorFields {
        sqlstate,
        message,
        routine,
    } = ServerErrorFields::read(fields);
    let what = cannot_log_in(target);
    let what = with_sqlstate(&what, &message, &sqlstate);
    ReplicationError::new(ErrorKind::LoginRefused { sqlstate, routine }, what)
}

pub(super) fn cannot_log_in(target: &Target) -> String {
    format!("cannot log in as {target}")
}
