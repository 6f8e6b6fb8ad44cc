//! Checks everything that the relay needs from the database, before it starts.
//!
//! First a few statements read all facts. Then pure functions turn the facts into [`Finding`]s, one
//! per check, even for a check that passes.
//!
//! **Not here:** the replication connection itself (opening one is the only proof that a pooler
//! or `pg_hba.conf` lets it through), and everything about Pub/Sub.

use tokio_postgres::Client;

use crate::publication::{self, CapturedTable};
use crate::{Finding, QualifiedName, Severity, SlotError, SlotName, cluster};

mod facts;
mod server;
mod slot;
mod tables;

use facts::Facts;

/// The oldest supported major version.
const OLDEST_MAJOR: u32 = 14;

/// The newest tested major version.
const NEWEST_MAJOR: u32 = 18;

/// The maximum number of connections of a relay, including the replication session.
pub const CONNECTIONS: i64 = 6;

/// The objects that the relay is going to use.
#[derive(Debug, Clone)]
pub struct Expectation {
    /// The slot; it may be missing.
    pub slot: SlotName,
    /// The publication.
    pub publication: String,
    /// The captured tables.
    pub tables: Vec<CapturedTable>,
    /// The table where outcomes are recorded; `None` when they are not recorded.
    pub dispatch: Option<QualifiedName>,
    /// The table where the relay records its identity and position.
    pub relay: QualifiedName,
    /// The table where the relay records, for each captured table, which rows it has to publish.
    pub capture: QualifiedName,
}

/// Checks the database with the rights of the client's role. Changes nothing.
///
/// # Errors
/// [`SlotError::Database`] when a fact could not be read. A problem with the facts is a finding.
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
    findings.extend(server::check(&facts));
    findings.extend(slot::check(&facts, &expectation.slot));
    findings.extend(tables::check_publication(&publication));
    findings.extend(tables::check_rights(&facts, expectation));
    Ok(findings)
}
