//! The states that a slot can be in, how bad each is, and what to do about it.

use std::time::Duration;

use decoder::Lsn;
use serde::{Serialize, Serializer};

use crate::{Holder, Origin, Severity};

/// The state of a slot. Serialises as its [`name`](Health::name).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Health {
    /// Read from, and up to date.
    Active,
    /// Read from by another relay; we would take over.
    StandbyHeld {
        /// Who reads from it; absent when it is not visible to us.
        holder: Option<Holder>,
    },
    /// Read from, but behind by more than the thresholds allow.
    Lagging(Lag),
    /// Nobody reads from it: WAL piles up.
    Inactive(Lag),
    /// All WAL is there, but at the present rate not for long.
    Reserved(Headroom),
    /// As `Reserved`, and more than `max_wal_size` is kept already.
    Extended(Headroom),
    /// The next checkpoint may remove WAL that is needed.
    Unreserved(Headroom),
    /// WAL that was needed is removed: the slot can never be read again.
    Lost,
    /// The server gave the slot up for another reason.
    Invalidated {
        /// The reason.
        cause: InvalidationCause,
    },
    /// There is no slot of this name.
    Missing,
    /// The slot stands where the relay never confirmed: it was dropped and created again, or
    /// advanced by somebody else. Events between the two positions were not streamed.
    Recreated {
        /// What the relay confirmed last.
        recorded: Lsn,
        /// Where the slot stands.
        found: Lsn,
    },
    /// The relay's records come from another cluster or database: this database is a copy.
    ForeignCluster {
        /// The cluster and database in the records.
        expected: Origin,
        /// Those that we are connected to.
        found: Origin,
    },
}

/// How far a slot is behind, and how bad that is by the thresholds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lag {
    /// Unconfirmed WAL.
    pub bytes: u64,
    /// Age of the oldest unconfirmed event, if known.
    pub time: Option<Duration>,
    /// By the thresholds; [`Severity::Ok`] below all of them.
    pub severity: Severity,
}

/// What is left before the slot is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Headroom {
    /// WAL that can still be written; negative when it is past due, absent without a limit.
    pub bytes: Option<i64>,
    /// At the present rate; absent when unknown or when the room does not shrink.
    pub time_to_loss: Option<Duration>,
}

/// Why the server gave a slot up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InvalidationCause {
    /// Rows of the catalogs that decoding needs were vacuumed away (on a standby).
    RowsRemoved,
    /// `wal_level` was lowered.
    WalLevelInsufficient,
    /// Nobody read for longer than `idle_replication_slot_timeout`.
    IdleTimeout,
    /// A conflict with recovery, which PostgreSQL 16 does not explain further.
    Conflict,
    /// A reason of a newer server, in its words.
    Other(String),
}

impl Health {
    /// Stable kebab-case name, for JSON and metrics.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Active => "active",
            Self::StandbyHeld { .. } => "standby-held",
            Self::Lagging(_) => "lagging",
            Self::Inactive(_) => "inactive",
            Self::Reserved(_) => "reserved",
            Self::Extended(_) => "extended",
            Self::Unreserved(_) => "unreserved",
            Self::Lost => "lost",
            Self::Invalidated { .. } => "invalidated",
            Self::Missing => "missing",
            Self::Recreated { .. } => "recreated",
            Self::ForeignCluster { .. } => "foreign-cluster",
        }
    }

    /// How bad it is; never [`Severity::Info`].
    #[must_use]
    pub fn severity(&self) -> Severity {
        match self {
            Self::Active | Self::StandbyHeld { .. } => Severity::Ok,
            Self::Lagging(lag) | Self::Inactive(lag) => lag.severity.max(Severity::Warning),
            Self::Reserved(_) | Self::Extended(_) => Severity::Warning,
            Self::Unreserved(_)
            | Self::Lost
            | Self::Invalidated { .. }
            | Self::Missing
            | Self::Recreated { .. }
            | Self::ForeignCluster { .. } => Severity::Error,
        }
    }

    /// What to do; `None` when there is nothing to do.
    #[must_use]
    pub fn remedy(&self) -> Option<String> {
        // What the relay does about it unless `slot_on_loss` is `stop`.
        const RECOVERS: &str = "start the relay: it makes a new slot and delivers what has no \
                                record from the outbox table (`postrider recover --dry-run` shows \
                                what that is)";
        let text = match self {
            Self::Active | Self::StandbyHeld { .. } => return None,
            Self::Lagging(_) => "see in the relay's log or at its /status whether Pub/Sub is slow \
                                 or refuses, and in `postrider slot show` what keeps the WAL"
                .to_owned(),
            Self::Inactive(_) => "start the relay (`postrider run`); if it shall never run again, \
                                  `postrider slot drop` releases the WAL"
                .to_owned(),
            Self::Reserved(_) | Self::Extended(_) => {
                "let the relay catch up, or raise max_slot_wal_keep_size (a reload suffices) if \
                 the disk has the room"
                    .to_owned()
            }
            Self::Unreserved(_) => "raise max_slot_wal_keep_size now and reload, before the next \
                                    checkpoint; then let the relay catch up"
                .to_owned(),
            Self::Lost => {
                format!("raise max_slot_wal_keep_size (a reload suffices), then {RECOVERS}")
            }
            Self::Invalidated { cause } => format!("{}, then {RECOVERS}", cause.remedy()),
            Self::Missing => format!(
                "{RECOVERS}; before the first start: `postrider init --apply` or `postrider slot \
                 create`"
            ),
            Self::Recreated { .. } => {
                format!("find out who advanced the slot or made it anew, then {RECOVERS}")
            }
            Self::ForeignCluster { .. } => "check that this is the right database: if it is a \
                                            copy, do not run the relay on it; if it took the \
                                            place of the original: `postrider recover --adopt`"
                .to_owned(),
        };
        Some(text)
    }
}

impl InvalidationCause {
    fn remedy(&self) -> &'static str {
        match self {
            Self::RowsRemoved | Self::Conflict => {
                "set hot_standby_feedback = on on the standby that served the slot"
            }
            Self::WalLevelInsufficient => "set wal_level = logical and restart the server",
            Self::IdleTimeout => "raise idle_replication_slot_timeout or set it to 0",
            Self::Other(_) => "look the reason up in the server's log",
        }
    }
}

impl Serialize for Health {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}
