//! Calls of the functions that add, lock and drop daily partitions of `outbox.events` (migration 18).
//!
//! Not here: which partition may be dropped (`ops::prune`).

use tokio_postgres::error::{Error as PgError, SqlState};

use crate::error::{Code, Error, Result};
use crate::postgres::Sql;

/// Partitions are added this many days ahead. A relay that is down for longer loses nothing: rows then go
/// to the default partition.
const DAYS_AHEAD: i32 = 3;

/// Adds the partitions of today and the next days that are missing.
///
/// # Errors
/// `privilege-missing` with the GRANT; other database errors.
pub(crate) async fn add(sql: &Sql) -> Result<()> {
    let statement = "select outbox.add_partitions($1)";
    let added = sql.execute(statement, &[&DAYS_AHEAD]).await;
    added.map(drop).map_err(not_allowed)
}

/// Keeps writers away from a partition until the transaction ends. Returns false if it is not a daily
/// partition of the past.
///
/// # Errors
/// Those of the statement.
pub(crate) async fn lock(sql: &Sql, name: &str) -> Result<bool, PgError> {
    let statement = "select outbox.lock_partition($1)";
    Ok(sql.query_one(statement, &[&name]).await?.get(0))
}

/// Drops a partition that [`lock`] has locked in this transaction.
///
/// # Errors
/// Those of the statement.
pub(crate) async fn drop_locked(sql: &Sql, name: &str) -> Result<(), PgError> {
    let statement = "select outbox.drop_partition($1)";
    sql.execute(statement, &[&name]).await.map(drop)
}

fn not_allowed(error: PgError) -> Error {
    let is_denied = error.code() == Some(&SqlState::INSUFFICIENT_PRIVILEGE);
    if !is_denied {
        return error.into();
    }
    Error::new(
        Code::PrivilegeMissing,
        "this role may not add and drop partitions of outbox.events",
    )
    .caused_by(error)
    .hint(
        "as the owner of the tables run `postrider init --apply` with prune_after set, or GRANT EXECUTE ON \
         FUNCTION outbox.add_partitions, outbox.lock_partition, outbox.drop_partition TO <role>",
    )
}
