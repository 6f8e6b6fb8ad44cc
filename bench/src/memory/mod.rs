//! `cargo xtask memory`: measures the relay's peak memory under loads that would make the memory of
//! a careless relay grow without limit.
//!
//! There are three loads, each with its own server: rows that arrive while Pub/Sub is down, one
//! huge transaction, and a separate ordering key for every row. The measured value is the peak of
//! the relay's resident memory, which the kernel reports as `VmHWM`, over the whole run until every
//! event is published, recorded and confirmed. The command fails if the peak is above the limit.
//!
//! `cargo xtask bench --full` runs the same measurements several times, along with all other
//! measurements.

pub(crate) mod load;

use std::path::PathBuf;
use std::time::Instant;

use clap::Args;
use serde_json::json;

use load::Load;

use crate::report::{Aim, Line};
use crate::sample::median;
use crate::{peers, process};

/// The default limit for the relay's peak memory, in units of 10^6 bytes.
const AIM_MB: f64 = 64.0;

#[derive(Debug, Args)]
pub(crate) struct MemoryArgs {
    /// Rows of each load
    #[arg(long, default_value_t = 5_000_000)]
    rows: u64,
    /// Only the loads whose names contain this text
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// The most memory that the relay may use, MB
    #[arg(long, default_value_t = AIM_MB)]
    limit_mb: f64,
    /// Measure this program instead of a release build of the sources
    #[arg(long, value_name = "FILE")]
    binary: Option<PathBuf>,
}

pub(crate) fn run(args: &MemoryArgs) -> Result<(), String> {
    let binary = match &args.binary {
        Some(binary) => binary.clone(),
        None => {
            process::build_relay()?;
            process::binary()
        }
    };
    peers::build()?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| e.to_string())?;
    let wanted = args.only.as_deref().unwrap_or_default();
    let mut peaks = Vec::new();
    for load in Load::ALL.into_iter().filter(|l| l.name().contains(wanted)) {
        eprintln!("{}: {} rows", load.name(), args.rows);
        let began = Instant::now();
        let peak_mb = runtime.block_on(load.peak_mb(&binary, args.rows))?;
        peaks.push((load, peak_mb, began.elapsed().as_secs()));
    }
    if peaks.is_empty() {
        let names: Vec<&str> = Load::ALL.into_iter().map(Load::name).collect();
        return Err(format!(
            "no load has this name; the names are {}",
            names.join(", ")
        ));
    }
    println!("| load | rows | peak memory of the relay | limit | seconds |");
    println!("|---|---|---|---|---|");
    for (load, peak_mb, seconds) in &peaks {
        println!(
            "| {} | {} | {peak_mb:.1} MB | {} MB | {seconds} |",
            load.describe(),
            args.rows,
            args.limit_mb
        );
    }
    if peaks.iter().any(|(_, mb, _)| *mb > args.limit_mb) {
        Err(format!("the relay used more than {} MB", args.limit_mb))
    } else {
        Ok(())
    }
}

/// Measures one load for the report of `cargo xtask bench`. The value is the median peak of several
/// runs.
pub(crate) async fn measure(load: Load, rows: u64, runs: u32) -> Result<Vec<Line>, String> {
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
