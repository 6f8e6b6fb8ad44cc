//! Paces reads. While the data rate is high or the stream is behind, the session pauses briefly before
//! each read, so that it reads in bulk. Otherwise it reads at once.
//!
//! The walsender makes one `send` call per message. Each call wakes a reader that waits on the
//! socket, which costs both sides more than the message itself. A reader that sleeps briefly finds
//! many messages at once. Measurements: `bench/README.md`. This is a state machine without IO; the
//! caller passes in the clock.

use std::time::{Duration, Instant};

/// How often to measure the data rate.
const WINDOW: Duration = Duration::from_millis(5);

/// Number of bytes per window from which the rate counts as high: about 15,000 small rows a second.
/// Below this rate, a live stream is never delayed.
const MUCH_BYTES: usize = 24 << 10;

/// Pause before a read, in which messages accumulate. It delays a live stream at a high rate by up to this
/// much. During a much longer pause, a fast server would fill a Unix socket and stall.
const LINGER: Duration = Duration::from_micros(200);

#[derive(Debug)]
pub(super) struct Pace {
    window_began: Instant,
    window_bytes: usize,
    busy: bool,
}

impl Pace {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            window_began: now,
            window_bytes: 0,
            busy: false,
        }
    }

    /// Records a read of `bytes` bytes, and returns how long to wait before the next read.
    /// `is_full` means that the read filled the buffer, so more data is ready and there is no wait.
    /// A stream that is behind is read in bulk even at a low rate, because waking up for each
    /// message may be the reason for the low rate.
    pub(super) fn read(
        &mut self,
        bytes: usize,
        is_full: bool,
        is_behind: bool,
        now: Instant,
    ) -> Option<Duration> {
        self.window_bytes += bytes;
        let elapsed = now.saturating_duration_since(self.window_began);
        if elapsed >= WINDOW {
            // A longer window needs proportionally more bytes to count as a high rate.
            self.busy = self.window_bytes as f64
                >= MUCH_BYTES as f64 * elapsed.as_secs_f64() / WINDOW.as_secs_f64();
            *self = Self {
                window_began: now,
                window_bytes: 0,
                busy: self.busy,
            };
        }
        ((self.busy || is_behind) && !is_full).then_some(LINGER)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_live_stream_of_ten_thousand_small_rows_a_second_is_never_delayed() {
        let start = Instant::now();
        let mut pace = Pace::new(start);
        for n in 1..10_000 {
            assert_eq!(
                pace.read(300, false, false, start + Duration::from_micros(100 * n)),
                None
            );
        }
    }

    #[test]
    fn a_flood_is_read_in_bulk_and_its_end_is_noticed() {
        let start = Instant::now();
        let mut pace = Pace::new(start);
        for n in 1..1_000 {
            pace.read(300, false, false, start + Duration::from_micros(20 * n));
        }
        let at = start + Duration::from_millis(20);
        assert_eq!(pace.read(300, true, false, at), None, "more data is ready");
        assert_eq!(pace.read(300, false, false, at), Some(LINGER));
        assert_eq!(
            pace.read(300, false, false, at + Duration::from_millis(50)),
            None
        );
    }

    #[test]
    fn a_stream_that_is_behind_is_read_in_bulk_at_any_rate() {
        let now = Instant::now();
        let mut pace = Pace::new(now);
        assert_eq!(pace.read(300, false, true, now), Some(LINGER));
        assert_eq!(pace.read(300, true, true, now), None, "more data is ready");
        assert_eq!(pace.read(300, false, false, now), None, "caught up");
    }
}
