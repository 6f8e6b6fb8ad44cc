//! What came out: medians, and ratios to the baseline.

use serde_json::json;

use crate::process::Usage;

/// One drain.
#[derive(Debug)]
pub(super) struct Drain {
    pub(super) seconds: f64,
    pub(super) usage: Usage,
}

#[derive(Debug)]
pub(super) struct Run {
    pub(super) baseline: Drain,
    pub(super) relay: Drain,
}

#[derive(Debug)]
pub(super) struct Outcome {
    pub(super) scenario: &'static str,
    pub(super) events: u64,
    pub(super) runs: Vec<Run>,
}

impl Outcome {
    fn rate(&self, drain: impl Fn(&Run) -> &Drain) -> f64 {
        median(
            self.runs
                .iter()
                .map(|run| self.events as f64 / drain(run).seconds),
        )
    }

    /// Median of the ratios of neighbouring runs.
    fn ratio(&self) -> f64 {
        median(
            self.runs
                .iter()
                .map(|run| run.baseline.seconds / run.relay.seconds),
        )
    }

    /// Microseconds of CPU for each event.
    fn cpu_us(&self, drain: impl Fn(&Run) -> &Drain) -> f64 {
        let cpu = self.runs.iter().map(|run| drain(run).usage.cpu_seconds);
        median(cpu) * 1e6 / self.events as f64
    }

    fn peak_mib(&self) -> u64 {
        self.runs
            .iter()
            .map(|run| run.relay.usage.peak_rss_kib)
            .max()
            .unwrap_or(0)
            / 1024
    }
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// "its us" and "our us" are the readers' own CPU time for each event, microseconds.
pub(super) fn print_table(outcomes: &[Outcome]) {
    println!(
        "{:20} {:>10} {:>18} {:>14} {:>7} {:>10} {:>8} {:>8}",
        "scenario",
        "events",
        "pg_recvlogical/s",
        "postrider/s",
        "ratio",
        "peak MiB",
        "its us",
        "our us"
    );
    for outcome in outcomes {
        println!(
            "{:20} {:>10} {:>18.0} {:>14.0} {:>7.2} {:>10} {:>8.1} {:>8.1}",
            outcome.scenario,
            outcome.events,
            outcome.rate(|run| &run.baseline),
            outcome.rate(|run| &run.relay),
            outcome.ratio(),
            outcome.peak_mib(),
            outcome.cpu_us(|run| &run.baseline),
            outcome.cpu_us(|run| &run.relay),
        );
    }
}

pub(super) fn print_json(outcomes: &[Outcome]) {
    let rows: Vec<_> = outcomes
        .iter()
        .map(|outcome| {
            json!({
                "scenario": outcome.scenario,
                "events": outcome.events,
                "runs": outcome.runs.len(),
                "baseline": "pg_recvlogical to /dev/null",
                "baseline_events_per_second": outcome.rate(|run| &run.baseline),
                "events_per_second": outcome.rate(|run| &run.relay),
                "ratio": outcome.ratio(),
                "peak_rss_mib": outcome.peak_mib(),
                "baseline_cpu_us_per_event": outcome.cpu_us(|run| &run.baseline),
                "cpu_us_per_event": outcome.cpu_us(|run| &run.relay),
            })
        })
        .collect();
    println!("{}", json!(rows));
}
