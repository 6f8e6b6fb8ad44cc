//! Identifies the cluster and the database that we are connected to.
//!
//! The system identifier of the cluster and the oid of the database identify a database. A new cluster with the
//! same data (dump and restore, major upgrade) has a different system identifier. A copy of the database on the
//! same cluster has a different oid. Only a copy of the server's files looks like the original, because both
//! numbers are the same. The timeline is not part of the identity, because it grows with each promotion.

use std::fmt;
use std::num::ParseIntError;
use std::str::FromStr;
use std::time::SystemTime;

use decoder::Lsn;
use serde::Serialize;
use tokio_postgres::Client;
use tokio_postgres::types::PgLsn;

use crate::shown_name::shown;
use crate::slot::get;
use crate::{SlotError, query, sql};

/// The number that `initdb` gives a cluster. Printed as an unsigned number, as `IDENTIFY_SYSTEM`
/// does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SystemIdentifier(u64);

impl SystemIdentifier {
    /// Wraps an identifier.
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

/// Serialised as text, because JSON readers round numbers of this size.
impl Serialize for SystemIdentifier {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Identifies one database of one cluster. A copy of the database has a different origin, unless it was made
/// from the server's files (by `pg_basebackup`, for example).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DatabaseOrigin {
    /// The cluster.
    pub system_identifier: SystemIdentifier,
    /// The database; `None` in a record that an older version of Postrider wrote.
    pub database_oid: Option<u32>,
}

impl DatabaseOrigin {
    /// Whether both origins can be the same database. An unknown oid matches every oid.
    #[must_use]
    pub fn matches(self, other: Self) -> bool {
        let databases = self.database_oid.zip(other.database_oid);
        self.system_identifier == other.system_identifier && databases.is_none_or(|(a, b)| a == b)
    }
}

impl fmt::Display for DatabaseOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let system_identifier = self.system_identifier;
        match self.database_oid {
            Some(oid) => write!(f, "{system_identifier}, database {oid}"),
            None => write!(f, "{system_identifier}"),
        }
    }
}

impl Serialize for DatabaseOrigin {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// The cluster and database behind a connection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Cluster {
    /// The identity of the cluster.
    pub system_identifier: SystemIdentifier,
    /// The timeline; on a standby server, as of the last restart point.
    pub timeline: u32,
    /// The version as a number, such as 150013 for 15.13.
    pub version_num: u32,
    /// Whether the server is a standby server.
    pub in_recovery: bool,
    /// The database that we are connected to.
    pub database: String,
    /// The oid of the database. A rename, a promotion and `pg_upgrade` (to 15 or later) keep it.
    pub database_oid: u32,
}

impl Cluster {
    /// The version as PostgreSQL prints it, such as `15.18`.
    #[must_use]
    pub fn version(&self) -> String {
        format!(
            "{}.{}",
            self.version_num / 10_000,
            self.version_num % 10_000
        )
    }

    /// The major version, such as 15.
    #[must_use]
    pub const fn major_version(&self) -> u32 {
        self.version_num / 10_000
    }

    /// Whether a slot streams every row that is inserted after a publication was altered. Before 14.18, 15.13,
    /// 16.9 and 17.5, a transaction that was open during `ALTER PUBLICATION` could make the walsender leave out
    /// the rows of later transactions.
    #[must_use]
    pub const fn streams_all_after_an_alter(&self) -> bool {
        let (major, minor) = (self.major_version(), self.version_num % 10_000);
        match major {
            ..14 => false,
            14 => minor >= 18,
            15 => minor >= 13,
            16 => minor >= 9,
            17 => minor >= 5,
            18.. => true,
        }
    }

    /// The cluster and the database.
    #[must_use]
    pub const fn origin(&self) -> DatabaseOrigin {
        DatabaseOrigin {
            system_identifier: self.system_identifier,
            database_oid: Some(self.database_oid),
        }
    }
}

/// Reads the identity of the server's cluster.
///
/// # Errors
/// [`SlotError::Database`].
pub async fn inspect(client: &Client) -> Result<Cluster, SlotError> {
    let row = query::single(client, "identifying the cluster", sql::CLUSTER, &[]).await?;
    let system_identifier: i64 = get(&row, "system_identifier")?;
    let timeline: i32 = get(&row, "timeline")?;
    let version_num: i32 = get(&row, "version_num")?;
    Ok(Cluster {
        system_identifier: SystemIdentifier(system_identifier.cast_unsigned()),
        timeline: timeline.cast_unsigned(),
        version_num: version_num.unsigned_abs(),
        in_recovery: get(&row, "in_recovery")?,
        database: shown(&row, "database")?.unwrap_or_default(),
        database_oid: get(&row, "database_oid")?,
    })
}

/// Size in bytes of a WAL page.
const WAL_PAGE: u64 = 8_192;
/// Sizes in bytes of the header of a WAL page: 24 on most pages, 40 on the first page of a segment. If the
/// last record ends exactly at the end of a page, the server reports a position after the header of the next
/// page, which lies beyond the end of the record. [`wal_end`] subtracts the header.
const PAGE_HEADERS: [u64; 2] = [24, 40];

/// Returns the end of a primary's WAL, including WAL that is not flushed yet. Every transaction whose rows are
/// visible has committed before this position.
///
/// # Errors
/// [`SlotError::Database`], also on a standby server, which writes no WAL.
pub async fn wal_end(client: &Client) -> Result<Lsn, SlotError> {
    let row = query::single(client, "asking for the end of the WAL", sql::WAL_END, &[]).await?;
    let end: PgLsn = get(&row, "wal_end")?;
    let end = u64::from(end);
    let header = PAGE_HEADERS.into_iter().find(|h| end % WAL_PAGE == *h);
    Ok(Lsn::new(end - header.unwrap_or(0)))
}

/// The position up to which a primary has written its WAL to the operating system. No slot of this
/// server can be beyond this position.
///
/// # Errors
/// [`SlotError::Database`], also on a standby server, which writes no WAL.
pub async fn written_wal_end(client: &Client) -> Result<Lsn, SlotError> {
    let action = "asking for the end of the written WAL";
    let row = query::single(client, action, sql::WRITTEN_WAL_END, &[]).await?;
    let end: PgLsn = get(&row, "wal_end")?;
    Ok(Lsn::new(end.into()))
}

/// Returns the time on the server's clock.
///
/// # Errors
/// [`SlotError::Database`].
pub async fn clock(client: &Client) -> Result<SystemTime, SlotError> {
    let row = query::single(client, "asking for the server's time", sql::CLOCK, &[]).await?;
    get(&row, "shown")
}

/// The encoding of the database, such as `UTF8`.
///
/// # Errors
/// [`SlotError::Database`].
pub async fn server_encoding(client: &Client) -> Result<String, SlotError> {
    let action = "asking for the server's encoding";
    let row = query::single(client, action, sql::SERVER_ENCODING, &[]).await?;
    get(&row, "server_encoding")
}

/// Whether the server records commit times (`track_commit_timestamp`).
///
/// # Errors
/// [`SlotError::Database`].
pub async fn tracks_commit_times(client: &Client) -> Result<bool, SlotError> {
    let action = "reading track_commit_timestamp";
    let row = query::single(client, action, sql::TRACKS_COMMIT_TIMES, &[]).await?;
    get(&row, "tracks")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn minor_versions_without_the_fix_may_leave_out_rows_after_an_alter() {
        let streams_all = |version_num| {
            let cluster = Cluster {
                system_identifier: SystemIdentifier::new(7),
                timeline: 1,
                version_num,
                in_recovery: false,
                database: "shop".to_owned(),
                database_oid: 5,
            };
            cluster.streams_all_after_an_alter()
        };
        for fixed in [140_018, 150_013, 160_009, 170_005, 180_000, 190_001] {
            assert!(streams_all(fixed), "{fixed}");
        }
        for faulty in [130_021, 140_017, 150_012, 160_008, 170_004] {
            assert!(!streams_all(faulty), "{faulty}");
        }
    }
}
