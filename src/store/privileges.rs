//! Finds out which privileges our role lacks, so that an error says which GRANT is missing. PostgreSQL's own
//! error names neither the schema nor the privilege.

use std::time::Duration;

use slot_manager::QualifiedName;
use slot_manager::privileges::{self, TableNeed};

use crate::error::{Code, Error, Result};
use crate::mapping::TableSettings;
use crate::postgres::{Sql, Target, connect};
use crate::store::days;

/// Time limit for the search. Short, because a hint is not worth a long wait.
const LIMIT: Duration = Duration::from_secs(5);

/// The functions that compute event ids. `event_uuid` calls `utf8_md5` only in a database that is not UTF-8. But
/// PostgreSQL checks the right to call `utf8_md5` in every database, so our role always needs both rights.
const EVENT_IDS: [&str; 2] = [
    "outbox.event_uuid(text, text, xid8)",
    "outbox.utf8_md5(text)",
];

const NOTHING: &[&str] = &[];
const READ: &[&str] = &["SELECT"];
const CHANGE: &[&str] = &["SELECT", "UPDATE"];
const WRITE: &[&str] = &["SELECT", "INSERT", "UPDATE"];
const DELETE: &[&str] = &["SELECT", "DELETE"];
const EVERYTHING: &[&str] = &["SELECT", "INSERT", "UPDATE", "DELETE"];

/// The action for which our role needs privileges.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Look at events, records and the slot.
    Read,
    /// Run the relay.
    Relay,
    /// Release or discard events in quarantine.
    ChangeQuarantine,
    /// Publish recorded events again.
    Replay,
    /// Ask the relay to recover.
    Recover,
    /// Delete old rows and records.
    Prune,
}

impl Purpose {
    /// Returns the needed privileges on the captured tables.
    fn on_captured(self) -> &'static [&'static str] {
        match self {
            Self::Prune => DELETE,
            _ => READ,
        }
    }

    /// Returns the functions that our role must be allowed to call.
    fn functions(self) -> Vec<&'static str> {
        let days: &[&str] = match self {
            Self::Prune => &days::READERS,
            _ => &[],
        };
        [&EVENT_IDS, days].concat()
    }

    /// Returns the needed privileges on our own tables.
    fn on_own(self) -> [(&'static str, &'static [&'static str]); 5] {
        let [dispatch, relay, capture, replay, replay_event] = match self {
            Self::Read => [READ, READ, READ, NOTHING, NOTHING],
            Self::Relay => [WRITE, WRITE, WRITE, WRITE, EVERYTHING],
            Self::ChangeQuarantine => [CHANGE, READ, READ, NOTHING, NOTHING],
            Self::Replay => [CHANGE, READ, READ, WRITE, EVERYTHING],
            Self::Recover => [CHANGE, WRITE, WRITE, NOTHING, NOTHING],
            Self::Prune => [DELETE, READ, READ, NOTHING, NOTHING],
        };
        [
            ("dispatch", dispatch),
            ("relay", relay),
            ("capture", capture),
            ("replay", replay),
            ("replay_event", replay_event),
        ]
    }
}

/// Returns the statements that grant what our role lacks for this purpose.
///
/// # Errors
/// Database errors.
pub(crate) async fn missing_grants(
    sql: &Sql,
    tables: &[TableSettings],
    purpose: Purpose,
) -> Result<Vec<String>> {
    let captured = tables.iter().map(|table| TableNeed {
        table: table.table.clone(),
        privileges: purpose.on_captured(),
    });
    let own = purpose.on_own().map(|(name, privileges)| TableNeed {
        table: QualifiedName::new("outbox", name),
        privileges,
    });
    let needs: Vec<TableNeed> = captured.chain(own).collect();
    let mut grants = privileges::missing_grants(sql, &needs).await?;
    // Without the right to use the schema, we cannot check the privileges on its functions: PostgreSQL does not
    // look them up.
    if grants.iter().any(|grant| grant.starts_with("GRANT USAGE")) {
        return Ok(grants);
    }
    grants.extend(privileges::missing_execute(sql, &purpose.functions()).await?);
    Ok(grants)
}

/// Completes the hint of an error. If a privilege is missing, connects to the first usable server and puts the
/// exact GRANT into the hint. For every other error, only replaces the placeholders for our role and database
/// in the hint.
pub(crate) async fn name_missing(
    error: Error,
    servers: &impl AsRef<[Target]>,
    tables: &[TableSettings],
    purpose: Purpose,
) -> Error {
    let Some(target) = servers.as_ref().first() else {
        return error;
    };
    if !lacks_a_grant(&error) {
        return error.for_role(&target.user, &target.database);
    }
    let search = async {
        let sql = connect(servers, "postrider", LIMIT).await?;
        missing_grants(&sql, tables, purpose).await
    };
    let grants = tokio::time::timeout(LIMIT, search).await;
    with_grants(error, grants.unwrap_or(Ok(Vec::new())), target)
}

/// Like [`name_missing`], but asks on this open session, which must not be in a transaction.
pub(crate) async fn name_missing_on(
    sql: &Sql,
    error: Error,
    tables: &[TableSettings],
    purpose: Purpose,
) -> Error {
    if !lacks_a_grant(&error) {
        return error;
    }
    with_grants(
        error,
        missing_grants(sql, tables, purpose).await,
        sql.target(),
    )
}

/// Whether the error is about a missing privilege, and its hint does not contain the GRANT yet.
fn lacks_a_grant(error: &Error) -> bool {
    error.code() == Code::PrivilegeMissing && !error.has_own_hint()
}

fn with_grants(error: Error, grants: Result<Vec<String>>, target: &Target) -> Error {
    match grants {
        Ok(grants) if !grants.is_empty() => {
            let grants = grants.join("; ");
            error.hint(format!("as the owner of the objects, run: {grants}"))
        }
        _ => error.for_role(&target.user, &target.database),
    }
}
