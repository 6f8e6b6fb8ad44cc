//! Opens SQL sessions. Each session connects to one [`Target`] of the configured [`Servers`].
//! [`replication::connection`] opens the byte stream of the session, with TLS, as it does for replication
//! sessions.
//!
//! **Invariants.** A session ends if the server owes an answer and is silent for a little longer than the session's
//! statement timeout (`limited`), so callers need no time limit of their own. Only commands that an operator can
//! interrupt switch this limit off. For a session without a statement timeout, `connect_patiently` checks over a
//! second connection that the server still works on the statement (`patience`). No statement of this module uses
//! the schema `outbox` or a captured table.

mod failed_servers;
mod limited;
mod long_wait;
mod patience;
mod primary;
mod snapshot;
mod sql;
#[cfg(test)]
mod tests;

pub(crate) use long_wait::{
    LOOK_INTERVAL, LongWait, WatchedSession, limiting_lock_waits, naming_locks,
};
pub(crate) use patience::connect_patiently;
pub(crate) use primary::{on_standby, require_primary};
pub use replication::{Servers, Target};
pub(crate) use snapshot::{Snapshot, current_snapshot, own_transaction_id};
pub use sql::{Sql, connect};
