//! Checks that the server allows a replication session, by opening one and closing it again. Only such an
//! attempt proves that `pg_hba.conf`, a proxy and the server's limits allow the session.

use std::time::Duration;

use super::handshake::{self, Login};
use crate::connection::{self, Target};
use crate::error::{ErrorKind, ReplicationError, Result};

const LIMIT: Duration = Duration::from_secs(20);

/// Checks that the server accepts a replication session. The probe uses one of the server's
/// walsenders for a moment.
///
/// # Errors
/// The errors of [`Source::open`](crate::Source::open), except those about the slot, because the
/// probe uses no slot.
pub async fn probe(target: &Target, application_name: &str) -> Result<()> {
    let probing = async {
        let wire = connection::open(target, handshake::liveness(LIMIT)).await?;
        let login = Login {
            target,
            application_name,
            wal_sender_timeout: LIMIT,
        };
        handshake::log_in(wire, login).await?.close().await;
        Ok(())
    };
    tokio::time::timeout(LIMIT, probing)
        .await
        .unwrap_or_else(|_| {
            let what = "no answer from the server on the replication session";
            Err(ReplicationError::new(ErrorKind::Unreachable, what))
        })
}
