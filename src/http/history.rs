//! Records the history of the relay's figures, for the graphs of the page. The history has a sample for every
//! five seconds of the last hour (fine), and for every two minutes of the last day (coarse). It takes about
//! 150 kB of memory.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde::Serialize;

use crate::condition::{RelayState, State};
use crate::metrics::Metrics;

/// Time between two samples of the fine history.
const INTERVAL: Duration = Duration::from_secs(5);

/// Number of samples of each history: an hour of fine samples, or a day of coarse ones.
const SAMPLES: usize = 720;

/// Number of fine samples from which [`loss_in_seconds`] computes the time until the slot is lost: five
/// minutes.
const LOSS_SAMPLES: usize = 60;

/// Number of fine samples for one coarse sample. So the coarse samples are two minutes apart.
const COARSE: u64 = 24;

/// The figures at one time. `None` means unknown.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Sample {
    /// Unix time, seconds.
    at: u64,
    state: State,
    events_per_second: f64,
    /// Mean time from commit to Pub/Sub's answer, seconds.
    latency: Option<f64>,
    lag_seconds: Option<f64>,
    lag_bytes: Option<f64>,
    retained_bytes: Option<f64>,
    headroom_bytes: Option<f64>,
}

/// The samples, oldest first.
#[derive(Debug, Clone, Default)]
pub(super) struct History(Arc<Mutex<Samples>>);

#[derive(Debug)]
struct Samples {
    fine: VecDeque<Sample>,
    coarse: VecDeque<Sample>,
    taken: u64,
}

impl Default for Samples {
    fn default() -> Self {
        Self {
            fine: VecDeque::with_capacity(SAMPLES),
            coarse: VecDeque::with_capacity(SAMPLES),
            taken: 0,
        }
    }
}

/// The JSON of `/history`.
#[derive(Debug, Serialize)]
pub(super) struct HistoryJson {
    hour: Vec<Sample>,
    day: Vec<Sample>,
    /// Seconds until the slot is lost, if the room for its WAL keeps shrinking as in the last five minutes. `None`
    /// if this room is unknown, or does not shrink.
    loss_in_seconds: Option<f64>,
}

impl History {
    /// Takes a sample every five seconds, until the future is dropped.
    pub(super) async fn record(self, metrics: Metrics, state: Arc<RelayState>) {
        let mut ticks = tokio::time::interval(INTERVAL);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut before = (Instant::now(), metrics.events_published.get());
        ticks.tick().await;
        loop {
            ticks.tick().await;
            let now = (Instant::now(), metrics.events_published.get());
            let seconds = now.0.saturating_duration_since(before.0).as_secs_f64();
            let published = now.1.saturating_sub(before.1);
            before = now;
            self.add(Sample {
                at: unix_seconds(),
                state: metrics.verdict(&metrics.condition(&state)).state,
                events_per_second: published as f64 / seconds,
                latency: metrics.recent_latency.take_mean(),
                lag_seconds: metrics.lag_seconds(),
                lag_bytes: metrics.lag_bytes.get(),
                retained_bytes: metrics.retained_bytes.get(),
                headroom_bytes: metrics.headroom_bytes.get(),
            });
        }
    }

    fn add(&self, sample: Sample) {
        let mut samples = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        samples.taken += 1;
        let is_coarse = samples.taken.is_multiple_of(COARSE);
        push(&mut samples.fine, sample);
        if is_coarse {
            push(&mut samples.coarse, sample);
        }
    }

    pub(super) fn json(&self) -> HistoryJson {
        let samples = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        HistoryJson {
            hour: samples.fine.iter().copied().collect(),
            day: samples.coarse.iter().copied().collect(),
            loss_in_seconds: loss_in_seconds(&samples.fine),
        }
    }
}

/// Estimates the time until the slot is lost, from the last [`LOSS_SAMPLES`] fine samples.
fn loss_in_seconds(fine: &VecDeque<Sample>) -> Option<f64> {
    let last = fine.back()?;
    let first = fine.get(fine.len().saturating_sub(LOSS_SAMPLES))?;
    let (before, left) = (first.headroom_bytes?, last.headroom_bytes?);
    let seconds = last.at.saturating_sub(first.at) as f64;
    let shrinks_by = (before - left) / seconds;
    (seconds > 0.0 && shrinks_by > 0.0).then(|| left.max(0.0) / shrinks_by)
}

fn push(samples: &mut VecDeque<Sample>, sample: Sample) {
    if samples.len() == SAMPLES {
        samples.pop_front();
    }
    samples.push_back(sample);
}

fn unix_seconds() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.unwrap_or_default().as_secs()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(at: u64, headroom_bytes: Option<f64>) -> Sample {
        Sample {
            at,
            state: State::Streaming,
            events_per_second: 0.0,
            latency: None,
            lag_seconds: None,
            lag_bytes: None,
            retained_bytes: None,
            headroom_bytes,
        }
    }

    #[test]
    fn the_time_to_a_loss_follows_from_the_last_five_minutes() {
        let history = History::default();
        let loss = || history.json().loss_in_seconds;
        history.add(sample(0, Some(9_000.0)));
        assert_eq!(loss(), None, "one sample has no rate");
        // A steep loss of room before the last five minutes, which the estimate must ignore.
        history.add(sample(5, Some(4_000.0)));
        for n in 0..60 {
            history.add(sample(10 + 5 * n, Some(4_000.0 - 10.0 * n as f64)));
        }
        assert_eq!(loss(), Some((4_000.0 - 590.0) / 2.0));
        history.add(sample(400, Some(9_000.0)));
        assert_eq!(loss(), None, "the room grows");
        history.add(sample(405, None));
        assert_eq!(loss(), None, "there is no limit");
    }

    #[test]
    fn the_history_has_an_hour_and_a_day_and_no_more() {
        let history = History::default();
        for at in 0..100_000 {
            history.add(sample(at, None));
        }
        let json = history.json();
        assert_eq!((json.hour.len(), json.day.len()), (SAMPLES, SAMPLES));
        assert_eq!(json.hour[0].at, 100_000 - SAMPLES as u64);
        assert_eq!(json.day[1].at - json.day[0].at, COARSE);
    }
}
