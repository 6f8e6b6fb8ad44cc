//! Estimates PostgreSQL's clock.
//!
//! Commit times come from the server, and the relay's own clock may differ from the server's clock by
//! minutes. Every frame of the stream contains the time at which the server sent it. The frame then travels
//! for a while, and may wait in a buffer. So when the relay reads the frame, the server's clock already shows
//! a later time. The frame with the smallest delay gives the best estimate. The relay adds to this frame's
//! time only the time that has passed since the frame was read, by the relay's own monotonic clock.
//!
//! The server's clock may be set back during a session. Then the estimate is too far ahead, and every new
//! frame looks as if it had waited in a buffer for a long time. So every few seconds the relay also asks the
//! server for its time ([`ServerClock::asked`]), and drops an estimate that the answer contradicts.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use decoder::PgTimestamp;

/// Length of a period. The estimate uses the frame with the smallest delay in the current and the previous period.
/// Older frames do not count, so that the estimate can follow a clock that drifts.
///
/// An answer of the server counts as a frame. Only a frame ends a period, so a period lasts longer if no frame arrives.
/// If an answer contradicts the estimate, the answer replaces all earlier frames.
const COUNTS: Duration = Duration::from_secs(60);

/// Maximum time by which the estimate may be ahead of an answer of the server. Servers adjust their clocks by
/// small steps all the time, and such a step must not make the relay drop the estimate.
const SLACK: Duration = Duration::from_millis(500);

/// An estimate of the server's clock; unknown before the first frame of a session.
#[derive(Debug, Clone, Default)]
pub struct ServerClock(Arc<Mutex<Option<ClockReading>>>);

/// The estimate from the frames so far. The relay computes an offset from each frame: the time at which the server
/// sent the frame, minus the time that passed between `origin` and the relay's reading of the frame. Without a delay,
/// the offset is the server's time at `origin`, in Unix microseconds. A delay makes the offset smaller, so the largest
/// offset is the best estimate.
#[derive(Debug, Clone, Copy)]
struct ClockReading {
    origin: Instant,
    /// The largest offset of a frame in the current period.
    largest: i64,
    /// When the current period began.
    since: Instant,
    /// The largest offset of a frame in the previous period; `i64::MIN` if there was no previous period.
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

    /// Checks the estimate against an answer of the server. The relay asked at `asked_at`, and the answer
    /// arrived at `now`. At some instant between these two, the server's clock showed `shown`.
    pub fn asked(&self, shown: PgTimestamp, asked_at: Instant, now: Instant) {
        self.heard(shown, now);
        let mut guard = self.lock();
        let Some(reading) = guard.as_mut() else {
            return;
        };
        let passed = micros(asked_at.saturating_duration_since(reading.origin));
        let most = shown.as_unix_micros().saturating_sub(passed);
        if reading.largest.max(reading.before) > most.saturating_add(micros(SLACK)) {
            (reading.largest, reading.before) = (most, i64::MIN);
            reading.since = now;
        }
    }

    /// Returns the server's time, or the relay's own time if no frame has arrived yet.
    pub fn now(&self) -> SystemTime {
        let time = self.at(Instant::now());
        time.unwrap_or_else(SystemTime::now)
    }

    /// Returns the server's time at `now`, if it is known.
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
        // 10 seconds after `start`, the server's clock shows 3,600 seconds.
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
    fn an_answer_of_the_server_shows_at_once_that_its_clock_was_set_back() {
        let (clock, start) = (ServerClock::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        clock.heard(sent_at(10_000), at(10));
        // The relay asked at 14 seconds, and the answer arrived at 15 seconds. The server's clock showed 10,004 in
        // between. According to the estimate, it showed 10,004 at 14 seconds, so the answer agrees with the estimate.
        clock.asked(sent_at(10_004), at(14), at(15));
        assert_eq!(shows(&clock, at(15)), 10_005);
        clock.asked(sent_at(6_420), at(20), at(20));
        assert_eq!(shows(&clock, at(21)), 6_421);
        clock.heard(sent_at(6_422), at(22));
        assert_eq!(shows(&clock, at(22)), 6_422);
        // An answer also corrects an estimate that is behind the server's clock.
        clock.asked(sent_at(9_000), at(30), at(31));
        assert_eq!(shows(&clock, at(31)), 9_000);
    }

    #[test]
    fn times_before_1970_are_unknown() {
        let (clock, now) = (ServerClock::default(), Instant::now());
        clock.heard(sent_at(-5), now);
        assert_eq!(clock.at(now), None);
    }
}
