//! Opens SQL sessions. Each session uses one [`Target`] of the [`Servers`] in the settings.
//! [`replication::connection`] opens the byte stream of the session, with TLS, as it does for
//! replication sessions.
//!
//! **Invariants.** If the server owes an answer for longer than the session's statement timeout, the
//! session ends (`limited`), so callers need no time limit of their own. No statement here concerns the
//! outbox.

mod failed_servers;
mod limited;
mod patience;
mod snapshot;
mod sql;
#[cfg(test)]
mod tests;

pub(crate) use patience::connect_patiently;
pub use replication::{Servers, Target};
pub(crate) use snapshot::{Snapshot, current_snapshot};
pub use sql::{Sql, connect};
