//! Opens connections to the database, for the SQL sessions and the replication session.
//!
//! Both kinds of session share one [`Target`], one TLS configuration and the same errors. An SQL session
//! chooses the target among the [`Servers`] of the settings. This module also overrides settings of the
//! role or database that would disturb the relay. It contains no statement about the outbox.
//!
//! **Invariants.** Only `tls/verifier.rs` decides how much of a certificate is verified. A session
//! finds only PostgreSQL's own objects by name, because its search path is set when it starts. Errors
//! are built from parsed parts and contain no piece of a URL and no value of a parameter. Every SQL
//! session ends when the server owes an answer for longer than the session's limit for a statement
//! (`limited`), so no caller needs a limit of its own.

pub(crate) mod end_point;
mod key_value;
mod limited;
mod parameters;
pub(crate) mod password;
mod patience;
mod servers;
mod service_file;
pub(crate) mod session_settings;
mod snapshot;
mod sources;
mod sql;
mod target;
mod tls;
pub(crate) mod transaction_timeout;
mod url;
pub(crate) mod wire;

pub(crate) use parameters::is_connection_variable;
pub(crate) use patience::PatientSql;
pub use servers::Servers;
pub(crate) use snapshot::{Snapshot, current_snapshot};
pub(crate) use sql::refuse_a_standby;
pub use sql::{Sql, connect};
pub use target::{ChannelBinding, Host, SslMode, Target};
#[cfg(test)]
pub(crate) use tls::client_config;
