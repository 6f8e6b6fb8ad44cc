//! Errors and notices of the walsender, as errors for the operator and as log lines.

use fallible_iterator::FallibleIterator;
use postgres_protocol::message::backend::ErrorFields;
use printable::printable;

use crate::error::{Code, Error};

/// The operator's error for an ErrorResponse after login.
pub(super) fn server_error(fields: ErrorFields<'_>, what: &str) -> Error {
    let (sqlstate, message) = code_and_message(fields);
    walsender_error(&sqlstate, &message, what)
}

/// The same, from an SQLSTATE and a message.
pub(super) fn walsender_error(sqlstate: &str, message: &str, what: &str) -> Error {
    let error = Error::from_sqlstate(sqlstate, message, what);
    match sqlstate {
        // On a walsender, a missing privilege is always REPLICATION.
        "42501" => Error::new(Code::ReplicationRight, error.what().to_owned()),
        "42704" => Error::new(Code::SlotMissing, error.what().to_owned()),
        // Before PostgreSQL 16 a standby cannot decode.
        "0A000" => Error::new(Code::PostgresStandby, error.what().to_owned()),
        // "Object not in prerequisite state": the slot is invalid or not usable.
        "55000" => Error::new(Code::SlotLost, error.what().to_owned()),
        _ => error,
    }
}

/// Some faults are visible only as notices of the walsender. PostgreSQL 18, for example, skips the
/// changes of a missing publication with nothing but a warning.
pub(super) fn log_notice(fields: ErrorFields<'_>) {
    let (sqlstate, message) = code_and_message(fields);
    let message = printable(&message);
    tracing::warn!(%sqlstate, "warning from PostgreSQL's walsender: {message}");
}

pub(super) fn code_and_message(fields: ErrorFields<'_>) -> (String, String) {
    let Reported {
        sqlstate, message, ..
    } = Reported::read(fields);
    (sqlstate, message)
}

/// The fields that we read from an ErrorResponse or NoticeResponse.
#[derive(Debug, Default)]
pub(super) struct Reported {
    pub(super) sqlstate: String,
    /// The message, followed by its detail.
    pub(super) message: String,
    /// The server function that reported it.
    pub(super) routine: String,
}

impl Reported {
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

pub(super) fn protocol(error: std::io::Error) -> Error {
    Error::new(
        Code::ReplicationProtocol,
        "cannot parse PostgreSQL's answer",
    )
    .caused_by(error)
}

pub(super) fn unexpected(during: &str) -> Error {
    Error::new(
        Code::ReplicationProtocol,
        format!("unexpected message during {during}"),
    )
}

pub(super) fn lost(what: &str) -> Error {
    Error::new(
        Code::PostgresConnectionLost,
        format!("replication session: {what}"),
    )
}

/// An error that ends the stream. Some of these errors recur at the same WAL position each time the
/// stream is opened.
pub(super) fn stream_error(sqlstate: &str, message: &str) -> Error {
    let error = walsender_error(sqlstate, message, "the replication session ended");
    match sqlstate {
        // While streaming, the missing object is the publication. It did not exist yet, or no
        // longer existed, at this position of the WAL.
        "42704" => Error::new(Code::PublicationMissing, error.what().to_owned()),
        // - Internal error of decoding. Seen: "could not map filenode", when a table was rewritten
        //   while the slot was being created.
        // - Missing file: WAL that the slot needs was removed, although the server still reports it
        //   as reserved. Or damaged data.
        // - A row that PostgreSQL cannot send: bytes that are not valid UTF-8 (data exceptions), or
        //   a value too large for a message or for the server's memory.
        s if s.starts_with("22") || ["XX000", "XX001", "58P01", "54000", "53200"].contains(&s) => {
            Error::new(Code::SlotStuck, error.what().to_owned())
        }
        _ => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_that_ends_the_stream_is_classified_by_its_sqlstate_alone() {
        let code = |sqlstate| stream_error(sqlstate, "any text").code();
        assert_eq!(code("42704"), Code::PublicationMissing);
        for of_this_place in [
            "XX000", "XX001", "58P01", "22021", "22P05", "54000", "53200",
        ] {
            assert_eq!(code(of_this_place), Code::SlotStuck, "{of_this_place}");
        }
        assert_eq!(code("57P01"), Code::PostgresConnectionLost);
    }
}
