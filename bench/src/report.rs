//! Prints the results as a table and writes them as JSON. Each line has the medians, the ratio to the
//! baseline, and the aim that the ratio or the value must meet.

use std::fmt;
use std::path::Path;

use serde_json::{Value, json};

/// One line of the report: a measurement of our program and its baseline.
#[derive(Debug)]
pub(crate) struct Line {
    pub(crate) scenario: String,
    pub(crate) unit: &'static str,
    pub(crate) baseline_is: String,
    pub(crate) ours_is: String,
    /// NaN if there is no baseline.
    pub(crate) baseline: f64,
    pub(crate) ours: f64,
    /// The median of the ratios of all pairs of runs. A ratio is our value divided by the value of the
    /// baseline.
    pub(crate) ratio: f64,
    pub(crate) aim: Aim,
    /// The aim for the CPU time of our program, as a fraction of the CPU time of the baseline.
    pub(crate) cpu_aim: Option<f64>,
    pub(crate) costs: Option<Costs>,
    pub(crate) runs: usize,
    /// All measurements, as JSON.
    pub(crate) samples: Value,
    pub(crate) note: Option<String>,
}

/// The CPU time per event of each process, in microseconds, and the peak memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Costs {
    pub(crate) baseline_us: f64,
    pub(crate) ours_us: f64,
    /// The CPU time of the walsender that served the baseline.
    pub(crate) baseline_walsender_us: f64,
    /// The CPU time of the walsender that served our program.
    pub(crate) walsender_us: f64,
    /// The CPU time of the backend that writes dispatch rows.
    pub(crate) dispatch_us: f64,
    pub(crate) emulator_us: f64,
    /// The largest peak memory of our program in all runs, in MiB.
    pub(crate) peak_mib: f64,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Aim {
    /// No aim: the line is only shown.
    None,
    RatioAtLeast(f64),
    RatioAtMost(f64),
    /// The ratio differs from 1 by at most this much.
    Within(f64),
    /// Our value is at most this value, in the unit of the line.
    AtMost(f64),
    /// Our value exceeds the baseline by at most this value, in the unit of the line.
    AboveBaselineAtMost(f64),
}

impl fmt::Display for Aim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("-"),
            Self::RatioAtLeast(ratio) => write!(f, ">= {ratio:.2}"),
            Self::RatioAtMost(ratio) => write!(f, "<= {ratio:.2}"),
            Self::Within(part) => write!(f, "1 +- {part:.2}"),
            Self::AtMost(most) => write!(f, "<= {most}"),
            Self::AboveBaselineAtMost(more) => write!(f, "<= baseline + {more}"),
        }
    }
}

impl Line {
    /// Whether all aims of the line are met. `None` if the line has no aim.
    fn is_met(&self) -> Option<bool> {
        let value = match self.aim {
            Aim::None => None,
            Aim::RatioAtLeast(least) => Some(self.ratio >= least),
            Aim::RatioAtMost(most) => Some(self.ratio <= most),
            Aim::Within(part) => Some((self.ratio - 1.0).abs() <= part),
            Aim::AtMost(most) => Some(self.ours <= most),
            Aim::AboveBaselineAtMost(more) => Some(self.ours - self.baseline <= more),
        };
        let cpu = self.cpu_aim.zip(self.costs);
        let cpu = cpu.map(|(share, costs)| costs.ours_us <= share * costs.baseline_us);
        match (value, cpu) {
            (Some(value), Some(cpu)) => Some(value && cpu),
            (value, cpu) => value.or(cpu),
        }
    }

    fn aims(&self) -> String {
        match self.cpu_aim {
            Some(share) => format!("{}, CPU <= {share:.2}", self.aim),
            None => self.aim.to_string(),
        }
    }

    fn to_json(&self) -> Value {
        let costs = self.costs.map(|costs| {
            json!({
                "cpu_us_per_event": costs.ours_us,
                "baseline_cpu_us_per_event": costs.baseline_us,
                "walsender_cpu_us_per_event": costs.walsender_us,
                "baseline_walsender_cpu_us_per_event": costs.baseline_walsender_us,
                "dispatch_cpu_us_per_event": costs.dispatch_us,
                "emulator_cpu_us_per_event": costs.emulator_us,
                "peak_rss_mib": costs.peak_mib,
            })
        });
        json!({
            "scenario": self.scenario,
            "unit": self.unit,
            "baseline_is": self.baseline_is,
            "ours_is": self.ours_is,
            "baseline": self.baseline,
            "ours": self.ours,
            "ratio": self.ratio,
            "aim": self.aims(),
            "met": self.is_met(),
            "runs": self.runs,
            "costs": costs,
            "samples": self.samples,
            "note": self.note,
        })
    }
}

/// Formats a value with two decimals if it is below 10, with one if it is below 100, and otherwise with none.
/// NaN becomes a dash.
fn figure(value: f64) -> String {
    match value.abs() {
        size if size.is_nan() => "-".into(),
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

/// Prints the table as Markdown. The columns with "us" contain microseconds of CPU time per event.
pub(crate) fn print_table(lines: &[Line]) {
    println!(
        "| scenario | unit | baseline (what) | baseline | ours | ratio | aim | met? | our us \
         | baseline us | walsender us (baseline's) | dispatch us | emulator us | peak MiB |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|---|---|---|");
    for line in lines {
        let met = match line.is_met() {
            Some(true) => "yes",
            Some(false) => "no",
            None => "-",
        };
        println!(
            "| {} | {} | {} | {} | {} | {} | {} | {met} | {} |",
            line.scenario,
            line.unit,
            line.baseline_is,
            figure(line.baseline),
            figure(line.ours),
            figure(line.ratio),
            line.aims(),
            cost_cells(line.costs.as_ref()),
        );
    }
    for line in lines {
        if let Some(note) = &line.note {
            println!("\n{}: {note}", line.scenario);
        }
    }
}

fn cost_cells(costs: Option<&Costs>) -> String {
    let Some(costs) = costs else {
        return ["-"; 6].join(" | ");
    };
    [
        figure(costs.ours_us),
        figure(costs.baseline_us),
        format!(
            "{} ({})",
            figure(costs.walsender_us),
            figure(costs.baseline_walsender_us)
        ),
        figure(costs.dispatch_us),
        figure(costs.emulator_us),
        format!("{:.0}", costs.peak_mib),
    ]
    .join(" | ")
}

pub(crate) fn write_json(file: &Path, lines: &[Line]) -> Result<(), String> {
    let json = Value::from_iter(lines.iter().map(Line::to_json));
    std::fs::write(file, format!("{json}\n")).map_err(|e| format!("{}: {e}", file.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(aim: Aim, baseline: f64, ours: f64) -> Line {
        Line {
            scenario: "a".into(),
            unit: "events/s",
            baseline_is: String::new(),
            ours_is: String::new(),
            baseline,
            ours,
            ratio: ours / baseline,
            aim,
            cpu_aim: None,
            costs: None,
            runs: 1,
            samples: Value::Null,
            note: None,
        }
    }

    #[test]
    fn a_value_twice_as_bad_misses_every_kind_of_aim() {
        for (aim, baseline, good, bad) in [
            (Aim::RatioAtLeast(0.8), 100.0, 90.0, 45.0),
            (Aim::RatioAtMost(1.15), 100.0, 110.0, 220.0),
            (Aim::Within(0.1), 100.0, 95.0, 47.5),
            (Aim::AtMost(150.0), f64::NAN, 100.0, 200.0),
            (Aim::AboveBaselineAtMost(2.0), 1.0, 2.5, 5.0),
        ] {
            assert_eq!(line(aim, baseline, good).is_met(), Some(true), "{aim}");
            assert_eq!(line(aim, baseline, bad).is_met(), Some(false), "{aim}");
        }
        assert_eq!(line(Aim::None, 100.0, 1.0).is_met(), None);
    }

    #[test]
    fn an_aim_for_cpu_counts_as_well() {
        let costs = |ours_us| Costs {
            baseline_us: 10.0,
            ours_us,
            baseline_walsender_us: 0.0,
            walsender_us: 0.0,
            dispatch_us: 0.0,
            emulator_us: 0.0,
            peak_mib: 0.0,
        };
        let mut line = line(Aim::RatioAtLeast(1.3), 100.0, 150.0);
        line.cpu_aim = Some(0.5);
        line.costs = Some(costs(4.0));
        assert_eq!(line.is_met(), Some(true));
        line.costs = Some(costs(6.0));
        assert_eq!(line.is_met(), Some(false));
    }
}
