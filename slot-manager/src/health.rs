//! Judges a slot: a name for its state, how bad that is, and what to do.
//!
//! Pure: all facts are passed in as an [`Observation`]. Causes are checked before symptoms: a slot
//! on another cluster is not "inactive", and a lost slot is not "lagging".

use std::time::{Duration, SystemTime};

use decoder::Lsn;

use crate::{DatabaseOrigin, Holder, Severity, Slot, WalStatus};

mod state;

pub use state::{Headroom, Health, InvalidationCause, Lag};

/// The application names of relays begin with this.
const RELAYS: &str = "postrider";

/// The known facts about a slot at one moment.
#[derive(Debug, Clone, Copy)]
pub struct Observation<'a> {
    /// The slot; `None` when no slot has its name.
    pub slot: Option<&'a Slot>,
    /// Who asks for the judgement.
    pub viewer: Viewer,
    /// How far delivery lags behind in time, see [`time_lag`].
    pub time_lag: Option<Duration>,
    /// The database that we are connected to.
    pub origin: DatabaseOrigin,
    /// The relay's last record about the slot.
    pub recorded: Option<&'a RecordedPosition>,
}

/// An earlier observation of the same slot.
#[derive(Debug, Clone, Copy)]
pub struct SlotObservation<'a> {
    /// The slot at that time.
    pub slot: &'a Slot,
    /// How long ago the slot was read.
    pub ago: Duration,
}

/// The party that asks for the judgement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Viewer {
    /// A person or a monitor. Any relay that reads the slot is acceptable.
    Outside,
    /// The relay that streams from the slot.
    Streaming,
    /// A relay that does not stream. If another session reads, this relay stands by.
    Waiting,
}

/// The relay's record of a position that it confirmed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecordedPosition {
    /// The database in which it was recorded.
    pub origin: DatabaseOrigin,
    /// The confirmed position.
    pub confirmed_lsn: Option<Lsn>,
    /// Whether no later position can have been confirmed: the relay has this record in memory, or
    /// wrote it as the last step of a graceful shutdown. On an idle database, confirmed positions
    /// are not recorded at once. So if this is false, a slot that is further ahead is normal.
    pub is_final: bool,
}

impl RecordedPosition {
    /// The record for a slot that no relay has used: the slot is still at the position where it was
    /// created.
    #[must_use]
    pub fn unused(origin: DatabaseOrigin, created_at: Option<Lsn>) -> Option<Self> {
        created_at.map(|at| Self {
            origin,
            confirmed_lsn: Some(at),
            is_final: true,
        })
    }
}

/// Limits above which a state is a warning or an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Thresholds {
    /// Warning if at least this much WAL is unconfirmed.
    pub warn_lag_bytes: u64,
    /// Error if at least this much WAL is unconfirmed; `None` for no limit. If this is `None`, nobody reads
    /// the slot, and the age of its events is unknown, the limit is `warn_lag_bytes`.
    pub error_lag_bytes: Option<u64>,
    /// Warning if the oldest unconfirmed event is at least this old.
    pub warn_lag: Duration,
    /// Error if the oldest unconfirmed event is at least this old; `None` for no limit. If this is
    /// `None` and nobody reads the slot, the limit is `warn_lag`, because nothing delivers these events.
    pub error_lag: Option<Duration>,
}

impl Default for Thresholds {
    /// Warns at a lag of 256 MiB (16 segments) or 5 minutes.
    fn default() -> Self {
        Self {
            warn_lag_bytes: 256 << 20,
            error_lag_bytes: None,
            warn_lag: Duration::from_secs(300),
            error_lag: None,
        }
    }
}

/// Judges a slot.
#[must_use]
pub fn judge(observation: &Observation<'_>, thresholds: &Thresholds) -> Health {
    let Observation {
        slot,
        recorded,
        origin: found,
        ..
    } = *observation;
    if let Some(expected) = recorded
        .map(|r| r.origin)
        .filter(|origin| !origin.matches(found))
    {
        return Health::ForeignCluster { expected, found };
    }
    let Some(slot) = slot else {
        return Health::Missing;
    };
    gone(slot)
        .or_else(|| recreated(slot, recorded))
        .or_else(|| endangered(slot, observation, thresholds))
        .unwrap_or_else(|| reading(slot, observation, thresholds))
}

fn gone(slot: &Slot) -> Option<Health> {
    let cause = match slot.invalidation_reason.as_deref() {
        Some("wal_removed") => return Some(Health::Lost),
        Some("rows_removed") => InvalidationCause::RowsRemoved,
        Some("wal_level_insufficient") => InvalidationCause::WalLevelInsufficient,
        Some("idle_timeout") => InvalidationCause::IdleTimeout,
        Some(other) => InvalidationCause::Other(other.to_owned()),
        // PostgreSQL 16 reports every invalidated slot as conflicting. If WAL was removed, the slot
        // has no restart_lsn.
        None if slot.conflicting == Some(true) && slot.restart_lsn.is_some() => {
            InvalidationCause::Conflict
        }
        None if slot.wal_status == Some(WalStatus::Lost) => return Some(Health::Lost),
        None => return None,
    };
    Some(Health::Invalidated { cause })
}

/// A position *behind* the record is normal: after a crash, a server returns to the position that it
/// last saved. A promoted standby server returns to the position that it last synchronised. Only a
/// position ahead of the record skips events.
fn recreated(slot: &Slot, recorded: Option<&RecordedPosition>) -> Option<Health> {
    let recorded = recorded.filter(|r| r.is_final)?.confirmed_lsn?;
    let found = slot.confirmed_flush_lsn?;
    (found > recorded).then_some(Health::Recreated { recorded, found })
}

fn endangered(
    slot: &Slot,
    observation: &Observation<'_>,
    thresholds: &Thresholds,
) -> Option<Health> {
    let room = Headroom {
        bytes: slot.safe_wal_size,
        kept: slot.retained_bytes,
        is_read: is_read_by_relay(slot),
        lag: lag(slot, observation.time_lag, thresholds).severity,
    };
    match slot.wal_status? {
        WalStatus::Unreserved => Some(Health::Unreserved(room)),
        WalStatus::Extended if room.is_short() => Some(Health::Extended(room)),
        WalStatus::Reserved if room.is_short() => Some(Health::Reserved(room)),
        WalStatus::Extended | WalStatus::Reserved | WalStatus::Lost => None,
    }
}

fn reading(slot: &Slot, observation: &Observation<'_>, thresholds: &Thresholds) -> Health {
    let lag = lag(slot, observation.time_lag, thresholds);
    if let Some(holder) = stranger(slot) {
        let holder = Box::new(holder.clone());
        return Health::ReadByStranger { lag, holder };
    }
    match (slot.active, observation.viewer) {
        (false, _) => Health::Inactive(lag),
        (true, Viewer::Waiting) => Health::StandbyHeld {
            holder: slot.holder.clone(),
        },
        (true, Viewer::Outside | Viewer::Streaming) => {
            if lag.severity == Severity::Ok {
                Health::Active
            } else {
                Health::Lagging(lag)
            }
        }
    }
}

/// The session that reads from the slot, if its name shows that it is not a relay.
fn stranger(slot: &Slot) -> Option<&Holder> {
    let holder = slot.holder.as_ref().filter(|_| slot.active)?;
    let name = holder.application_name.as_deref()?;
    (!name.is_empty() && !name.starts_with(RELAYS)).then_some(holder)
}

fn is_read_by_relay(slot: &Slot) -> bool {
    slot.active && stranger(slot).is_none()
}

fn lag(slot: &Slot, time: Option<Duration>, thresholds: &Thresholds) -> Lag {
    let error_lag = match thresholds.error_lag {
        None if !is_read_by_relay(slot) => Some(thresholds.warn_lag),
        limit => limit,
    };
    let error_lag_bytes = match thresholds.error_lag_bytes {
        None if !is_read_by_relay(slot) && time.is_none() => Some(thresholds.warn_lag_bytes),
        limit => limit,
    };
    let bytes = slot.lag_bytes.unwrap_or(0);
    let beyond = |bytes_limit: Option<u64>, time_limit: Option<Duration>| {
        bytes_limit.is_some_and(|limit| bytes >= limit)
            || time_limit
                .zip(time)
                .is_some_and(|(limit, time)| time >= limit)
    };
    let severity = if beyond(error_lag_bytes, error_lag) {
        Severity::Error
    } else if beyond(Some(thresholds.warn_lag_bytes), Some(thresholds.warn_lag)) {
        Severity::Warning
    } else {
        Severity::Ok
    };
    Lag {
        bytes,
        time,
        severity,
    }
}

/// The room left before the slot is lost.
/// Time until the slot is lost, at the rate at which its room has shrunk since an earlier observation.
/// `None` when this is unknown, or when the room is not shrinking.
#[must_use]
pub fn time_to_loss(slot: &Slot, earlier: SlotObservation<'_>) -> Option<Duration> {
    let left = slot.safe_wal_size?;
    let shrunk = earlier.slot.safe_wal_size?.saturating_sub(left);
    if shrunk <= 0 || earlier.ago.is_zero() {
        return None;
    }
    #[expect(
        clippy::cast_precision_loss,
        reason = "an estimate; exact up to 8 PiB anyway"
    )]
    let seconds = left.max(0) as f64 * earlier.ago.as_secs_f64() / shrunk as f64;
    Duration::try_from_secs_f64(seconds).ok()
}

/// A relay's knowledge of its unconfirmed events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PendingSince {
    /// Unknown: the relay has not streamed since its start.
    Unknown,
    /// Everything received is confirmed.
    Nothing,
    /// The oldest unconfirmed event was committed at this time.
    Since(SystemTime),
}

/// How far delivery lags behind in time: `None` while unknown, zero when there is nothing to
/// deliver.
///
/// A lag of up to `idle_bytes` counts as none, because an idle server writes a little WAL by
/// itself. If nothing is pending but more than `idle_bytes` is left to read, the age is unknown.
#[must_use]
pub fn time_lag(
    pending: PendingSince,
    lag_bytes: u64,
    idle_bytes: u64,
    now: SystemTime,
) -> Option<Duration> {
    match pending {
        PendingSince::Unknown => None,
        PendingSince::Nothing => (lag_bytes <= idle_bytes).then_some(Duration::ZERO),
        // The server's clock may be ahead of ours.
        PendingSince::Since(committed) => Some(now.duration_since(committed).unwrap_or_default()),
    }
}

#[cfg(test)]
mod tests;
