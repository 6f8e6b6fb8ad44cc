//! Checks everything that the relay needs from the database, before it starts.
//!
//! First all facts are read, in a handful of statements; then pure functions turn them into
//! [`Finding`]s, one per check, also for what is well.
//!
//! **Not here:** the replication connection itself (opening one is the only proof that a pooler
//! or `pg_hba.conf` lets it through), and everything about Pub/Sub.

use tokio_postgres::Client;

use crate::publication::{self, CapturedTable};
use crate::{Error, Finding, QualifiedName, Severity, SlotName, cluster};

mod facts;
mod server;
mod slot;
mod tables;

use facts::Facts;

/// The oldest major that is supported.
const OLDEST_MAJOR: u32 = 14;

/// The newest major that is tested.
const NEWEST_MAJOR: u32 = 18;

/// Connections that a relay has at most, the replication session included.
pub const CONNECTIONS: i64 = 6;

/// What the relay is going to use.
#[derive(Debug, Clone)]
pub struct Expectation {
    /// The slot; it may be missing.
    pub slot: SlotName,
    /// The publication.
    pub publication: String,
    /// The captured tables.
    pub tables: Vec<CapturedTable>,
    /// Where outcomes are recorded; `None` when they are not.
    pub dispatch: Option<QualifiedName>,
    /// Where the relay writes down who it is and how far it got.
    pub relay: QualifiedName,
}

/// Checks the database as the role that the client logged in as. Changes nothing.
///
/// # Errors
/// [`Error::Database`] when a fact could not be read; what is wrong with the facts is a finding.
pub async fn check(client: &Client, expectation: &Expectation) -> Result<Vec<Finding>, Error> {
    let cluster = cluster::inspect(client).await?;
    let version = server::version(cluster.major_version());
    if version.severity == Severity::Error {
        return Ok(vec![version]); // the other statements may not run there
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
