//! `cargo xtask bench`: the relay against `pg_recvlogical` draining the same backlog.
//!
//! Every figure is a ratio to a baseline of the same run, since machines differ and are shared.
//! The server keeps its durable settings (fsync on), the emulator is a process of its own, and the
//! relay writes full dispatch rows. Each run drains its own copy of one slot, so that relay and
//! baseline read the same WAL; they take turns.

pub(crate) mod database;
mod drain;
mod report;
pub(crate) mod scenario;

use clap::Args;

use database::Database;
use report::{Outcome, Run};
use scenario::Scenario;

use crate::{process, step};

/// What to measure.
#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    /// Only scenarios whose name contains this
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// Events in each backlog
    #[arg(long, default_value_t = 1_000_000)]
    events: u64,
    /// Runs of relay and baseline, by turns; the medians are reported
    #[arg(long, default_value_t = 3)]
    runs: u32,
    /// Measure target/release/postrider as it is
    #[arg(long)]
    no_build: bool,
    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &BenchArgs) -> Result<(), String> {
    if !args.no_build {
        step::run(step::cargo(&[
            "build",
            "--release",
            "--locked",
            "--package",
            "postrider",
        ]))?;
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| e.to_string())?;
    let wanted = args.only.as_deref().unwrap_or_default();
    let scenarios = scenario::all()
        .into_iter()
        .filter(|s| s.name.contains(wanted));
    let mut outcomes = Vec::new();
    for scenario in scenarios {
        eprintln!("{}: {} events", scenario.name, args.events);
        outcomes.push(runtime.block_on(measure(&scenario, args))?);
    }
    match args.json {
        true => report::print_json(&outcomes),
        false => report::print_table(&outcomes),
    }
    Ok(())
}

async fn measure(scenario: &Scenario, args: &BenchArgs) -> Result<Outcome, String> {
    let database = Database::start(&process::binary()).await?;
    database.load(scenario, args.events).await?;
    let end = database.wal_position().await?;
    let mut runs = Vec::new();
    for n in 0..args.runs {
        let baseline = drain::baseline(&database, &end).await?;
        let relay = drain::relay(&database, &end, args.events).await?;
        eprintln!(
            "  run {}: pg_recvlogical {:.0}/s, postrider {:.0}/s, {:.1} us CPU, peak {} MiB",
            n + 1,
            args.events as f64 / baseline.seconds,
            args.events as f64 / relay.seconds,
            relay.usage.cpu_seconds * 1e6 / args.events as f64,
            relay.usage.peak_rss_kib / 1024,
        );
        runs.push(Run { baseline, relay });
    }
    Ok(Outcome {
        scenario: scenario.name,
        events: args.events,
        runs,
    })
}
