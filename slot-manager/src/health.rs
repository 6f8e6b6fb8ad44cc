//! Determines the state of a slot, how bad that state is, and what to do about it.
//!
//! This module does no IO: the caller passes in all facts as an [`Observation`]. Causes are checked before
//! symptoms, so that a slot of another cluster is not reported as "inactive", nor a lost slot as "lagging".

use std::time::{Duration, SystemTime};

use decoder::Lsn;

use crate::{DatabaseOrigin, Holder, Severity, Slot, WalStatus};

mod state;

pub use state::{Headroom, Health, InvalidationCause, Lag, remedy_for_stranger};

/// Prefix of the application names of all relays.
const RELAYS: &str = "postrider";

/// How long a relay can go without polling the server before it counts as silent. Relays poll every 5
/// seconds, so a silent relay has missed about three polls. Its process is stopped, or its host is cut off or
/// overloaded.
const SILENT_AFTER: Duration = Duration::from_secs(15);

/// The known facts about a slot at one moment.
#[derive(Debug, Clone, Copy)]
pub struct Observation<'a> {
    /// The slot; `None` if no slot has this name.
    pub slot: Option<&'a Slot>,
    /// The party that asks for the judgement.
    pub viewer: Viewer,
    /// The lag of delivery as a time, as [`time_lag`] computes it; `None` if it is unknown.
    pub time_lag: Option<Duration>,
    /// The database that we are connected to.
    pub origin: DatabaseOrigin,
    /// The relay's last record about the slot. `None` if there is no record, or if the caller leaves it out.
    /// Without the record, [`judge`] finds neither a copied database nor a recreated slot.
    pub recorded: Option<&'a RecordedPosition>,
}

/// An earlier observation of a slot, to compare with the current one.
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
    /// An operator or a monitoring system, not a relay. This viewer expects that some relay reads the slot.
    Outside,
    /// The relay that streams from the slot.
    Streaming,
    /// A relay that does not stream. If another session reads the slot, this relay is a standby.
    Waiting,
}

/// The relay's record of the position that it last confirmed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecordedPosition {
    /// The database that the relay was connected to when it wrote the record.
    pub origin: DatabaseOrigin,
    /// The confirmed position; `None` if no relay has used the slot yet.
    pub confirmed_lsn: Option<Lsn>,
    /// Whether it is certain that the relay has confirmed nothing since it made this record. True if the record
    /// comes from the memory of a running relay, or if the relay wrote it as the last step of a graceful
    /// shutdown. Otherwise the slot can be ahead of the record: in an idle database, the relay confirms
    /// positions before it records them.
    pub is_final: bool,
}

impl RecordedPosition {
    /// The record for a slot that no relay has used yet. Such a slot must still be at the position
    /// where it was created.
    #[must_use]
    pub fn unused(origin: DatabaseOrigin, created_at: Option<Lsn>) -> Option<Self> {
        created_at.map(|at| Self {
            origin,
            confirmed_lsn: Some(at),
            is_final: true,
        })
    }
}

/// Limits of the lag. A lag at a limit or above it is a warning or an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Thresholds {
    /// Warning if at least this much WAL is unconfirmed.
    pub warn_lag_bytes: u64,
    /// Error if at least this much WAL is unconfirmed. `None` usually means that there is no limit.
    ///
    /// `None` means that the limit is `warn_lag_bytes` if two conditions hold:
    ///
    /// - No relay reads the slot, so nothing delivers the events.
    /// - The age of the oldest unconfirmed event is unknown, so `error_lag` cannot be compared with it.
    pub error_lag_bytes: Option<u64>,
    /// Warning if the oldest unconfirmed event is at least this old.
    pub warn_lag: Duration,
    /// Error if the oldest unconfirmed event is at least this old. `None` usually means that there is no limit.
    ///
    /// If no relay reads the slot, `None` means that the limit is `warn_lag`, because nothing delivers the events.
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

/// Returns the state of a slot. If several states apply, returns the one that causes the others.
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
        // PostgreSQL 16 reports every invalidated slot as conflicting, even if the reason is removed WAL. In that
        // case the slot has no restart_lsn, and the next arm returns `Lost`.
        None if slot.conflicting == Some(true) && slot.restart_lsn.is_some() => {
            InvalidationCause::Conflict
        }
        None if slot.wal_status == Some(WalStatus::Lost) => return Some(Health::Lost),
        None => return None,
    };
    Some(Health::Invalidated { cause })
}

/// Checks whether the slot is *ahead* of the record. If so, the slot will not stream some events. A slot
/// *behind* the record is normal. After a crash, a server returns to the slot position that it last saved. A
/// promoted standby server returns to the position that it last synchronised.
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
    if let Some((holder, silent)) = silent_relay(slot) {
        let holder = Box::new(holder.clone());
        return Health::HeldBySilentRelay {
            lag,
            holder,
            silent,
        };
    }
    match (slot.active, observation.viewer) {
        (false, _) => Health::Inactive(lag),
        // A session is still creating the slot. PostgreSQL continues to create it even after the client has
        // gone, so the session does not show that a relay runs.
        (true, Viewer::Outside) if slot.confirmed_flush_lsn.is_none() => Health::Inactive(lag),
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

/// Returns the session that reads from the slot, if its application name shows that the session does not
/// belong to a relay.
#[must_use]
pub fn stranger(slot: &Slot) -> Option<&Holder> {
    let holder = slot.holder.as_ref().filter(|_| slot.active)?;
    let name = holder.application_name.as_deref()?;
    (!name.is_empty() && !name.starts_with(RELAYS)).then_some(holder)
}

/// Returns the session of the relay that holds the slot, and for how long the relay has been silent. `None`
/// if the relay does not count as silent, or if no relay holds the slot.
fn silent_relay(slot: &Slot) -> Option<(&Holder, Duration)> {
    let holder = slot.holder.as_ref().filter(|_| slot.active)?;
    let silent = holder.silent.filter(|silent| *silent >= SILENT_AFTER)?;
    Some((holder, silent))
}

/// Whether a relay reads from the slot and polls the server. A reader whose application name is unknown
/// counts as a relay. A slot without a confirmed position is still being created, so no relay reads from it.
#[must_use]
pub fn is_read_by_relay(slot: &Slot) -> bool {
    slot.active
        && slot.confirmed_flush_lsn.is_some()
        && stranger(slot).is_none()
        && silent_relay(slot).is_none()
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
    // If the age of the events is unknown, the oldest may have waited since the slot lost its reader.
    let is_long_unread = !is_read_by_relay(slot)
        && time.is_none()
        && error_lag
            .zip(slot.inactive_for)
            .is_some_and(|(limit, unread)| unread >= limit);
    let severity = if beyond(error_lag_bytes, error_lag) || is_long_unread {
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

/// The longest estimate that [`time_to_loss`] returns. A longer one would say nothing useful, because the rate of
/// writing changes.
const FARTHEST_LOSS: Duration = Duration::from_secs(90 * 86_400);

/// Estimates the time until the slot is lost. The estimate assumes that `safe_wal_size` keeps shrinking at the same
/// rate as between the earlier observation and now.
///
/// Returns `None` if the rate is unknown, if `safe_wal_size` is not shrinking, or if the estimate is 90 days or more.
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
    let time = Duration::try_from_secs_f64(seconds).ok()?;
    (time < FARTHEST_LOSS).then_some(time)
}

/// A relay's knowledge of its unconfirmed events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PendingSince {
    /// Unknown: the relay has not streamed since its start.
    Unknown,
    /// Everything that the relay received is confirmed.
    Nothing,
    /// The oldest unconfirmed event was committed at this time.
    Since(SystemTime),
}

/// Computes the lag of delivery as a time. `None` if it is unknown, zero if there is nothing to deliver.
///
/// If nothing is pending, a lag of up to `idle_bytes` counts as zero, because an idle server writes
/// a little WAL on its own. A larger lag means that there is WAL that the relay has not read yet, so
/// the age of its events is unknown.
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
        // If the server's clock is ahead of ours, the age can be negative. It then counts as zero.
        PendingSince::Since(committed) => Some(now.duration_since(committed).unwrap_or_default()),
    }
}

#[cfg(test)]
mod tests;
