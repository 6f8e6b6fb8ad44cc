//! `cargo xtask instructions`: counts the instructions that the hot path takes per event.
//!
//! A busy machine and an idle machine count the same number of instructions, so CI can refuse a change that
//! costs more. A measured time would not be reliable enough for that.
//!
//! Cachegrind counts the instructions. Each part runs with two numbers of rounds, and the difference of the
//! counts excludes the start and the end of the process. glibc must not choose its copy functions by the type
//! of processor, because otherwise the counts of two machines would differ by several percent. The reference
//! counts are in `benches/instructions.json`.
//!
//! Not here: the measured code, which is in `benches/hot_path.rs`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use clap::Args;
use serde::Deserialize;

use xtask::step;

/// Maximum cost of a part, as a multiple of its reference count.
const ALLOWED_GROWTH: f64 = 1.05;

/// Number of instructions by which every part may grow, even if this is more than
/// [`ALLOWED_GROWTH`]. A change elsewhere in the crate can make the compiler inline one call less.
/// The cost of a small part then grows by more than 5 %.
const ALLOWED_CALL: f64 = 20.0;

/// Makes glibc use the copy functions that every x86-64 processor has.
const PLAIN_COPIES: (&str, &str) = (
    "GLIBC_TUNABLES",
    "glibc.cpu.hwcaps=-AVX2,-AVX2_Usable,-AVX_Fast_Unaligned_Load,-ERMS,-FSRM,-SSSE3,-SSE4_2,-BMI2",
);

const HELD: &str = "benches/instructions.json";
const BENCHMARK: &str = "hot_path";
const PARTS: [&str; 4] = ["decoder", "mapping", "lanes", "watermark"];

/// The number of rounds in the two runs. A round processes [`EVENTS`] events.
const ROUNDS: (u32, u32) = (10, 30);
const EVENTS: f64 = 1_000.0;

/// How often each part runs with each of the two numbers of [`ROUNDS`].
const RUNS: u32 = 5;

#[derive(Debug, Args)]
pub(crate) struct InstructionsArgs {
    /// Make the counts of this run the new reference
    #[arg(long)]
    update: bool,
}

/// Whether this machine can count instructions.
pub(crate) fn can_count() -> bool {
    let mut asked = Command::new("valgrind");
    asked
        .arg("--version")
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    asked.status().is_ok_and(|status| status.success())
}

pub(crate) fn run(args: &InstructionsArgs) -> Result<(), String> {
    if !can_count() {
        return Err("valgrind is missing: apt-get install valgrind".into());
    }
    let program = build()?;
    let mut counts = BTreeMap::new();
    for part in PARTS {
        let (few, many) = (
            count(&program, part, ROUNDS.0)?,
            count(&program, part, ROUNDS.1)?,
        );
        let events = f64::from(ROUNDS.1 - ROUNDS.0) * EVENTS;
        counts.insert(part.to_owned(), (many - few) as f64 / events);
    }
    if args.update {
        let text = serde_json::to_string_pretty(&rounded(&counts)).map_err(|e| e.to_string())?;
        std::fs::write(HELD, text + "\n").map_err(|e| format!("{HELD}: {e}"))?;
    }
    compare(&counts, &held()?)
}

fn rounded(counts: &BTreeMap<String, f64>) -> BTreeMap<&str, u64> {
    counts
        .iter()
        .map(|(part, count)| (part.as_str(), count.round() as u64))
        .collect()
}

fn held() -> Result<BTreeMap<String, f64>, String> {
    let text = std::fs::read_to_string(HELD).map_err(|e| format!("{HELD}: {e}"))?;
    serde_json::from_str(&text).map_err(|e| format!("{HELD}: {e}"))
}

fn compare(counts: &BTreeMap<String, f64>, held: &BTreeMap<String, f64>) -> Result<(), String> {
    println!("instructions per event     now    held");
    let mut dearer = Vec::new();
    for (part, count) in counts {
        let before = held
            .get(part)
            .ok_or_else(|| format!("{HELD} has no {part}"))?;
        println!("{part:<22} {count:>7.0} {before:>7.0}");
        if *count > (before * ALLOWED_GROWTH).max(before + ALLOWED_CALL) {
            dearer.push(part.as_str());
        }
    }
    if dearer.is_empty() {
        Ok(())
    } else {
        Err(format!(
            "well over the reference: {}. Make it cheaper, or say in the commit why it is \
             worth its price and run: cargo xtask instructions --update",
            dearer.join(", ")
        ))
    }
}

/// Cargo's JSON message about one built artifact.
#[derive(Deserialize)]
struct Built {
    target: Target,
    executable: Option<PathBuf>,
}

#[derive(Deserialize)]
struct Target {
    name: String,
}

/// Builds the benchmark. Returns the path of its binary.
fn build() -> Result<PathBuf, String> {
    let mut cargo = step::cargo(&[
        "bench",
        "--locked",
        "--package",
        "postrider",
        "--bench",
        BENCHMARK,
        "--no-run",
        "--message-format",
        "json",
    ]);
    let output = cargo
        .stderr(Stdio::inherit())
        .output()
        .map_err(|e| e.to_string())?;
    if !output.status.success() {
        return Err("the benchmark does not build".into());
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let messages = text
        .lines()
        .filter_map(|line| serde_json::from_str::<Built>(line).ok());
    messages
        .filter(|message| message.target.name == BENCHMARK)
        .find_map(|message| message.executable)
        .ok_or_else(|| "cargo names no program of the benchmark".into())
}

/// Runs `part` [`RUNS`] times and returns the lowest number of instructions. Hash tables have random seeds, and
/// collisions only add instructions, so the lowest number varies least.
fn count(program: &Path, part: &str, rounds: u32) -> Result<u64, String> {
    let counts: Result<Vec<u64>, String> = (0..RUNS)
        .map(|_| count_once(program, part, rounds))
        .collect();
    counts?.into_iter().min().ok_or_else(|| "no run".to_owned())
}

fn count_once(program: &Path, part: &str, rounds: u32) -> Result<u64, String> {
    let output = Command::new("valgrind")
        .args([
            "--tool=cachegrind",
            "--cache-sim=no",
            "--cachegrind-out-file=/dev/null",
        ])
        .arg(program)
        .args([part, &rounds.to_string()])
        // Clear the environment, except for `PATH`.
        .env_clear()
        .env(PLAIN_COPIES.0, PLAIN_COPIES.1)
        .env("PATH", std::env::var_os("PATH").unwrap_or_default())
        .output()
        .map_err(|e| format!("valgrind: {e}"))?;
    let text = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        return Err(format!("valgrind failed:\n{text}"));
    }
    let line = text.lines().find_map(|line| line.split_once(" refs:"));
    line.and_then(|(_, count)| count.trim().replace(',', "").parse().ok())
        .ok_or_else(|| format!("valgrind prints no count:\n{text}"))
}
