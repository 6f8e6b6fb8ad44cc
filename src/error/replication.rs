//! Converts errors of a connection or of a replication session into errors for the operator, by their
//! kind and SQLSTATE and never by text.

use replication::{ErrorKind, ReplicationError};

use super::postgres::{GRANT_CONNECT, LoginFor, code_of, code_of_login};
use super::{Code, Error, is_open_files_limit};

const ANOTHER_CREATES: &str = "no action needed: another relay is creating the slot";
const NO_FAILOVER: &str = "slot_failover needs PostgreSQL 17 or newer: set it to false";

impl From<ReplicationError> for Error {
    fn from(error: ReplicationError) -> Self {
        if comes_from_open_files_limit(&error) {
            return Error::new(Code::OpenFilesLimit, error.to_string()).caused_by(error);
        }
        let (code, hint) = code_and_hint(error.kind());
        let own = Error::new(code, error.to_string());
        let own = match (error.hint_text(), hint) {
            ("", None) => own,
            ("", Some(hint)) => own.hint(hint),
            (hint, _) => own.hint(hint),
        };
        own.caused_by(error)
    }
}

/// Whether the limit on open files has caused the error, for example because a connection needs a file descriptor.
fn comes_from_open_files_limit(error: &ReplicationError) -> bool {
    let mut cause = std::error::Error::source(error);
    while let Some(next) = cause {
        if next.downcast_ref().is_some_and(is_open_files_limit) {
            return true;
        }
        cause = next.source();
    }
    false
}

/// Returns the code, and a hint if there is one that is more specific than the code's own.
fn code_and_hint(kind: &ErrorKind) -> (Code, Option<&'static str>) {
    let code = match kind {
        ErrorKind::InvalidTarget => Code::DatabaseUrlInvalid,
        ErrorKind::Unreachable => Code::PostgresUnreachable,
        ErrorKind::Tls => Code::PostgresTls,
        ErrorKind::PasswordCommand => Code::PasswordCommand,
        ErrorKind::Authentication => Code::PostgresAuthentication,
        ErrorKind::Standby => Code::PostgresStandby,
        ErrorKind::LoginRefused { sqlstate, routine } => {
            let code = code_of_login(sqlstate, routine, LoginFor::Replication);
            let hint = (code == Code::PrivilegeMissing).then_some(GRANT_CONNECT);
            return (code, hint);
        }
        ErrorKind::CommandRefused { sqlstate } => of_command(sqlstate),
        ErrorKind::SlotRefused { sqlstate } => return of_new_slot(sqlstate),
        ErrorKind::StreamEnded { sqlstate } => of_stream(sqlstate),
        ErrorKind::ConnectionLost => Code::PostgresConnectionLost,
        ErrorKind::LeaseLost => Code::LeaseLost,
        // The server sends the same row again each time the stream is opened, so no retry can succeed.
        ErrorKind::RowTooLarge => Code::SlotStuck,
        ErrorKind::Protocol => Code::ReplicationProtocol,
        ErrorKind::Internal => Code::Internal,
    };
    (code, None)
}

/// Returns the code for a command that the walsender refused.
fn of_command(sqlstate: &str) -> Code {
    match sqlstate {
        // On a walsender, the missing privilege is always REPLICATION.
        "42501" => Code::ReplicationRight,
        "42704" => Code::SlotMissing,
        // Before PostgreSQL 16 a standby server cannot decode WAL for a slot.
        "0A000" => Code::PostgresStandby,
        // "Object not in prerequisite state": the slot is invalid or cannot be used.
        "55000" => Code::SlotLost,
        _ => code_of(sqlstate),
    }
}

/// Returns the code and hint for a CREATE_REPLICATION_SLOT that the walsender refused.
fn of_new_slot(sqlstate: &str) -> (Code, Option<&'static str>) {
    match sqlstate {
        // Another relay is creating the slot. At our next attempt that relay holds the slot, so we become its
        // standby.
        "42710" => (Code::SlotBusy, Some(ANOTHER_CREATES)),
        "42601" => (Code::PostgresVersion, Some(NO_FAILOVER)),
        "55000" => (Code::WalLevel, None),
        "42501" | "0A000" => (of_command(sqlstate), None),
        _ => (code_of(sqlstate), None),
    }
}

/// Returns the code for an error that ended the stream. Some of these errors come back at the same WAL position
/// whenever the stream is opened again. Their code is `slot-stuck`.
fn of_stream(sqlstate: &str) -> Code {
    match sqlstate {
        // While streaming, the missing object is the publication: it did not exist yet, or no longer
        // existed, at this WAL position.
        "42704" => Code::PublicationMissing,
        // The stream cannot get past this WAL position. Known causes:
        // - An internal error of decoding, such as "could not map filenode" when a table was rewritten
        //   while the slot was being created.
        // - A missing file, because WAL that the slot needs was removed although the server still reports
        //   it as reserved, or because the data is damaged.
        // - A row that PostgreSQL cannot send, because it has bytes that are not valid UTF-8 (data
        //   exceptions), or a value too large for a message or for the server's memory.
        s if s.starts_with("22") || ["XX000", "XX001", "58P01", "54000", "53200"].contains(&s) => {
            Code::SlotStuck
        }
        _ => of_command(sqlstate),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_that_ends_the_stream_is_classified_by_its_sqlstate_alone() {
        assert_eq!(of_stream("42704"), Code::PublicationMissing);
        for of_this_place in [
            "XX000", "XX001", "58P01", "22021", "22P05", "54000", "53200",
        ] {
            assert_eq!(of_stream(of_this_place), Code::SlotStuck, "{of_this_place}");
        }
        assert_eq!(of_stream("57P01"), Code::PostgresConnectionLost);
        assert_eq!(of_stream("55000"), Code::SlotLost);
    }

    #[test]
    fn an_error_that_says_the_server_is_a_standby_is_waited_out() {
        assert_eq!(of_command("0A000"), Code::PostgresStandby);
        assert_eq!(of_new_slot("0A000").0, Code::PostgresStandby);
    }

    #[test]
    fn each_reason_why_no_slot_can_be_created_has_its_own_code_or_hint() {
        assert_eq!(
            of_new_slot("42710"),
            (Code::SlotBusy, Some(ANOTHER_CREATES))
        );
        assert_eq!(
            of_new_slot("42601"),
            (Code::PostgresVersion, Some(NO_FAILOVER))
        );
        assert_eq!(of_new_slot("55000").0, Code::WalLevel);
        assert_eq!(of_new_slot("53400").0, Code::ReplicationSlotsUsedUp);
    }

    #[test]
    fn an_error_of_the_connection_keeps_its_text_hint_and_cause() {
        let url = "postgres://u@h/d?sslmode=on";
        let error = replication::Target::from_settings(url, &replication::Environment::new());
        let error = Error::from(error.expect_err("a wrong value"));
        assert_eq!(error.code(), Code::DatabaseUrlInvalid);
        assert_eq!(error.to_string(), "sslmode has an unknown value");
        assert!(error.hint_text().contains("verify-full"));
    }
}
