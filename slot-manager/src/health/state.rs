//! The states of a slot, how bad each is, and what to do about it.

use std::time::Duration;

use decoder::Lsn;

use crate::{DatabaseOrigin, Holder, Severity};

/// The state of a slot, as [`judge`](super::judge) finds it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Health {
    /// A session reads from the slot, and the slot is up to date.
    Active,
    /// Another session reads from the slot, and our relay waits to take over.
    StandbyHeld {
        /// The session that reads from the slot; `None` if the server does not report it.
        holder: Option<Holder>,
    },
    /// A session reads from the slot, but the slot lags behind by more than the thresholds allow.
    Lagging(Lag),
    /// No session reads from the slot, so WAL accumulates.
    Inactive(Lag),
    /// A program that is not a relay reads from the slot, so no relay can read from it.
    ReadByStranger {
        /// The lag of the slot.
        lag: Lag,
        /// The session of the program.
        holder: Box<Holder>,
    },
    /// A relay holds the slot, but the relay has not polled the server for a while. Its process is stopped,
    /// or its host is cut off or overloaded.
    HeldBySilentRelay {
        /// The lag of the slot.
        lag: Lag,
        /// The session of the relay.
        holder: Box<Holder>,
        /// Time since the last poll.
        silent: Duration,
    },
    /// All required WAL is kept, but less than a quarter of the slot's limit is left.
    Reserved(Headroom),
    /// Like `Reserved`, and the server already keeps more WAL than `max_wal_size`.
    Extended(Headroom),
    /// The next checkpoint can remove required WAL.
    Unreserved(Headroom),
    /// Required WAL was removed, so the slot can never be read again.
    Lost,
    /// The server invalidated the slot for a reason other than removed WAL.
    Invalidated {
        /// The reason.
        cause: InvalidationCause,
    },
    /// There is no slot of this name.
    Missing,
    /// The slot is at a position that the relay never confirmed, because somebody dropped the slot and
    /// created it again, or advanced it. PostgreSQL will not stream the events between the two positions.
    Recreated {
        /// The last position that the relay confirmed.
        recorded: Lsn,
        /// The position of the slot.
        found: Lsn,
    },
    /// The relay's records come from another cluster or database, so this database is a copy.
    ForeignCluster {
        /// The cluster and database in the records.
        expected: DatabaseOrigin,
        /// The cluster and database that we are connected to.
        found: DatabaseOrigin,
    },
}

/// The lag of a slot, and its severity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lag {
    /// Bytes of unconfirmed WAL.
    pub bytes: u64,
    /// Age of the oldest unconfirmed event, if known.
    pub time: Option<Duration>,
    /// Severity according to the thresholds; [`Severity::Ok`] if the lag is below all of them.
    pub severity: Severity,
}

/// The amount of WAL that can be written before the slot is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Headroom {
    /// Bytes of WAL that can still be written; negative if the limit is exceeded already, `None` if
    /// there is no limit.
    pub bytes: Option<i64>,
    /// Bytes of WAL that the slot keeps; `None` when unknown.
    pub kept: Option<u64>,
    /// Whether a relay reads from the slot.
    pub is_read: bool,
    /// Severity of the slot's lag.
    pub lag: Severity,
}

impl Headroom {
    /// Whether the slot keeps more than three quarters of the WAL that its limit allows. False if there is no
    /// limit.
    #[must_use]
    pub fn is_short(&self) -> bool {
        self.is_below_one_in(4)
    }

    /// An error if the slot keeps more than nine tenths of the WAL that its limit allows, or if the lag is an
    /// error. Otherwise a warning.
    #[must_use]
    pub fn severity(&self) -> Severity {
        if self.is_below_one_in(10) {
            Severity::Error
        } else {
            self.lag.max(Severity::Warning)
        }
    }

    fn is_below_one_in(&self, parts: u64) -> bool {
        let (Some(left), Some(kept)) = (self.bytes, self.kept) else {
            return false;
        };
        u64::try_from(left).unwrap_or(0) < kept / (parts - 1)
    }
}

/// Why the server invalidated a slot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InvalidationCause {
    /// Vacuum removed catalogue rows that decoding needs (only on a standby server).
    RowsRemoved,
    /// `wal_level` was lowered.
    WalLevelInsufficient,
    /// No session read from the slot for longer than `idle_replication_slot_timeout`.
    IdleTimeout,
    /// A conflict with recovery on a standby server. Only PostgreSQL 16 reports a conflict without its cause.
    Conflict,
    /// A reason that this version does not know, in the server's words.
    Other(String),
}

impl Health {
    /// The name of the state in kebab case, for tests and debugging.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Active => "active",
            Self::StandbyHeld { .. } => "standby-held",
            Self::Lagging(_) => "lagging",
            Self::Inactive(_) => "inactive",
            Self::ReadByStranger { .. } => "read-by-stranger",
            Self::HeldBySilentRelay { .. } => "held-by-silent-relay",
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

    /// How bad the state is; never [`Severity::Info`].
    #[must_use]
    pub fn severity(&self) -> Severity {
        match self {
            Self::Active | Self::StandbyHeld { .. } => Severity::Ok,
            Self::Lagging(lag)
            | Self::Inactive(lag)
            | Self::ReadByStranger { lag, .. }
            | Self::HeldBySilentRelay { lag, .. } => lag.severity.max(Severity::Warning),
            Self::Reserved(room) | Self::Extended(room) => room.severity(),
            Self::Unreserved(_)
            | Self::Lost
            | Self::Invalidated { .. }
            | Self::Missing
            | Self::Recreated { .. }
            | Self::ForeignCluster { .. } => Severity::Error,
        }
    }

    /// What an operator should do; `None` if nothing has to be done.
    #[must_use]
    pub fn remedy(&self) -> Option<String> {
        // Once started, the relay recovers by itself, unless `slot_on_loss` is `stop`.
        const RECOVERS: &str = "start the relay: it creates a new slot and publishes unrecorded \
                                events from the outbox table (`postrider recover --dry-run` lists \
                                them)";
        let text = match self {
            Self::Active | Self::StandbyHeld { .. } => return None,
            Self::Lagging(_) => "check in the relay's log or its /status whether Pub/Sub is slow \
                                 or refuses events, and in `postrider slot show` what keeps WAL"
                .to_owned(),
            Self::Inactive(_) => "start the relay (`postrider run`); if it will never run again, \
                                  `postrider slot drop` releases the WAL"
                .to_owned(),
            Self::ReadByStranger { holder, .. } => remedy_for_stranger(holder),
            Self::HeldBySilentRelay { .. } => "look at the process and the host of the relay: is it stopped, \
                                               overloaded, or cut off from PostgreSQL? If it does not \
                                               continue, kill it and start a relay; PostgreSQL frees the \
                                               slot after wal_sender_timeout at the latest"
                .to_owned(),
            Self::Reserved(room) | Self::Extended(room) if !room.is_read => {
                "start the relay (`postrider run`) now; raising max_slot_wal_keep_size (a reload \
                 suffices) gains time if the disk has room"
                    .to_owned()
            }
            Self::Reserved(_) | Self::Extended(_) => {
                "let the relay catch up, or raise max_slot_wal_keep_size (a reload suffices) if \
                 the disk has room"
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
                format!("find out who advanced or re-created the slot, then {RECOVERS}")
            }
            Self::ForeignCluster { .. } => "check that this is the right database: if it is a \
                                            copy, do not run the relay on it; if it replaces \
                                            the original: `postrider recover --adopt`"
                .to_owned(),
        };
        Some(text)
    }
}

/// What an operator should do if the session `holder`, which is not a relay, reads the slot of a relay.
#[must_use]
pub fn remedy_for_stranger(holder: &Holder) -> String {
    format!(
        "stop the program that reads the slot, or end its session with `select pg_terminate_backend({})`; \
         the slot no longer streams the rows that this program has confirmed; with dispatch = full, the \
         relay's audit publishes them from the tables",
        holder.pid
    )
}

impl InvalidationCause {
    fn remedy(&self) -> &'static str {
        match self {
            Self::RowsRemoved => {
                "set hot_standby_feedback = on on the standby server that served the slot"
            }
            Self::Conflict => {
                "on the standby server that served the slot, set hot_standby_feedback = on; on its primary, \
                 keep wal_level = logical"
            }
            Self::WalLevelInsufficient => "set wal_level = logical and restart the server",
            Self::IdleTimeout => "raise idle_replication_slot_timeout or set it to 0",
            Self::Other(_) => "look up the reason in the server's log",
        }
    }
}
