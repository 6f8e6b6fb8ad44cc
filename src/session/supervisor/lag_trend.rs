//! Estimates when the relay will have caught up, from the work that was left at the last polls.
//!
//! The work is the number of WAL bytes after the confirmed position. While the relay delivers one large
//! transaction, the confirmed position does not move. During this time, the work is the number of events
//! without an outcome.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use decoder::Lsn;

use crate::metrics::Metrics;

/// The work that was left at the last polls.
#[derive(Debug, Default)]
pub(super) struct LagTrend {
    bytes: Trend,
    events: Trend,
    /// The confirmed position at the last poll.
    confirmed: Option<Lsn>,
}

impl LagTrend {
    /// Adds a sample, and sets the metric with the estimate.
    pub(super) fn measure(
        &mut self,
        lag_bytes: Option<u64>,
        confirmed: Option<Lsn>,
        metrics: &Metrics,
    ) {
        let now = Instant::now();
        let lag = lag_bytes.map(|bytes| bytes as f64);
        let by_bytes = self.bytes.gone_in(lag, now);
        let stands_still = self.confirmed == confirmed;
        self.confirmed = confirmed;
        let events = metrics.unresolved_events.get();
        let events = events.filter(|left| stands_still && *left >= 1.0);
        let by_events = self.events.restarting_gone_in(events, now);
        let time = by_bytes.or(by_events);
        metrics
            .caught_up_in
            .set(time.map(|time| time.as_secs_f64()));
    }
}

/// The last samples of an amount, which show how fast it shrinks.
#[derive(Debug, Default)]
struct Trend {
    samples: VecDeque<(Instant, f64)>,
}

impl Trend {
    /// Number of polls from which the trend is computed. With a poll every five seconds, this is about half a minute.
    const SAMPLES: usize = 6;

    /// Adds a sample. Returns the time until nothing is left, if the amount keeps shrinking as fast as it has shrunk
    /// since the oldest sample. Returns `None` if the amount is unknown or has not shrunk.
    fn gone_in(&mut self, left: Option<f64>, now: Instant) -> Option<Duration> {
        let left = left?;
        if self.samples.len() == Self::SAMPLES {
            self.samples.pop_front();
        }
        self.samples.push_back((now, left));
        let (at, before) = self.samples.front()?;
        let shrunk = before - left;
        let seconds = now.saturating_duration_since(*at).as_secs_f64();
        Duration::try_from_secs_f64(seconds * left / shrunk).ok()
    }

    /// Like [`gone_in`](Self::gone_in), but drops all earlier samples if the amount has grown since the last sample or
    /// is unknown. The number of events without an outcome jumps when a transaction arrives, so earlier samples do not
    /// show how fast the number shrinks.
    fn restarting_gone_in(&mut self, left: Option<f64>, now: Instant) -> Option<Duration> {
        let last = self.samples.back().map(|(_, last)| *last);
        if left.zip(last).is_none_or(|(left, last)| left > last) {
            self.samples.clear();
        }
        self.gone_in(left, now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_large_transaction_has_an_estimate_although_the_lag_grows() {
        let metrics = Metrics::default();
        let mut lag = LagTrend::default();
        for (bytes, confirmed, events, is_known) in [
            (1_000, 7, 0.0, false),
            // A large transaction arrives.
            (9_000, 7, 8_000.0, false),
            // The relay delivers it. The WAL grows, because the relay writes records.
            (9_500, 7, 6_000.0, true),
            (9_900, 7, 4_000.0, true),
            // Another large transaction arrives.
            (20_000, 7, 9_000.0, false),
            (20_000, 7, 9_000.0, false),
            // Small transactions are confirmed, so the estimate uses the bytes and not the events. More bytes
            // are left than at the oldest sample, so there is no estimate.
            (18_000, 8, 8_000.0, false),
            (18_000, 9, 7_000.0, false),
        ] {
            metrics.unresolved_events.set(Some(events));
            lag.measure(Some(bytes), Some(Lsn::new(confirmed)), &metrics);
            let found = metrics.caught_up_in.get();
            assert_eq!(found.is_some(), is_known, "{bytes} {events}: {found:?}");
        }
    }

    #[test]
    fn the_time_left_follows_from_the_time_that_the_rest_took() {
        let (mut trend, begin) = (Trend::default(), Instant::now());
        let at = |seconds| begin + Duration::from_secs(seconds);
        assert_eq!(trend.gone_in(Some(900.0), at(0)), None);
        let left = trend.gone_in(Some(600.0), at(5));
        assert_eq!(left, Some(Duration::from_secs(10)));
        assert_eq!(trend.gone_in(None, at(10)), None);
        assert_eq!(trend.gone_in(Some(900.0), at(15)), None);
    }
}
