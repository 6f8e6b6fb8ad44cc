//! `cargo xtask torture`: seeded schedules of faults against the real relay and a real PostgreSQL.
//!
//! `plan` draws a schedule from its seed. `schedule` plays it, with `stage`, `workload` and
//! `watch`. `verdict` judges the evidence. Each job has its own server (`ground`) and plays one
//! schedule after another. Each schedule has its own database, slot and emulator, and runs the
//! program as a user would.

mod dossier;
mod fault;
mod gather;
mod ground;
mod log;
mod loss;
mod plan;
mod prepare;
mod random;
mod relay;
mod report;
mod schedule;
mod seat;
mod stage;
mod table;
mod verdict;
mod watch;
mod workload;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use clap::Parser;
use tokio::task::JoinSet;
use xtask::step;

use ground::Ground;
use plan::{FaultFamily, Plan};
use report::Totals;

/// Seeded schedules of crashes, outages and faults against the relay, judged afterwards
#[derive(Debug, Parser)]
#[command(bin_name = "cargo xtask torture")]
struct TortureArgs {
    /// Seed of all schedules; taken from the clock by default
    #[arg(long)]
    seed: Option<u64>,
    /// Stop after this many minutes
    #[arg(long)]
    minutes: Option<f64>,
    /// Stop after this many schedules; 100 when no minutes are given
    #[arg(long)]
    schedules: Option<u64>,
    /// Play only the schedule with this number, once unless --schedules or --minutes is given
    #[arg(long, value_name = "NUMBER")]
    only: Option<u64>,
    /// Play only schedules with this family of faults
    #[arg(long, value_enum)]
    kind: Option<FaultFamily>,
    /// Schedules that run at once, each with a PostgreSQL server of its own; one per core by
    /// default
    #[arg(long)]
    jobs: Option<usize>,
    /// Continue after a failed schedule
    #[arg(long)]
    keep_going: bool,
    /// Test the release build
    #[arg(long)]
    release: bool,
    /// Test this program instead of building one
    #[arg(long, value_name = "FILE")]
    binary: Option<PathBuf>,
    /// Print the totals as JSON
    #[arg(long)]
    json: bool,
}

const DEFAULT_SCHEDULES: u64 = 100;

fn main() -> ExitCode {
    match run(&TortureArgs::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("\ntorture: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &TortureArgs) -> Result<(), String> {
    relay::set_binary(program(args)?)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|e| e.to_string())?;
    let seed = args.seed.unwrap_or_else(seed_of_the_clock);
    eprintln!("seed {seed}");
    let totals = runtime.block_on(play(args, seed))?;
    if args.json {
        totals.print_json(seed)
    } else {
        totals.print_table(seed)
    }
    if totals.failures.is_empty() {
        return Ok(());
    }
    // Print the failures again at the end, because people usually keep only the end of a log.
    for failure in &totals.failures {
        eprintln!("\n{failure}");
    }
    Err(format!(
        "{} of {} schedules failed",
        totals.failures.len(),
        totals.schedules
    ))
}

/// Returns the program under test. Builds it unless `--binary` names one.
fn program(args: &TortureArgs) -> Result<PathBuf, String> {
    if let Some(binary) = &args.binary {
        return Ok(binary.clone());
    }
    let mut build = step::cargo(&["build", "--quiet", "--locked", "--package", "postrider"]);
    let profile = if args.release {
        build.arg("--release");
        "release"
    } else {
        "debug"
    };
    step::run(build)?;
    Ok(step::target_folder().join(profile).join("postrider"))
}

fn seed_of_the_clock() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    // At most six digits, so that the seed is easy to type.
    now.map_or(1, |now| now.as_millis() as u64 % 1_000_000)
}

/// The state that the jobs share.
struct Board {
    seed: u64,
    only: Option<u64>,
    /// How many schedules the jobs have taken so far, of `schedules` in total.
    taken: AtomicU64,
    schedules: u64,
    deadline: Option<Instant>,
    stop: AtomicBool,
    keep_going: bool,
    kind: Option<FaultFamily>,
    totals: Mutex<Totals>,
}

impl Board {
    /// Returns the number of the next schedule to play, or `None` when the run is over.
    fn take(&self) -> Option<u64> {
        let over = self
            .deadline
            .is_some_and(|deadline| Instant::now() > deadline);
        if over || self.stop.load(Ordering::Relaxed) {
            return None;
        }
        let turn = self.taken.fetch_add(1, Ordering::Relaxed);
        (turn < self.schedules).then(|| self.only.unwrap_or(turn))
    }
}

async fn play(args: &TortureArgs, seed: u64) -> Result<Totals, String> {
    let cores = std::thread::available_parallelism().map_or(2, usize::from);
    let jobs = args.jobs.unwrap_or(cores).max(1);
    let deadline = args
        .minutes
        .map(|minutes| Instant::now() + Duration::from_secs_f64(minutes * 60.0));
    let schedules = match (args.schedules, args.minutes) {
        (Some(schedules), _) => schedules,
        (None, Some(_)) => u64::MAX,
        (None, None) => args.only.map_or(DEFAULT_SCHEDULES, |_| 1),
    };
    let board = Arc::new(Board {
        seed,
        only: args.only,
        taken: AtomicU64::new(0),
        schedules,
        deadline,
        stop: AtomicBool::new(false),
        keep_going: args.keep_going,
        kind: args.kind,
        totals: Mutex::new(Totals::default()),
    });
    let began = Instant::now();
    let mut workers = JoinSet::new();
    for _ in 0..jobs.min(schedules.try_into().unwrap_or(usize::MAX)) {
        workers.spawn(job(board.clone()));
    }
    while let Some(ended) = workers.join_next().await {
        ended.map_err(|e| format!("a job: {e}"))??;
    }
    let mut totals = board.totals.lock().unwrap_or_else(PoisonError::into_inner);
    totals.took = began.elapsed();
    Ok(std::mem::take(&mut totals))
}

/// Plays schedules one after another on its own server.
async fn job(board: Arc<Board>) -> Result<(), String> {
    let ground = Ground::start().await?;
    while let Some(index) = board.take() {
        let plan = Plan::draw(board.seed, index);
        if board.kind.is_some_and(|kind| kind != plan.fault_family) {
            continue;
        }
        let outcome = schedule::run(plan, &ground)
            .await
            .map_err(|e| format!("schedule {index}: {e}"))?;
        let failure = (!outcome.verdict.is_clean()).then(|| {
            if !board.keep_going {
                board.stop.store(true, Ordering::Relaxed);
            }
            dossier::show(board.seed, &outcome, &ground.log_tail(200))
        });
        let mut totals = board.totals.lock().unwrap_or_else(PoisonError::into_inner);
        totals.add(&outcome);
        totals.failures.extend(failure);
        eprintln!("{}", report::line(&outcome));
    }
    Ok(())
}
