//! Refuses a standby server, because a relay and its slot work only on a primary server.

use slot_manager::cluster;

use super::Sql;
use crate::error::{Code, Error, Result};

/// Requires that the session is on a primary server.
///
/// # Errors
/// `postgres-standby`; database errors.
pub(crate) async fn require_primary(sql: &Sql) -> Result<()> {
    if cluster::inspect(sql).await?.in_recovery {
        return Err(on_standby(sql));
    }
    Ok(())
}

/// The error for a session on a standby server.
pub(crate) fn on_standby(sql: &Sql) -> Error {
    Error::new(
        Code::PostgresStandby,
        format!("{} is a standby", sql.target()),
    )
}
