//! Reading late and in bulk while much comes or the stream is behind, and at once while live.
//!
//! The walsender makes one `send` per message. A reader that waits on the socket is woken by each
//! of them, which costs both sides more than the message; one that sleeps for a moment finds many.
//! Measured: `docs/reference/performance.md`. A state machine without IO; the clock is passed in.

use std::time::{Duration, Instant};

/// The rate is looked at this often.
const WINDOW: Duration = Duration::from_millis(5);

/// So many bytes in a window are much: about 15,000 small rows a second. Below it a live stream is
/// never delayed.
const MUCH_BYTES: usize = 24 << 10;

/// How long to let messages gather. In much more time a fast server fills a Unix socket and stands
/// still, and the delay is the price of a live stream at a high rate.
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

    /// So many bytes were read just now, as many as there was room for if `is_full`: then more is
    /// there already. What was committed long ago is read in bulk however little comes, since it may
    /// come slowly for the very reason that each message wakes us. Says how long to wait before the
    /// next read.
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
            // A window that lasted longer must have brought more.
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
        assert_eq!(
            pace.read(300, true, false, at),
            None,
            "more is there already"
        );
        assert_eq!(pace.read(300, false, false, at), Some(LINGER));
        assert_eq!(
            pace.read(300, false, false, at + Duration::from_millis(50)),
            None
        );
    }

    #[test]
    fn what_is_behind_is_read_in_bulk_however_little_comes() {
        let now = Instant::now();
        let mut pace = Pace::new(now);
        assert_eq!(pace.read(300, false, true, now), Some(LINGER));
        assert_eq!(
            pace.read(300, true, true, now),
            None,
            "more is there already"
        );
        assert_eq!(pace.read(300, false, false, now), None, "caught up");
    }
}
