//! Opens SQL sessions. [`replication::connection`] opens the byte stream below them, with TLS, as it does for
//! replication sessions.
//!
//! An SQL session chooses one [`Target`] of the [`Servers`] in the settings. This module contains no statement
//! about the outbox.
//!
//! **Invariants.** Every SQL session ends when the server owes an answer for longer than the session's
//! limit for a statement (`limited`), so no caller needs a limit of its own.

mod failed_servers;
mod limited;
mod patience;
mod snapshot;
mod sql;
#[cfg(test)]
mod tests;

pub(crate) use patience::PatientSql;
pub use replication::{Servers, Target};
pub(crate) use snapshot::{Snapshot, current_snapshot};
pub use sql::{Sql, connect};
