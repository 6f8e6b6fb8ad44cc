//! Estimates PostgreSQL's clock.
//!
//! Commit times come from the server, and the relay's own clock may differ from the server's by
//! minutes. Every frame of the stream has the time at which the server sent it. The frame then
//! travels for a while, and may wait in a buffer, so when the relay reads it, the server's clock is
//! later than that time. The frame with the smallest delay gives the best estimate. The relay adds
//! only the time that has passed since that frame on its own monotonic clock.
//!
//! A server's clock may be set back during a session, so old frames expire.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use decoder::PgTimestamp;

/// A frame counts for at least this long, and for at most twice as long while newer frames arrive.
const COUNTS: Duration = Duration::from_secs(60);

/// The server's clock; unknown before the first frame of a session.
#[derive(Debug, Clone, Default)]
pub struct ServerClock(Arc<Mutex<Option<ClockReading>>>);

/// The estimate from the frames so far. An offset is the server's time at `origin`, in Unix microseconds,
/// as computed from one frame.
#[derive(Debug, Clone, Copy)]
struct ClockReading {
    origin: Instant,
    /// The largest offset since `since`.
    largest: i64,
    since: Instant,
    /// The largest offset of the period before `since`.
    before: i64,
}

impl ServerClock {
    /// Updates the estimate with a frame that the server sent at `sent_at` and the relay read at `now`.
    pub fn heard(&self, sent_at: PgTimestamp, now: Instant) {
        let sent_at = sent_at.as_unix_micros();
        let mut guard = self.lock();
        let heard = guard.get_or_insert(ClockReading {
            origin: now,
            largest: sent_at,
            since: now,
            before: i64::MIN,
        });
        let offset = sent_at.saturating_sub(micros(now.saturating_duration_since(heard.origin)));
        if now.saturating_duration_since(heard.since) >= COUNTS {
            heard.before = heard.largest;
            heard.largest = offset;
            heard.since = now;
        }
        heard.largest = heard.largest.max(offset);
    }

    /// The server's time; the relay's own time until the first frame has arrived.
    pub fn now(&self) -> SystemTime {
        let time = self.at(Instant::now());
        time.unwrap_or_else(SystemTime::now)
    }

    /// The server's time at `now`, if known.
    fn at(&self, now: Instant) -> Option<SystemTime> {
        let heard = (*self.lock())?;
        let offset = heard.largest.max(heard.before);
        let passed = micros(now.saturating_duration_since(heard.origin));
        let unix = u64::try_from(offset.saturating_add(passed)).ok()?;
        UNIX_EPOCH.checked_add(Duration::from_micros(unix))
    }

    /// Forgets the estimate when the session ends, because the next session may be on another server.
    pub fn forget(&self) {
        *self.lock() = None;
    }

    fn lock(&self) -> MutexGuard<'_, Option<ClockReading>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn micros(time: Duration) -> i64 {
    i64::try_from(time.as_micros()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sent_at(seconds: i64) -> PgTimestamp {
        PgTimestamp::from_unix_micros(seconds * 1_000_000)
    }

    fn shows(clock: &ServerClock, now: Instant) -> u64 {
        let time = clock.at(now).unwrap();
        time.duration_since(UNIX_EPOCH).unwrap().as_secs()
    }

    #[test]
    fn the_frame_with_the_smallest_delay_sets_the_clock() {
        let (clock, start) = (ServerClock::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(clock.at(start), None);
        // The server's clock is an hour ahead of the relay's.
        clock.heard(sent_at(3_600), at(10));
        assert_eq!(shows(&clock, at(12)), 3_602);
        // This frame waited 20 seconds in a buffer.
        clock.heard(sent_at(3_600), at(30));
        assert_eq!(shows(&clock, at(30)), 3_620);
        // This frame had a smaller delay than the first.
        clock.heard(sent_at(3_625), at(31));
        assert_eq!(shows(&clock, at(32)), 3_626);
        clock.forget();
        assert_eq!(clock.at(at(33)), None);
    }

    #[test]
    fn a_server_clock_that_is_set_back_is_followed_later() {
        let (clock, start) = (ServerClock::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        for second in 0..=200 {
            let shown = if second < 10 { second + 5_000 } else { second };
            clock.heard(sent_at(shown), at(second as u64));
        }
        assert_eq!(shows(&clock, at(200)), 200);
    }

    #[test]
    fn times_before_1970_are_unknown() {
        let (clock, now) = (ServerClock::default(), Instant::now());
        clock.heard(sent_at(-5), now);
        assert_eq!(clock.at(now), None);
    }
}
