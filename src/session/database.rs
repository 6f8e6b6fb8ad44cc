//! Connects a session to its database, and checks that the server is a primary, that the database is not
//! a copy, and that the publication is right.
//!
//! The relay's row in `outbox.relay` contains the cluster's system identifier and the database's oid. A copy
//! made with `pg_dump` or `CREATE DATABASE ... TEMPLATE` contains the same row, but has another identifier or
//! oid, so the relay recognises the copy. A physical copy has the same identifiers, and passes this check.
//! `recovery::foreign_records` makes the decision. It also recognises records of a later state of the server.

use slot_manager::publication::PublicationState;
use slot_manager::{Cluster, SlotName, cluster};

use super::STATEMENT_TIMEOUT;
use super::greeting::Greeting;
use super::publication::PublicationCheck;
use crate::error::{Code, Error, Result};
use crate::postgres::{Sql, WatchedSession, connect, on_standby};
use crate::recovery::foreign_records::ForeignRecords;
use crate::settings::Settings;
use crate::store::relay_row::{self, EarlierSession};

/// The database of our slot, after it has passed the checks.
pub(super) struct OurDatabase {
    pub(super) sql: Sql,
    pub(super) cluster: Cluster,
    /// The publication when the session connected. If the relay's row has no fingerprint yet, the session
    /// records this one, so that the first audit notices a change that somebody makes while the session opens.
    pub(super) publication: PublicationState,
}

impl OurDatabase {
    /// Connects to the database and checks it. A session does this before anything else: on a copy, the
    /// relay must not even wait as a standby.
    ///
    /// # Errors
    /// `postgres-version`, `postgres-standby`; `foreign-cluster`, `schema-missing`; the errors of
    /// [`PublicationCheck::check`]; connection errors.
    pub(super) async fn connect(
        settings: &Settings,
        publication: &PublicationCheck,
        greeting: &Greeting,
        opener: &WatchedSession,
    ) -> Result<Self> {
        let sql = connect(settings.database()?, "postrider", STATEMENT_TIMEOUT).await?;
        opener.set(&sql).await?;
        let cluster = cluster::inspect(&sql).await?;
        greeting.log_once(&cluster, &sql.target().address());
        if cluster.major_version() < 14 {
            return Err(Error::new(
                Code::PostgresVersion,
                format!("the server is PostgreSQL {}", cluster.major_version()),
            ));
        }
        if cluster.in_recovery {
            return Err(on_standby(&sql));
        }
        recorded_here(&sql, &settings.slot, &cluster).await?;
        Ok(Self {
            publication: publication.check(&sql).await?,
            sql,
            cluster,
        })
    }
}

/// Reads the relay's row as an earlier session on this server left it.
///
/// # Errors
/// `foreign-cluster`, `schema-missing`.
pub(super) async fn recorded_here(
    sql: &Sql,
    slot: &SlotName,
    cluster: &Cluster,
) -> Result<Option<EarlierSession>> {
    let earlier = relay_row::read(sql, slot).await?;
    match ForeignRecords::find(sql, slot, earlier.as_ref(), cluster).await? {
        Some(foreign) => Err(foreign.error(slot)),
        None => Ok(earlier),
    }
}

/// Checks that the relay's records belong to this server, for `postrider check`.
///
/// # Errors
/// `foreign-cluster`, `schema-missing`.
pub(crate) async fn refuse_foreign_records(sql: &Sql, settings: &Settings) -> Result<()> {
    let cluster = cluster::inspect(sql).await?;
    recorded_here(sql, &settings.slot, &cluster).await?;
    Ok(())
}
