//! The part of the lease's state that the session's thread shares with the caller.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// A handle to the shared state. All clones refer to the same lease.
#[derive(Debug, Clone)]
pub struct LeaseProof(Arc<ProofTimes>);

/// The shared state. Times are in microseconds after `origin`; 0 means never.
#[derive(Debug)]
struct ProofTimes {
    origin: Instant,
    proven: AtomicU64,
    seen: AtomicU64,
    end: AtomicU64,
    /// The end of the lease by the wall clock, in microseconds after 1970. The lease has this second end
    /// because the monotonic clock stops while the machine is suspended.
    end_by_calendar: AtomicU64,
    given_up: AtomicBool,
}

impl LeaseProof {
    pub(super) fn new() -> Self {
        Self(Arc::new(ProofTimes {
            origin: Instant::now(),
            proven: AtomicU64::new(0),
            seen: AtomicU64::new(0),
            end: AtomicU64::new(0),
            end_by_calendar: AtomicU64::new(0),
            given_up: AtomicBool::new(false),
        }))
    }

    /// Records that PostgreSQL received a status message which we sent at `sent_at`.
    pub fn prove(&self, sent_at: Instant) {
        self.0
            .proven
            .fetch_max(self.micros(sent_at), Ordering::AcqRel);
    }

    /// Send time of the latest status message that PostgreSQL provably received.
    pub(super) fn proven(&self) -> Option<Instant> {
        self.time(&self.0.proven)
    }

    /// Records that our walsender held the slot at the time `at`. This does not prove that the
    /// walsender has heard from us.
    pub fn seen(&self, at: Instant) {
        self.0.seen.fetch_max(self.micros(at), Ordering::AcqRel);
    }

    /// The latest time at which our walsender was seen holding the slot.
    pub(super) fn last_seen(&self) -> Option<Instant> {
        self.time(&self.0.seen)
    }

    /// Records that our walsender no longer holds the slot and will not get it back.
    pub fn give_up(&self) {
        self.0.given_up.store(true, Ordering::Release);
    }

    #[inline]
    pub(super) fn is_given_up(&self) -> bool {
        self.0.given_up.load(Ordering::Acquire)
    }

    /// Sets the time at which sending to Pub/Sub has to stop.
    pub(super) fn set_end(&self, end: Instant) {
        self.set_end_at(end, Instant::now(), SystemTime::now());
    }

    fn set_end_at(&self, end: Instant, now: Instant, calendar: SystemTime) {
        let left = end.saturating_duration_since(now);
        self.0.end.store(self.micros(end), Ordering::Release);
        self.0
            .end_by_calendar
            .store(micros_of(calendar + left), Ordering::Release);
    }

    /// Whether sending to Pub/Sub has to stop, because the slot is gone or the lease has expired.
    #[inline]
    pub(super) fn is_over(&self) -> bool {
        self.is_given_up() || self.has_expired()
    }

    /// Whether the lease has expired, by the monotonic clock or by the wall clock. If somebody sets
    /// the wall clock ahead, one session ends early. If somebody sets it back, the monotonic clock
    /// still ends the lease. Only the session's thread extends the lease, so the lease also expires
    /// if that thread hangs.
    #[inline]
    pub(super) fn has_expired(&self) -> bool {
        self.has_expired_at(Instant::now(), SystemTime::now())
    }

    #[inline]
    fn has_expired_at(&self, now: Instant, calendar: SystemTime) -> bool {
        self.micros(now) >= self.0.end.load(Ordering::Acquire)
            || micros_of(calendar) >= self.0.end_by_calendar.load(Ordering::Acquire)
    }

    fn time(&self, micros: &AtomicU64) -> Option<Instant> {
        match micros.load(Ordering::Acquire) {
            0 => None,
            micros => Some(self.0.origin + Duration::from_micros(micros)),
        }
    }

    fn micros(&self, at: Instant) -> u64 {
        let micros = at.saturating_duration_since(self.0.origin).as_micros();
        u64::try_from(micros).unwrap_or(u64::MAX)
    }
}

fn micros_of(calendar: SystemTime) -> u64 {
    let since = calendar.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_expires_during_suspend_and_is_not_extended_by_setting_the_clock_back() {
        let lease = LeaseProof::new();
        let (now, calendar) = (Instant::now(), SystemTime::now());
        let seconds = Duration::from_secs;
        lease.set_end_at(now + seconds(45), now, calendar);
        assert!(!lease.has_expired_at(now + seconds(44), calendar + seconds(44)));
        assert!(lease.has_expired_at(now + seconds(45), calendar + seconds(45)));
        // The machine was suspended for a minute.
        assert!(lease.has_expired_at(now + seconds(1), calendar + seconds(61)));
        // Somebody set the wall clock back by an hour.
        assert!(!lease.has_expired_at(now + seconds(44), calendar - seconds(3_600)));
        assert!(lease.has_expired_at(now + seconds(45), calendar - seconds(3_600)));
    }
}
