//! `cargo xtask bench`: compares the relay with `pg_recvlogical` and other programs, in the same
//! run.
//!
//! Machines differ, and other processes share them, so a figure can be compared only with a baseline
//! from the same run. Both sides take turns, and the report compares their medians. The server is durable
//! (fsync on), and each program is a separate process. Each drain that reads the WAL starts from a copy of
//! one slot, so all programs read the same WAL. Only in `server_cost`, each drain has its own slot and backlog.
//! bench/README.md describes the method.
//!
//! Not here: measurements of single functions.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use clap::Args;

use crate::compare::{self, Stock};
use crate::insert::{self, Writer};
use crate::latency::{self, Pace};
use crate::memory::{self, load::Load};
use crate::report::{self, Line};
use crate::scenario::{self, Scenario};
use crate::server_cost::{self, Shape};
use crate::{idle, peers, process, start};

#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    /// Run only the scenarios with these names; a text that is not the name of a scenario selects all
    /// scenarios whose names contain the text
    #[arg(long, value_name = "TEXT", value_delimiter = ',')]
    only: Vec<String>,
    /// Events in the normal backlog; scenarios with another number of events scale with this number
    #[arg(long, default_value_t = 1_000_000)]
    events: u64,
    /// Runs of each side, in turn; the medians are reported
    #[arg(long, default_value_t = 5)]
    runs: u32,
    /// Also run the scenarios that take very long: a backlog of ten times as many events, and
    /// memory with five times as many rows
    #[arg(long)]
    full: bool,
    /// Run everything once with little data, to see that it works; the figures mean nothing
    #[arg(long, conflicts_with_all = ["events", "runs", "full"])]
    quick: bool,
    /// Run only the scenarios in which the relay drains a backlog; the baseline is BINARY, another build of the relay
    #[arg(long, value_name = "BINARY")]
    against: Option<PathBuf>,
    /// Measure the release builds that are already in the target folder
    #[arg(long)]
    no_build: bool,
    /// Also write JSON with every single run to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Only list the names of the scenarios
    #[arg(long)]
    list: bool,
}

/// How much to measure.
#[derive(Debug, Clone, Copy)]
struct Extent {
    events: u64,
    runs: u32,
    /// The length of each run at a steady rate. `idle` is the length of each idle window.
    steady: Duration,
    idle: Duration,
}

const QUICK: Extent = Extent {
    events: 20_000,
    runs: 1,
    steady: Duration::from_secs(3),
    idle: Duration::from_secs(3),
};

#[derive(Debug)]
enum Measurement {
    Drain(Box<Scenario>),
    Latency(Pace),
    Memory(Load),
    Insert(Writer),
    ServerCost(Shape),
    Idle,
    Start,
}

impl Measurement {
    fn all(events: u64) -> Vec<Self> {
        let drains = scenario::all(events).into_iter();
        let drains = drains.map(|scenario| Self::Drain(Box::new(scenario)));
        drains
            .chain(Pace::ALL.map(Self::Latency))
            .chain(Load::ALL.map(Self::Memory))
            .chain(Writer::ALL.map(Self::Insert))
            .chain(Shape::ALL.map(Self::ServerCost))
            .chain([Self::Idle, Self::Start])
            .collect()
    }

    fn name(&self) -> String {
        match self {
            Self::Drain(scenario) => scenario.name.clone(),
            Self::Latency(pace) => pace.name(),
            Self::Memory(load) => format!("memory-{}", load.name()),
            Self::Insert(writer) => writer.name().into(),
            Self::ServerCost(shape) => shape.name().into(),
            Self::Idle => "idle".into(),
            Self::Start => "start".into(),
        }
    }

    /// The reason to skip this measurement, or `None` to run it.
    fn left_out(&self, full: bool) -> Result<Option<&'static str>, String> {
        let (full_only, needs) = match self {
            Self::Drain(scenario) => (scenario.full_only, scenario.needs),
            Self::Memory(_) => (true, None),
            Self::ServerCost(_) => return Ok(server_cost::left_out()),
            Self::Latency(_) | Self::Insert(_) | Self::Idle | Self::Start => (false, None),
        };
        if full_only && !full {
            return Ok(Some("only with --full"));
        }
        match needs {
            Some(setting) if !has_setting(setting)? => Ok(Some(
                "this build of the relay does not have the \
                                                                setting that this measurement needs",
            )),
            _ => Ok(None),
        }
    }
}

pub(crate) fn run(args: &BenchArgs) -> Result<(), String> {
    let extent = if args.quick {
        QUICK
    } else {
        Extent {
            events: args.events,
            runs: args.runs.max(1),
            steady: Duration::from_secs(11),
            idle: Duration::from_secs(60),
        }
    };
    let measurements = chosen(args, extent.events)?;
    if args.list {
        for measurement in &measurements {
            println!("{}", measurement.name());
        }
        return Ok(());
    }
    // Write the file once before measuring. If the file cannot be written, the command fails now
    // and not hours later.
    write_json(args, &[])?;
    if !args.no_build {
        process::build_relay()?;
        peers::build()?;
    }
    is_built()?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| e.to_string())?;
    let (lines, failed) = runtime.block_on(measure_all(&measurements, extent, args));
    report::print_table(&lines);
    if failed.is_empty() {
        Ok(())
    } else {
        Err(format!("not measured: {}", failed.join("; ")))
    }
}

/// Chooses the measurements that the arguments ask for.
fn chosen(args: &BenchArgs, events: u64) -> Result<Vec<Measurement>, String> {
    let mut measurements = Measurement::all(events);
    let names: Vec<String> = measurements.iter().map(Measurement::name).collect();
    let is_asked_for = |name: &str, text: &String| {
        if names.contains(text) {
            name == text
        } else {
            name.contains(text)
        }
    };
    measurements.retain(|measurement| {
        let name = measurement.name();
        args.only.is_empty() || args.only.iter().any(|text| is_asked_for(&name, text))
    });
    if let Some(binary) = &args.against {
        let found = binary.canonicalize();
        let found = found.map_err(|e| format!("{}: {e}", binary.display()))?;
        let binary: &'static Path = found.leak();
        let against = |measurement| match measurement {
            Measurement::Drain(scenario) => scenario.against(binary),
            Measurement::Latency(_)
            | Measurement::Memory(_)
            | Measurement::Insert(_)
            | Measurement::ServerCost(_)
            | Measurement::Idle
            | Measurement::Start => None,
        };
        let drains = measurements.into_iter().filter_map(against);
        measurements = drains
            .map(|scenario| Measurement::Drain(Box::new(scenario)))
            .collect();
    }
    if measurements.is_empty() {
        let why = "no scenario has this name, or none with this name can be compared with --against; --list \
                   shows the names";
        return Err(why.into());
    }
    Ok(measurements)
}

/// Checks that the programs are built. Without this check, a measurement would fail only after its
/// backlog was written.
fn is_built() -> Result<(), String> {
    for program in [process::binary(), peers::binary()] {
        if !program.is_file() {
            let program = program.display();
            return Err(format!(
                "{program} does not exist: run without --no-build; to use another target folder, set only \
                 CARGO_TARGET_DIR"
            ));
        }
    }
    Ok(())
}

fn write_json(args: &BenchArgs, lines: &[Line]) -> Result<(), String> {
    match &args.json {
        Some(file) => report::write_json(file, lines),
        None => Ok(()),
    }
}

/// Runs all measurements. Returns the lines of the report, and the measurements that failed. After
/// a failure, the other measurements still run and keep their results, because they may have taken
/// hours.
async fn measure_all(
    measurements: &[Measurement],
    extent: Extent,
    args: &BenchArgs,
) -> (Vec<Line>, Vec<String>) {
    let mut stock = Stock::default();
    let (mut lines, mut failed) = (Vec::new(), Vec::new());
    for (n, measurement) in measurements.iter().enumerate() {
        eprintln!("{}", measurement.name());
        let measured = measure(measurement, &mut stock, extent, args.full).await;
        let written = measured.and_then(|measured| {
            lines.extend(measured);
            write_json(args, &lines)
        });
        if let Err(error) = written {
            eprintln!("  failed: {error}");
            failed.push(format!("{}: {error}", measurement.name()));
        }
        let rest = measurements.iter().skip(n + 1);
        stock.keep_for(rest.filter_map(|measurement| match measurement {
            Measurement::Drain(scenario) => Some(&**scenario),
            _ => None,
        }));
    }
    (lines, failed)
}

async fn measure(
    measurement: &Measurement,
    stock: &mut Stock,
    extent: Extent,
    full: bool,
) -> Result<Vec<Line>, String> {
    if let Some(why) = measurement.left_out(full)? {
        eprintln!("  skipped: {why}");
        return Ok(Vec::new());
    }
    let runs = extent.runs;
    match measurement {
        Measurement::Drain(scenario) => {
            let pairs = runs * scenario.pairs;
            Ok(vec![compare::compare(scenario, stock, pairs).await?])
        }
        Measurement::Latency(pace) => latency::measure(*pace, runs, extent.steady).await,
        Measurement::Memory(load) => memory::measure(*load, extent.events * 5, runs).await,
        Measurement::Insert(writer) => insert::measure(*writer, runs, extent.events / 20).await,
        Measurement::ServerCost(shape) => server_cost::measure(*shape, runs, extent.events).await,
        Measurement::Idle => idle::measure(runs, extent.idle).await,
        Measurement::Start => start::measure(runs).await,
    }
}

/// Whether `postrider run --help` lists a flag of this name.
fn has_setting(name: &str) -> Result<bool, String> {
    let help = Command::new(process::binary())
        .args(["run", "--help"])
        .output()
        .map_err(|e| format!("{}: {e}", process::binary().display()))?;
    let flag = format!("--{name}");
    let words = String::from_utf8_lossy(&help.stdout).into_owned();
    Ok(words.split_whitespace().any(|word| word == flag))
}
