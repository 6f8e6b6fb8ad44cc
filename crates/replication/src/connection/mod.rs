//! Opens connections to the database, for replication sessions and SQL sessions.
//!
//! [`Servers`] are the configured servers. A session connects to one of them, a [`Target`].
//! Replication and SQL sessions use the same TLS configuration and report the same errors. [`open`]
//! opens the byte stream, and the caller logs in on it. [`password`], [`session_settings`] and
//! [`transaction_timeout`] help callers that log in to SQL sessions themselves. This module also
//! overrides settings of the role or the database that would disturb a session.
//!
//! **Invariants.** Only `tls/verifier.rs` decides how much of a certificate is verified. The search
//! path is set when a session starts, so unqualified names refer only to PostgreSQL's own objects.
//! Errors about invalid connection parameters show no piece of a URL and no value of a parameter,
//! except the path of a service file. Other errors may show the user, the server and the database,
//! but never the password.

mod channel_binding;
mod end_point;
mod key_value;
mod parameters;
mod password;
mod servers;
mod service_file;
pub mod session_settings;
mod sources;
mod target;
mod tls;
pub mod transaction_timeout;
mod url;
mod wire;

pub use channel_binding::{CHANNEL_BINDING_HINT, ChannelBinding};
pub use parameters::is_connection_variable;
pub use password::{password, password_advice};
pub use servers::Servers;
pub use target::{Host, Keepalives, SslMode, Target, TlsVersions};
pub(crate) use wire::Duplex;
pub use wire::{Liveness, Wire, open, unreachable, within_connect_timeout};

use crate::error::{ErrorKind, ReplicationError, Result};

/// Refuses a standby server if `target_session_attrs` requires a primary. `in_hot_standby` is the
/// value that the server reports for its parameter of the same name.
///
/// # Errors
/// `Standby`.
pub fn refuse_a_standby(target: &Target, in_hot_standby: Option<&str>) -> Result<()> {
    if target.primary_only && in_hot_standby == Some("on") {
        Err(ReplicationError::new(
            ErrorKind::Standby,
            format!("{target} is a standby server, but a primary is needed"),
        ))
    } else {
        Ok(())
    }
}
