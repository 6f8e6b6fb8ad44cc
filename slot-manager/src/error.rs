//! Errors of slot operations, with advice on what to do.

use std::time::Duration;

use decoder::Lsn;
use tokio_postgres::error::SqlState;

use crate::retention::WalHolder;
use crate::{Holder, SlotName};

/// A slot operation or a catalogue query failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SlotError {
    /// The database refused a statement, or the connection broke.
    #[error("{action} failed: {source}; check that the server is up and that the role may do this")]
    Database {
        /// The action that failed.
        action: &'static str,
        /// The error of the PostgreSQL client. [`SlotError::sqlstate`] returns its SQLSTATE.
        source: tokio_postgres::Error,
    },
    /// No slot has this name.
    #[error("replication slot {slot} does not exist: create it with `postrider slot create`")]
    SlotMissing {
        /// The slot.
        slot: SlotName,
    },
    /// A slot of this name exists.
    #[error("replication slot {slot} exists already: use it, or choose another name")]
    SlotExists {
        /// The slot.
        slot: SlotName,
    },
    /// Another session reads from the slot.
    #[error(
        "replication slot {slot} is in use by {}: stop that reader first",
        holder.as_ref().map_or("another session".to_owned(), ToString::to_string)
    )]
    SlotInUse {
        /// The slot.
        slot: SlotName,
        /// The session that reads from the slot; `None` if that session ended before we read its
        /// details.
        holder: Option<Box<Holder>>,
    },
    /// The slot was still in use at the deadline.
    #[error(
        "replication slot {slot} was not free after {waited:?}: it is held by {holder}; stop that \
         reader, or end it with `select pg_terminate_backend({})`", holder.pid
    )]
    StillHeld {
        /// The slot.
        slot: SlotName,
        /// The session that reads from the slot.
        holder: Box<Holder>,
        /// How long we waited.
        waited: Duration,
    },
    /// The slot is a physical one.
    #[error("replication slot {slot} is physical: choose another name for the relay's slot")]
    PhysicalSlot {
        /// The slot's name.
        slot: String,
    },
    /// The slot belongs to an output plugin other than `pgoutput`.
    #[error(
        "replication slot {slot} belongs to the output plugin {plugin}, not pgoutput: choose \
         another name for the relay's slot"
    )]
    OtherPlugin {
        /// The slot's name.
        slot: String,
        /// The slot's plugin.
        plugin: String,
    },
    /// The slot belongs to another database of the cluster.
    #[error(
        "replication slot {slot} belongs to database {database}: connect to that one, or choose \
         another name for the relay's slot"
    )]
    OtherDatabase {
        /// The slot's name.
        slot: String,
        /// The slot's database.
        database: String,
    },
    /// The slot can never be read again.
    #[error(
        "replication slot {slot} is lost ({reason}): start the relay, which creates a new slot and \
         publishes unrecorded events from the outbox table"
    )]
    SlotLost {
        /// The slot.
        slot: SlotName,
        /// The server's reason.
        reason: String,
    },
    /// The requested position is before the slot's confirmed position.
    #[error(
        "replication slot {slot} is confirmed up to {confirmed} and cannot go back to {to}, because \
         earlier WAL is not kept"
    )]
    Backwards {
        /// The slot.
        slot: SlotName,
        /// The slot's confirmed position.
        confirmed: Lsn,
        /// The requested position.
        to: Lsn,
    },
    /// The server could not create the slot in time, because of running transactions.
    #[error(
        "creating replication slot {slot} waited longer than {timeout:?} for running \
         transactions ({}): end them or wait, then try again",
        blockers_text(blockers)
    )]
    CreationBlocked {
        /// The slot.
        slot: SlotName,
        /// How long we waited.
        timeout: Duration,
        /// The transactions that were running right after the timeout.
        blockers: Vec<WalHolder>,
    },
    /// Every slot of the cluster is taken.
    #[error(
        "no replication slot is left for {slot}: drop one that is not needed, or raise \
         max_replication_slots (needs a restart of the server)"
    )]
    NoSlotLeft {
        /// The slot.
        slot: SlotName,
    },
    /// The role has no right to manage slots.
    #[error(
        "the role may not manage replication slot {slot}: `alter role ... with replication` \
         (Amazon RDS: `grant rds_replication to ...`)"
    )]
    NoReplicationRight {
        /// The slot.
        slot: SlotName,
    },
    /// The server's WAL lacks the information for logical decoding.
    #[error(
        "wal_level is {wal_level}, logical replication needs logical: `alter system set wal_level \
         = 'logical'` and restart the server (Amazon RDS: rds.logical_replication = 1; Cloud SQL: \
         flag cloudsql.logical_decoding = on)"
    )]
    WalLevel {
        /// The current value.
        wal_level: String,
    },
    /// This server does not support failover slots.
    #[error("failover slots need PostgreSQL 17 or newer: create the slot without failover")]
    FailoverUnsupported,
    /// The server reports a status that this version does not know.
    #[error(
        "unknown wal_status {wal_status:?}: this server is newer than this postrider, so upgrade"
    )]
    UnknownWalStatus {
        /// The status as the server reports it.
        wal_status: String,
    },
}

impl SlotError {
    /// The SQLSTATE of [`SlotError::Database`]; `None` for every other variant.
    #[must_use]
    pub fn sqlstate(&self) -> Option<&SqlState> {
        match self {
            Self::Database { source, .. } => source.code(),
            _ => None,
        }
    }

    pub(crate) fn database(action: &'static str) -> impl FnOnce(tokio_postgres::Error) -> Self {
        move |source| Self::Database { action, source }
    }
}

fn blockers_text(blockers: &[WalHolder]) -> String {
    if blockers.is_empty() {
        return "they have ended in the meantime".to_owned();
    }
    let texts: Vec<String> = blockers.iter().map(WalHolder::to_string).collect();
    texts.join("; ")
}
