//! Which cluster we are connected to.
//!
//! A copy that was restored from a backup has the system identifier of its original; a new
//! cluster with the same data (dump and restore, major upgrade) has another. The timeline grows at
//! each promotion.

use std::fmt;
use std::num::ParseIntError;
use std::str::FromStr;

use serde::Serialize;
use tokio_postgres::Client;

use crate::slot::get;
use crate::{Error, sql};

/// Number that `initdb` gives a cluster. Printed unsigned, as `IDENTIFY_SYSTEM` does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SystemIdentifier(u64);

impl SystemIdentifier {
    /// The identifier of this value.
    #[must_use]
    pub const fn new(value: u64) -> Self {
        Self(value)
    }
}

impl fmt::Display for SystemIdentifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for SystemIdentifier {
    type Err = ParseIntError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        text.parse().map(Self)
    }
}

/// As text: JSON readers round numbers of this size.
impl Serialize for SystemIdentifier {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// The cluster and database behind a connection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Cluster {
    /// Who it is.
    pub system_identifier: SystemIdentifier,
    /// Which of its histories; on a standby as of the last restart point.
    pub timeline: u32,
    /// Such as 150013 for 15.13.
    pub version_num: u32,
    /// Whether it is a standby.
    pub in_recovery: bool,
    /// The database that we are connected to.
    pub database: String,
}

impl Cluster {
    /// The major version, such as 15.
    #[must_use]
    pub const fn major_version(&self) -> u32 {
        self.version_num / 10_000
    }
}

/// Asks the server who it is.
///
/// # Errors
/// [`Error::Database`].
pub async fn inspect(client: &Client) -> Result<Cluster, Error> {
    let rows = client
        .query_typed(sql::CLUSTER, &[])
        .await
        .map_err(Error::database("asking which cluster this is"))?;
    let row = rows
        .first()
        .expect("invariant: a select without FROM gives one row");
    let system_identifier: i64 = get(row, "system_identifier")?;
    let timeline: i32 = get(row, "timeline")?;
    let version_num: i32 = get(row, "version_num")?;
    Ok(Cluster {
        system_identifier: SystemIdentifier(system_identifier.cast_unsigned()),
        timeline: timeline.cast_unsigned(),
        version_num: version_num.unsigned_abs(),
        in_recovery: get(row, "in_recovery")?,
        database: get(row, "database")?,
    })
}
