//! Converts errors of PostgreSQL into errors for the operator, by SQLSTATE and never by text.

use std::error::Error as _;

use tokio_postgres::error::{Error as PgError, SqlState};

use super::{Code, Error};

/// The hint for SQLSTATE 53400 on an SQL session, where it means that the limit on temporary files is reached. On a
/// replication session it means that no slot is free ([`code_of`]).
const TEMP_FILES: &str = "raise temp_file_limit for the relay's role, as a superuser: ALTER ROLE \
    <relay user> SET temp_file_limit = ...; or raise work_mem, so that it needs fewer temporary files";

/// The hint for a text that cannot be converted between UTF-8 and the encoding of the database. The text may be an
/// argument of the command or a value of a row. Both have the same SQLSTATE, so the hint covers both cases.
const OTHER_ENCODING: &str = "a character has no equivalent in UTF-8 or in the encoding of the database (`SHOW \
    server_encoding`): if it is in an argument of the command, no row contains it, so search for something else; \
    otherwise correct the row";

/// The hint for an answer that the client cannot use.
const UNUSABLE_ANSWER: &str = "`postrider check` looks for changed objects; if it finds none, this is a bug in \
    Postrider: please report it with the relay's log";

/// Returns the code for a failure that the server reported with `sqlstate`.
///
/// Source: PostgreSQL's Appendix A, and the errors that the walsender's source code raises.
pub(super) fn code_of(sqlstate: &str) -> Code {
    match sqlstate {
        "28000" | "28P01" => Code::PostgresAuthentication,
        "42501" => Code::PrivilegeMissing,
        // 42703 (undefined column) means that one of Postrider's own tables has an older schema. It cannot be
        // about a captured table, because statements on captured tables name only columns that the catalogue
        // contains.
        "42P01" | "3F000" | "42883" | "42703" => Code::SchemaMissing,
        "55006" => Code::SlotHeld,
        "53300" => Code::PostgresTooManyConnections,
        // From a walsender, 53400 means that no slot is free. On an SQL session, it means that the limit
        // on temporary files is reached.
        "53400" => Code::ReplicationSlotsUsedUp,
        "3D000" => Code::DatabaseUrlInvalid,
        "57P03" => Code::PostgresStopping,
        "25006" => Code::PostgresStandby,
        // A shutdown or crash of the server (57P), or a lost connection (08).
        s if s.starts_with("57P") || s.starts_with("08") => Code::PostgresConnectionLost,
        "53100" => Code::DiskFull,
        // Lack of memory, deadlocks and I/O errors are often temporary.
        s if s.starts_with("53") || s.starts_with("40") || s.starts_with("58") => {
            Code::PostgresConnectionLost
        }
        // "Snapshot too old": a retry with a new snapshot can succeed.
        "72000" => Code::PostgresConnectionLost,
        // Lock timeouts, statement timeouts, cancelled statements, and timeouts of transactions that take
        // too long or are idle.
        "55P03" | "57014" | "25P03" | "25P04" => Code::PostgresTimeout,
        _ => Code::PostgresStatement,
    }
}

/// Which kind of session a login was for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LoginFor {
    Sql,
    Replication,
}

/// Returns the code for a login that was refused. Several connection limits have the same SQLSTATE, so the code also
/// depends on `routine`, the name of the server's function that reported the error. Unlike the message, this name
/// does not depend on the server's language or version.
///
/// Source: PostgreSQL 14 to 18, `proc.c`, `postinit.c`, `miscinit.c` and `auth.c`.
pub(super) fn code_of_login(sqlstate: &str, routine: &str, login_for: LoginFor) -> Code {
    match (sqlstate, routine, login_for) {
        ("53300", "InitializeSessionUserId", _) => Code::RoleConnectionLimit,
        ("53300", "CheckMyDatabase", _) => Code::DatabaseConnectionLimit,
        ("55000", "CheckMyDatabase", _) => Code::DatabaseClosed,
        ("53300", "InitProcess", LoginFor::Replication) => Code::WalSendersUsedUp,
        ("28000", "ClientAuthentication", _) => Code::PostgresHba,
        ("42501", "CheckMyDatabase", _) => Code::PrivilegeMissing,
        ("42501", _, LoginFor::Replication) => Code::ReplicationRight,
        (sqlstate, _, _) => code_of(sqlstate),
    }
}

/// The hint for a role that is not allowed to connect to the database.
pub(super) const GRANT_CONNECT: &str = "GRANT CONNECT ON DATABASE <database> TO <relay user>";

impl Error {
    /// Creates the error for a login that the server refused.
    pub(crate) fn of_login(
        sqlstate: &str,
        routine: &str,
        message: &str,
        login_for: LoginFor,
        what: &str,
    ) -> Self {
        let code = code_of_login(sqlstate, routine, login_for);
        let error = Error::new(code, format!("{what}: {message} (SQLSTATE {sqlstate})"));
        match code {
            Code::PrivilegeMissing => error.hint(GRANT_CONNECT),
            _ => error,
        }
    }
}

impl From<PgError> for Error {
    fn from(error: PgError) -> Self {
        if let Some(db) = error.as_db_error() {
            let detail = db.detail().map(|d| format!("; {d}")).unwrap_or_default();
            let code = code_of(db.code().code());
            let what = format!(
                "PostgreSQL: {}{detail} (SQLSTATE {})",
                db.message(),
                db.code().code()
            );
            let special = match *db.code() {
                SqlState::CONFIGURATION_LIMIT_EXCEEDED => Some(TEMP_FILES),
                SqlState::UNTRANSLATABLE_CHARACTER => Some(OTHER_ENCODING),
                _ => None,
            };
            if let Some(hint) = special {
                return Error::new(Code::PostgresStatement, what).hint(hint);
            }
            return match db.hint() {
                Some(hint) if *db.code() != SqlState::INSUFFICIENT_PRIVILEGE => {
                    Error::new(code, what).hint(format!("{} ({hint})", code.hint()))
                }
                _ => Error::new(code, what),
            };
        }
        if error.is_closed() {
            return Error::new(
                Code::PostgresConnectionLost,
                "the connection to PostgreSQL closed",
            )
            .caused_by(error);
        }
        if is_unusable_answer(&error) {
            return Error::new(
                Code::PostgresStatement,
                "PostgreSQL's answer cannot be used",
            )
            .hint(UNUSABLE_ANSWER)
            .caused_by(error);
        }
        Error::new(
            Code::PostgresConnectionLost,
            "the connection to PostgreSQL failed",
        )
        .caused_by(error)
    }
}

/// Whether the connection works, but the client cannot use the answer, for example because a value has another
/// type than expected. A new connection would give the same answer.
fn is_unusable_answer(error: &PgError) -> bool {
    let mut cause = error.source();
    while let Some(error) = cause {
        if error.is::<std::io::Error>() {
            return false;
        }
        cause = error.source();
    }
    error.source().is_some()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Disposition;

    #[test]
    fn a_shutdown_startup_or_full_disk_is_retried() {
        for state in ["57P01", "57P02", "57P03", "08006", "53100"] {
            assert_eq!(code_of(state).disposition(), Disposition::Retry, "{state}");
        }
    }

    #[test]
    fn a_server_side_timeout_is_retried() {
        for state in ["57014", "55P03", "25P03", "25P04", "72000"] {
            assert_eq!(code_of(state).disposition(), Disposition::Retry, "{state}");
        }
        assert_eq!(code_of("57014"), Code::PostgresTimeout);
    }

    #[test]
    fn limits_with_the_same_sqlstate_are_distinguished_by_routine() {
        use LoginFor::{Replication, Sql};
        for (routine, login_for, code) in [
            ("InitializeSessionUserId", Sql, Code::RoleConnectionLimit),
            (
                "InitializeSessionUserId",
                Replication,
                Code::RoleConnectionLimit,
            ),
            ("CheckMyDatabase", Sql, Code::DatabaseConnectionLimit),
            ("InitProcess", Replication, Code::WalSendersUsedUp),
            ("InitProcess", Sql, Code::PostgresTooManyConnections),
            ("InitPostgres", Sql, Code::PostgresTooManyConnections),
            ("", Replication, Code::PostgresTooManyConnections),
        ] {
            assert_eq!(
                code_of_login("53300", routine, login_for),
                code,
                "{routine}"
            );
            assert_eq!(code.disposition(), Disposition::Retry, "{code}");
        }
    }

    #[tokio::test]
    async fn only_an_error_of_the_connection_counts_as_a_lost_connection() {
        let refused = "port=x".parse::<tokio_postgres::Config>().unwrap_err();
        assert_eq!(Error::from(refused).code(), Code::PostgresStatement);
        let (stream, other_end) = tokio::io::duplex(64);
        drop(other_end);
        let config = tokio_postgres::Config::new();
        let connected = config.connect_raw(stream, tokio_postgres::NoTls).await;
        let lost = Error::from(connected.err().unwrap());
        assert_eq!(lost.code(), Code::PostgresConnectionLost, "{lost:?}");
    }

    #[test]
    fn a_wrong_password_stops() {
        assert_eq!(code_of("28P01"), Code::PostgresAuthentication);
        assert_eq!(code_of("28P01").disposition(), Disposition::Stop);
    }
}
