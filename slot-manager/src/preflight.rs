//! Checks everything that the relay needs from the database, before it starts.
//!
//! First, a few statements read all facts. Then pure functions turn the facts into [`Finding`]s,
//! one for each check, including checks that pass.
//!
//! **Not here:** the replication connection itself (only opening one proves that no pooler and no
//! line of `pg_hba.conf` prevents it), and everything about Pub/Sub.

use tokio_postgres::Client;

use crate::publication::{self, CapturedTable};
use crate::{Finding, QualifiedName, Severity, SlotError, SlotName, cluster};

mod facts;
mod server;
mod slot;
mod tables;

use facts::Facts;

/// Oldest PostgreSQL major version that the relay supports.
const OLDEST_MAJOR: u32 = 14;

/// Newest PostgreSQL major version that the relay is tested with.
const NEWEST_MAJOR: u32 = 18;

/// Number of connections that one relay may need at the same time, including the replication connection. For a
/// moment it can have a few more, for example while it finds out why a statement takes long.
pub const CONNECTIONS: i64 = 6;

/// The objects that the relay is going to use.
#[derive(Debug, Clone)]
pub struct Expectation {
    /// The relay's slot, which need not exist yet.
    pub slot: SlotName,
    /// The publication.
    pub publication: String,
    /// The captured tables.
    pub tables: Vec<CapturedTable>,
    /// The table where the relay records outcomes; `None` if it does not record them.
    pub dispatch: Option<QualifiedName>,
    /// The table where the relay records its identity and position.
    pub relay: QualifiedName,
    /// The table where the relay records, for each captured table, which rows it has to publish.
    pub capture: QualifiedName,
}

/// Checks the database with the privileges of the client's role. Changes nothing.
///
/// # Errors
/// [`SlotError::Database`] if a fact cannot be read. A failed check is a finding, not an error.
pub async fn check(client: &Client, expectation: &Expectation) -> Result<Vec<Finding>, SlotError> {
    let cluster = cluster::inspect(client).await?;
    let version = server::version(cluster.major_version());
    if version.severity == Severity::Error {
        return Ok(vec![version]); // the other statements may fail on this version
    }
    let facts = Facts::read(client, cluster, expectation).await?;
    let publication =
        publication::inspect(client, &expectation.publication, &expectation.tables).await?;
    let mut findings = vec![version];
    findings.extend(server::check(&facts, &expectation.slot));
    findings.extend(slot::check(&facts, &expectation.slot));
    findings.extend(tables::check_publication(&publication));
    findings.extend(tables::check_rights(&facts, expectation));
    Ok(findings)
}
