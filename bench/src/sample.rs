//! The result of one drain, and the medians of several drains.

use serde_json::{Value, json};

use crate::process::Usage;
use crate::report::Costs;

/// The measurements of one drain.
#[derive(Debug)]
pub(crate) struct Sample {
    pub(crate) events: u64,
    /// False if the program was stopped before the end, because it used too much memory.
    pub(crate) complete: bool,
    pub(crate) seconds: f64,
    /// Seconds from the moment when a walsender began to serve the slot. The same as `seconds` if
    /// no walsender was seen.
    pub(crate) streamed_seconds: f64,
    /// The CPU time and memory of the program that drains the backlog.
    pub(crate) program: Usage,
    /// CPU time of the server's processes and of the emulator, in seconds. 0 for a process that
    /// does not exist.
    pub(crate) walsender_cpu: f64,
    pub(crate) dispatch_cpu: f64,
    pub(crate) emulator_cpu: f64,
    /// Number of publish requests that the emulator received. `None` without an emulator.
    pub(crate) requests: Option<u64>,
}

impl Sample {
    /// Events per second.
    pub(crate) fn rate(&self) -> f64 {
        self.events as f64 / self.seconds
    }

    fn us_per_event(&self, cpu_seconds: f64) -> f64 {
        cpu_seconds * 1e6 / self.events as f64
    }

    pub(crate) fn to_json(&self) -> Value {
        json!({
            "events": self.events,
            "complete": self.complete,
            "seconds": self.seconds,
            "streamed_seconds": self.streamed_seconds,
            "peak_rss_kib": self.program.peak_rss_kib,
            "requests": self.requests,
            "cpu_us_per_event": self.us_per_event(self.program.cpu_seconds),
            "walsender_cpu_us_per_event": self.us_per_event(self.walsender_cpu),
            "dispatch_cpu_us_per_event": self.us_per_event(self.dispatch_cpu),
            "emulator_cpu_us_per_event": self.us_per_event(self.emulator_cpu),
        })
    }
}

/// Returns the costs: the medians of the CPU times per event, and the largest peak memory of our
/// program.
pub(crate) fn costs(baseline: &[Sample], ours: &[Sample]) -> Costs {
    let of = |samples: &[Sample], cpu: fn(&Sample) -> f64| {
        median(samples.iter().map(|s| s.us_per_event(cpu(s))))
    };
    Costs {
        baseline_us: of(baseline, |s| s.program.cpu_seconds),
        ours_us: of(ours, |s| s.program.cpu_seconds),
        baseline_walsender_us: of(baseline, |s| s.walsender_cpu),
        walsender_us: of(ours, |s| s.walsender_cpu),
        dispatch_us: of(ours, |s| s.dispatch_cpu),
        emulator_us: of(ours, |s| s.emulator_cpu),
        peak_mib: ours
            .iter()
            .map(|s| s.program.peak_rss_kib as f64 / 1024.0)
            .fold(0.0, f64::max),
    }
}

/// The middle value, or the mean of the middle two values. NaN if there are no values.
pub(crate) fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    match (
        values.get(values.len().saturating_sub(1) / 2),
        values.get(values.len() / 2),
    ) {
        (Some(low), Some(high)) => f64::midpoint(*low, *high),
        _ => f64::NAN,
    }
}

#[cfg(test)]
mod tests {
    use super::median;

    #[test]
    fn the_median_of_an_even_count_is_the_mean_of_the_middle_two() {
        assert_eq!(median([3.0, 1.0, 2.0].into_iter()), 2.0);
        assert_eq!(median([4.0, 1.0, 2.0, 3.0].into_iter()), 2.5);
        assert!(median(std::iter::empty()).is_nan());
    }
}
