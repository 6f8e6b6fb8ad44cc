//! Judges a slot: one word for its state, how bad that is, and what to do.
//!
//! Pure: everything that is known comes in as an [`Observation`], nothing is asked or measured.
//! Causes go before symptoms: a slot on another cluster is not "inactive", a lost one is not
//! "lagging".

use std::time::{Duration, SystemTime};

use decoder::Lsn;

use crate::{Origin, Severity, Slot, WalStatus};

mod state;

pub use state::{Headroom, Health, InvalidationCause, Lag};

/// What is known about a slot at one moment.
#[derive(Debug, Clone, Copy)]
pub struct Observation<'a> {
    /// The slot; `None` when there is none of its name.
    pub slot: Option<&'a Slot>,
    /// The same slot a while ago, for rates.
    pub earlier: Option<Earlier<'a>>,
    /// Who asks.
    pub viewer: Viewer,
    /// How far delivery is behind in time, see [`time_lag`].
    pub time_lag: Option<Duration>,
    /// The database that we are connected to.
    pub origin: Origin,
    /// What the relay wrote down about the slot.
    pub recorded: Option<&'a RecordedPosition>,
}

/// An earlier look at the same slot.
#[derive(Debug, Clone, Copy)]
pub struct Earlier<'a> {
    /// As it was.
    pub slot: &'a Slot,
    /// How long ago.
    pub ago: Duration,
}

/// Who asks for the judgement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Viewer {
    /// A person or a monitor: any reader of the slot is the right one.
    Outside,
    /// The relay that streams from the slot.
    Streaming,
    /// A relay that does not: another reader means that it stands by.
    Waiting,
}

/// What the relay wrote down when it last confirmed something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecordedPosition {
    /// The database in which it was written down.
    pub origin: Origin,
    /// The confirmed position.
    pub confirmed_lsn: Option<Lsn>,
    /// Whether nothing can have been confirmed after it was written down: the relay has it in
    /// memory, or wrote it as its last act of a clean stop. Positions confirmed on an idle
    /// database are not written down at once, so that without this a slot further on is normal.
    pub is_final: bool,
}

/// From where on a state is worth a warning or an alarm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Thresholds {
    /// Unconfirmed WAL.
    pub warn_lag_bytes: u64,
    /// Unconfirmed WAL.
    pub error_lag_bytes: Option<u64>,
    /// Age of the oldest unconfirmed event.
    pub warn_lag: Duration,
    /// Age of the oldest unconfirmed event.
    pub error_lag: Option<Duration>,
    /// Time until the slot is lost at the present rate.
    pub warn_time_to_loss: Duration,
}

impl Default for Thresholds {
    /// 256 MiB (16 segments) or 5 minutes behind; an hour to react before the slot is lost.
    fn default() -> Self {
        Self {
            warn_lag_bytes: 256 << 20,
            error_lag_bytes: None,
            warn_lag: Duration::from_secs(300),
            error_lag: None,
            warn_time_to_loss: Duration::from_secs(3600),
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
        .or_else(|| endangered(slot, observation.earlier, thresholds))
        .unwrap_or_else(|| reading(slot, observation, thresholds))
}

fn gone(slot: &Slot) -> Option<Health> {
    let cause = match slot.invalidation_reason.as_deref() {
        Some("wal_removed") => return Some(Health::Lost),
        Some("rows_removed") => InvalidationCause::RowsRemoved,
        Some("wal_level_insufficient") => InvalidationCause::WalLevelInsufficient,
        Some("idle_timeout") => InvalidationCause::IdleTimeout,
        Some(other) => InvalidationCause::Other(other.to_owned()),
        // PostgreSQL 16 calls every invalidated slot conflicting; one whose WAL was removed has no
        // restart_lsn any more.
        None if slot.conflicting == Some(true) && slot.restart_lsn.is_some() => {
            InvalidationCause::Conflict
        }
        None if slot.wal_status == Some(WalStatus::Lost) => return Some(Health::Lost),
        None => return None,
    };
    Some(Health::Invalidated { cause })
}

/// A position *behind* the recorded one is normal: a crashed server goes back to what it last
/// saved, and a promoted standby to what it last copied. Only one ahead leaves events out.
fn recreated(slot: &Slot, recorded: Option<&RecordedPosition>) -> Option<Health> {
    let recorded = recorded.filter(|r| r.is_final)?.confirmed_lsn?;
    let found = slot.confirmed_flush_lsn?;
    (found > recorded).then_some(Health::Recreated { recorded, found })
}

fn endangered(
    slot: &Slot,
    earlier: Option<Earlier<'_>>,
    thresholds: &Thresholds,
) -> Option<Health> {
    let headroom = headroom(slot, earlier);
    let is_short = headroom
        .time_to_loss
        .is_some_and(|t| t < thresholds.warn_time_to_loss);
    match slot.wal_status? {
        WalStatus::Unreserved => Some(Health::Unreserved(headroom)),
        WalStatus::Extended if is_short => Some(Health::Extended(headroom)),
        WalStatus::Reserved if is_short => Some(Health::Reserved(headroom)),
        WalStatus::Extended | WalStatus::Reserved | WalStatus::Lost => None,
    }
}

fn reading(slot: &Slot, observation: &Observation<'_>, thresholds: &Thresholds) -> Health {
    let lag = lag(slot, observation.time_lag, thresholds);
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

fn lag(slot: &Slot, time: Option<Duration>, thresholds: &Thresholds) -> Lag {
    let bytes = slot.lag_bytes.unwrap_or(0);
    let beyond = |bytes_limit: Option<u64>, time_limit: Option<Duration>| {
        bytes_limit.is_some_and(|limit| bytes >= limit)
            || time_limit
                .zip(time)
                .is_some_and(|(limit, time)| time >= limit)
    };
    let severity = if beyond(thresholds.error_lag_bytes, thresholds.error_lag) {
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

/// What is left before the slot is lost, with the time at the rate since the earlier look.
#[must_use]
pub fn headroom(slot: &Slot, earlier: Option<Earlier<'_>>) -> Headroom {
    let time_to_loss = slot.safe_wal_size.and_then(|left| {
        let earlier = earlier?;
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
    });
    Headroom {
        bytes: slot.safe_wal_size,
        time_to_loss,
    }
}

/// What a relay knows of the events that it has not confirmed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pending {
    /// Nothing yet: it has not streamed since its start.
    Unknown,
    /// Everything that it was sent is confirmed.
    Nothing,
    /// The oldest unconfirmed event was committed then.
    Since(SystemTime),
}

/// How far delivery is behind in time: absent until known, zero when there is nothing to deliver.
///
/// `lag_bytes` up to `idle_bytes` count as none: an idle server writes a little WAL by itself.
/// With nothing pending but more than that to read, the age is not known.
#[must_use]
pub fn time_lag(
    pending: Pending,
    lag_bytes: u64,
    idle_bytes: u64,
    now: SystemTime,
) -> Option<Duration> {
    match pending {
        Pending::Unknown => None,
        Pending::Nothing => (lag_bytes <= idle_bytes).then_some(Duration::ZERO),
        // The server's clock may be ahead of ours.
        Pending::Since(committed) => Some(now.duration_since(committed).unwrap_or_default()),
    }
}

#[cfg(test)]
mod tests;
