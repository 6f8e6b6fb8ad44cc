//! One row of `pg_replication_slots`, in the same form for every major version, together with its
//! lag.

use std::time::Duration;

use decoder::Lsn;
use serde::{Serialize, Serializer};
use tokio_postgres::Row;
use tokio_postgres::types::PgLsn;

use crate::SlotError;
use crate::shown_name::shown;

/// A replication slot as the server reported it at one moment.
///
/// A column that a major version lacks is `None`: `conflicting` before 16; `inactive_since`,
/// `invalidation_reason`, `failover` and `synced` before 17.
/// See <https://www.postgresql.org/docs/current/view-pg-replication-slots.html>.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Slot {
    /// The slot's name.
    pub slot_name: String,
    /// Output plugin; `None` for a physical slot, empty while a session is creating the slot.
    pub plugin: Option<String>,
    /// `logical` or `physical`.
    pub slot_type: String,
    /// The database of a logical slot.
    pub database: Option<String>,
    /// Whether the slot belongs to the database that we are connected to.
    #[serde(skip)]
    pub in_this_database: bool,
    /// Whether PostgreSQL drops the slot when the session that created it ends.
    pub temporary: bool,
    /// Whether a session reads from the slot now.
    pub active: bool,
    /// The pid of the walsender that reads from the slot for its client; `None` if the slot is not in use.
    pub active_pid: Option<i32>,
    /// Whether the server keeps the WAL that the slot requires; `None` while the slot keeps no WAL yet.
    pub wal_status: Option<WalStatus>,
    /// Bytes of WAL that can be written before the slot is lost; negative if the limit
    /// (`max_slot_wal_keep_size`) is exceeded already. `None` if there is no limit or the slot is
    /// lost.
    pub safe_wal_size: Option<i64>,
    /// Whether the slot decodes prepared transactions at PREPARE, not at COMMIT PREPARED.
    pub two_phase: bool,
    /// The position before which the reader has confirmed everything. `None` for a physical slot, and while
    /// a session is creating the slot.
    #[serde(serialize_with = "lsn_text")]
    pub confirmed_flush_lsn: Option<Lsn>,
    /// Start of the oldest WAL that the slot keeps.
    #[serde(serialize_with = "lsn_text")]
    pub restart_lsn: Option<Lsn>,
    /// Vacuum must keep catalogue rows that this transaction or a later one has deleted.
    pub catalog_xmin: Option<i64>,
    /// Vacuum must keep rows that this transaction or a later one has deleted.
    pub xmin: Option<i64>,
    /// Whether a conflict with recovery invalidated the slot. PostgreSQL 16 reports true for every
    /// invalidated slot.
    pub conflicting: Option<bool>,
    /// Why the server invalidated the slot, in the server's words, such as `wal_removed`.
    pub invalidation_reason: Option<String>,
    /// No session has read from the slot since this time (RFC 3339, UTC).
    pub inactive_since: Option<String>,
    /// How long no session has read from the slot, by the server's clock. `None` if a session reads from the slot.
    /// PostgreSQL before 17 does not report this time, so the field is `None` unless a caller fills it in.
    #[serde(skip)]
    pub inactive_for: Option<Duration>,
    /// Whether the server synchronises the slot to standby servers.
    pub failover: Option<bool>,
    /// Whether the slot was synchronised from a primary.
    pub synced: Option<bool>,
    /// The server's position: the end of the written WAL, or on a standby server the end of the WAL that was
    /// received or replayed.
    #[serde(serialize_with = "lsn_text")]
    pub server_lsn: Option<Lsn>,
    /// `server_lsn - confirmed_flush_lsn`: WAL that the reader has not confirmed.
    pub lag_bytes: Option<u64>,
    /// `server_lsn - restart_lsn`: WAL that the slot keeps on disk.
    pub retained_bytes: Option<u64>,
    /// The session that reads from the slot, if there is one.
    pub holder: Option<Holder>,
}

/// The session that reads from a slot. A field that our role is not allowed to see is `None`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Holder {
    /// The pid of the session's walsender.
    pub pid: i32,
    /// The application name of the client.
    pub application_name: Option<String>,
    /// The client's address; `None` over a Unix socket.
    pub client_addr: Option<String>,
    /// The role that the session logged in as.
    pub user: Option<String>,
    /// When the session connected (RFC 3339, UTC).
    pub since: Option<String>,
    /// How long ago the relay of this session last polled the server, by the server's clock. `None` if the
    /// session does not belong to a relay that polls.
    #[serde(rename = "silent_seconds", serialize_with = "seconds")]
    pub silent: Option<Duration>,
}

/// Whether the server keeps the WAL that a slot requires.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum WalStatus {
    /// The kept WAL is within `max_wal_size`.
    Reserved,
    /// The kept WAL exceeds `max_wal_size`.
    Extended,
    /// The required WAL exceeds the slot's limit, and the next checkpoint can remove it.
    Unreserved,
    /// Required WAL was removed. The slot can never be read again.
    Lost,
}

impl Slot {
    /// Fails if the relay can never stream from this slot, because of the slot's kind, plugin or database.
    ///
    /// # Errors
    /// [`SlotError::PhysicalSlot`], [`SlotError::OtherPlugin`] or [`SlotError::OtherDatabase`].
    pub fn require_ours(&self) -> Result<(), SlotError> {
        let slot = self.slot_name.clone();
        if self.slot_type != "logical" {
            return Err(SlotError::PhysicalSlot { slot });
        }
        match self.plugin.as_deref() {
            // While a session is still creating the slot, its plugin is empty.
            Some("pgoutput" | "") => {}
            plugin => {
                let plugin = plugin.unwrap_or("unknown").to_owned();
                return Err(SlotError::OtherPlugin { slot, plugin });
            }
        }
        if self.in_this_database {
            return Ok(());
        }
        let database = self.database.clone().unwrap_or_default();
        Err(SlotError::OtherDatabase { slot, database })
    }

    pub(crate) fn from_row(row: &Row) -> Result<Self, SlotError> {
        let lsn = |column: &str| -> Result<Option<Lsn>, SlotError> {
            let value: Option<PgLsn> = get(row, column)?;
            Ok(value.map(|lsn| Lsn::new(lsn.into())))
        };
        let server_lsn = lsn("server_lsn")?;
        // The server reads the two positions at different instants, so the difference can be negative.
        // Clamp it to zero.
        let behind = |position: Option<Lsn>| -> Option<u64> {
            Some(server_lsn?.bytes_since(position?).unwrap_or(0))
        };
        let confirmed_flush_lsn = lsn("confirmed_flush_lsn")?;
        let restart_lsn = lsn("restart_lsn")?;
        let wal_status: Option<String> = get(row, "wal_status")?;
        Ok(Self {
            slot_name: get(row, "slot_name")?,
            plugin: get(row, "plugin")?,
            slot_type: get(row, "slot_type")?,
            database: shown(row, "database")?,
            in_this_database: get(row, "in_this_database")?,
            temporary: get(row, "temporary")?,
            active: get(row, "active")?,
            active_pid: get(row, "active_pid")?,
            wal_status: wal_status.as_deref().map(WalStatus::parse).transpose()?,
            safe_wal_size: get(row, "safe_wal_size")?,
            two_phase: get(row, "two_phase")?,
            confirmed_flush_lsn,
            restart_lsn,
            catalog_xmin: get(row, "catalog_xmin")?,
            xmin: get(row, "xmin")?,
            conflicting: get(row, "conflicting")?,
            invalidation_reason: get(row, "invalidation_reason")?,
            inactive_since: get(row, "inactive_since")?,
            inactive_for: get::<Option<f64>>(row, "inactive_seconds")?
                .map(|seconds| Duration::try_from_secs_f64(seconds).unwrap_or_default()),
            failover: get(row, "failover")?,
            synced: get(row, "synced")?,
            server_lsn,
            lag_bytes: behind(confirmed_flush_lsn),
            retained_bytes: behind(restart_lsn),
            holder: Holder::from_row(row)?,
        })
    }
}

impl Holder {
    fn from_row(row: &Row) -> Result<Option<Self>, SlotError> {
        let Some(pid) = get(row, "active_pid")? else {
            return Ok(None);
        };
        Ok(Some(Self {
            pid,
            application_name: shown(row, "holder_application_name")?
                .filter(|name| !name.is_empty()),
            client_addr: get(row, "holder_client_addr")?,
            user: shown(row, "holder_user")?,
            since: get(row, "holder_since")?,
            silent: get::<Option<f64>>(row, "holder_silent_seconds")?
                .map(|seconds| Duration::try_from_secs_f64(seconds).unwrap_or_default()),
        }))
    }
}

impl std::fmt::Display for Holder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "server process {}", self.pid)?;
        for (label, value) in [
            ("application", &self.application_name),
            ("from", &self.client_addr),
            ("as", &self.user),
            ("since", &self.since),
        ] {
            if let Some(value) = value {
                write!(f, ", {label} {value}")?;
            }
        }
        Ok(())
    }
}

impl WalStatus {
    fn parse(text: &str) -> Result<Self, SlotError> {
        match text {
            "reserved" => Ok(Self::Reserved),
            "extended" => Ok(Self::Extended),
            "unreserved" => Ok(Self::Unreserved),
            "lost" => Ok(Self::Lost),
            _ => Err(SlotError::UnknownWalStatus {
                wal_status: text.to_owned(),
            }),
        }
    }
}

/// Reads a column of the result of one of our statements. An error means that this server's catalogue differs
/// from those of the versions that we know.
pub(crate) fn get<'a, T: tokio_postgres::types::FromSql<'a>>(
    row: &'a Row,
    column: &str,
) -> Result<T, SlotError> {
    row.try_get(column)
        .map_err(SlotError::database("reading a catalog column"))
}

fn lsn_text<S: Serializer>(lsn: &Option<Lsn>, serializer: S) -> Result<S::Ok, S::Error> {
    match lsn {
        Some(lsn) => serializer.collect_str(lsn),
        None => serializer.serialize_none(),
    }
}

pub(crate) fn seconds<S: Serializer>(
    time: &Option<Duration>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    match time {
        Some(time) => serializer.serialize_f64(time.as_secs_f64()),
        None => serializer.serialize_none(),
    }
}
