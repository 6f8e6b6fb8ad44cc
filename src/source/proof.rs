//! What the session's thread and the rest of the relay tell each other of the lease.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// A handle; clones share it.
#[derive(Debug, Clone)]
pub(crate) struct LeaseProof(Arc<Times>);

/// Microseconds after `origin`; 0 is never.
#[derive(Debug)]
struct Times {
    origin: Instant,
    proven: AtomicU64,
    seen: AtomicU64,
    end: AtomicU64,
    /// The same by the calendar, microseconds after 1970: the other clock stands still while the
    /// machine is suspended.
    end_by_calendar: AtomicU64,
    given_up: AtomicBool,
}

impl LeaseProof {
    pub(super) fn new() -> Self {
        Self(Arc::new(Times {
            origin: Instant::now(),
            proven: AtomicU64::new(0),
            seen: AtomicU64::new(0),
            end: AtomicU64::new(0),
            end_by_calendar: AtomicU64::new(0),
            given_up: AtomicBool::new(false),
        }))
    }

    /// PostgreSQL has taken in a status message that was sent then.
    pub(crate) fn prove(&self, sent_at: Instant) {
        self.0
            .proven
            .fetch_max(self.micros(sent_at), Ordering::AcqRel);
    }

    /// The latest that was proven.
    pub(super) fn proven(&self) -> Option<Instant> {
        self.time(&self.0.proven)
    }

    /// Our walsender had the slot then; what it has heard from us is not shown.
    pub(crate) fn seen(&self, at: Instant) {
        self.0.seen.fetch_max(self.micros(at), Ordering::AcqRel);
    }

    /// When that was seen last.
    pub(super) fn last_seen(&self) -> Option<Instant> {
        self.time(&self.0.seen)
    }

    /// Our walsender has the slot no more, and will not have it again.
    pub(crate) fn give_up(&self) {
        self.0.given_up.store(true, Ordering::Release);
    }

    pub(super) fn is_given_up(&self) -> bool {
        self.0.given_up.load(Ordering::Acquire)
    }

    /// Sending has to stop then.
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

    /// Whether sending has to stop for one reason or the other.
    pub(super) fn is_over(&self) -> bool {
        self.is_given_up() || self.has_expired()
    }

    /// Whether that time has come, by the clock that is further on: a calendar that is set ahead
    /// costs a session, one that is set back nothing. The session's own thread moves the end: if
    /// that stands still, so does this.
    pub(super) fn has_expired(&self) -> bool {
        self.has_expired_at(Instant::now(), SystemTime::now())
    }

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
    fn a_lease_ends_while_the_machine_is_suspended_and_not_when_the_calendar_is_set_back() {
        let lease = LeaseProof::new();
        let (now, calendar) = (Instant::now(), SystemTime::now());
        let seconds = Duration::from_secs;
        lease.set_end_at(now + seconds(45), now, calendar);
        assert!(!lease.has_expired_at(now + seconds(44), calendar + seconds(44)));
        assert!(lease.has_expired_at(now + seconds(45), calendar + seconds(45)));
        // Suspended for a minute.
        assert!(lease.has_expired_at(now + seconds(1), calendar + seconds(61)));
        // Set back by an hour.
        assert!(!lease.has_expired_at(now + seconds(44), calendar - seconds(3_600)));
        assert!(lease.has_expired_at(now + seconds(45), calendar - seconds(3_600)));
    }
}
