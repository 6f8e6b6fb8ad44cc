//! Errors of slot operations. The texts say what happened. The caller adds what to do about it.

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
    #[error("{action} failed: {source}")]
    Database {
        /// The action that failed.
        action: &'static str,
        /// The error of the PostgreSQL client. [`SlotError::sqlstate`] returns its SQLSTATE.
        source: tokio_postgres::Error,
    },
    /// No slot has this name.
    #[error("replication slot {slot} does not exist")]
    SlotMissing {
        /// The slot.
        slot: SlotName,
    },
    /// A slot of this name exists.
    #[error("replication slot {slot} exists already")]
    SlotExists {
        /// The slot.
        slot: SlotName,
    },
    /// Another session reads from the slot.
    #[error(
        "replication slot {slot} is in use by {}",
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
    #[error("replication slot {slot} was not free after {waited:?}: it is held by {holder}")]
    StillHeld {
        /// The slot.
        slot: SlotName,
        /// The session that reads from the slot.
        holder: Box<Holder>,
        /// How long we waited.
        waited: Duration,
    },
    /// The slot is a physical one.
    #[error("replication slot {slot} is physical")]
    PhysicalSlot {
        /// The slot's name.
        slot: String,
    },
    /// The slot belongs to an output plugin other than `pgoutput`.
    #[error("replication slot {slot} belongs to the output plugin {plugin}, not pgoutput")]
    OtherPlugin {
        /// The slot's name.
        slot: String,
        /// The slot's plugin.
        plugin: String,
    },
    /// The slot belongs to another database of the cluster.
    #[error("replication slot {slot} belongs to database {database}")]
    OtherDatabase {
        /// The slot's name.
        slot: String,
        /// The slot's database.
        database: String,
    },
    /// The slot can never be read again.
    #[error("replication slot {slot} is lost ({reason})")]
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
         transactions ({})",
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
    #[error("no replication slot is left for {slot}")]
    NoSlotLeft {
        /// The slot.
        slot: SlotName,
    },
    /// The role has no right to manage slots.
    #[error("the role may not manage replication slot {slot}")]
    NoReplicationRight {
        /// The slot.
        slot: SlotName,
    },
    /// The server's WAL lacks the information for logical decoding.
    #[error("wal_level is {wal_level}, but logical replication needs logical")]
    WalLevel {
        /// The current value.
        wal_level: String,
    },
    /// This server does not support failover slots.
    #[error("failover slots need PostgreSQL 17 or newer")]
    FailoverUnsupported,
    /// The server reports a status that this version does not know.
    #[error("unknown wal_status {wal_status:?}: this server is newer than this postrider")]
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
