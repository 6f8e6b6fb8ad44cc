//! The relay's peak memory under loads that would make a careless relay grow without limit: the
//! loads of `cargo xtask memory`, several times each.

use serde_json::json;

use super::report::{Aim, Line};
use super::sample::median;
use crate::memory::{AIM_MB, load::Load};
use crate::process;

pub(super) async fn measure(load: Load, rows: u64, runs: u32) -> Result<Vec<Line>, String> {
    let mut peaks = Vec::new();
    for run in 1..=runs {
        let peak = load.peak_mb(&process::binary(), rows).await?;
        eprintln!("  run {run}: {peak:.1} MB");
        peaks.push(peak);
    }
    Ok(vec![Line {
        scenario: format!("memory-{}", load.name()),
        unit: "MB at most",
        baseline_is: "-".into(),
        ours_is: format!("relay, {rows} rows: {}", load.describe()),
        baseline: f64::NAN,
        ours: median(peaks.iter().copied()),
        ratio: f64::NAN,
        aim: Aim::AtMost(AIM_MB),
        cpu_aim: None,
        costs: None,
        runs: peaks.len(),
        samples: json!({ "ours": peaks }),
        note: None,
    }])
}
