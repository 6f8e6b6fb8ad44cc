//! `cargo xtask ci`: runs all checks that must pass, and stops at the first step that fails. Fast steps
//! come first, unless they need the binary that the tests build.
//!
//! All steps except the instruction counts use the same cargo profile, so a later step reuses the artifacts
//! that an earlier step has built. The tests start PostgreSQL themselves.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use xtask::step;

use crate::instructions;

/// Flags that turn warnings into errors. Only `cargo xtask ci` uses them, so that a developer can
/// try a change before tidying it.
const DENY_WARNINGS: [&str; 2] = ["-D", "warnings"];

/// The command that checks the dependencies. It leaves out advisories. They come from the network, and a new
/// advisory would make the check fail although the code is the same.
const DEPENDENCIES: [&str; 6] = [
    "deny",
    "check",
    "--hide-inclusion-graph",
    "bans",
    "licenses",
    "sources",
];

/// The command that plays seeded schedules of faults. The seed is fixed, so every run plays the same
/// schedules.
const TORTURE: [&str; 8] = [
    "xtask",
    "torture",
    "--seed",
    "1",
    "--schedules",
    "240",
    "--jobs",
    "4",
];

pub(crate) fn run() -> Result<(), String> {
    let mut times = Vec::new();
    for (name, command) in steps() {
        println!("\n== {name}");
        let began = Instant::now();
        step::run(command)?;
        times.push((name, began.elapsed()));
    }
    print_times(&times);
    Ok(())
}

fn steps() -> Vec<(&'static str, Command)> {
    let mut clippy = step::cargo(&["clippy", "--locked", "--workspace", "--all-targets", "--"]);
    clippy.args(DENY_WARNINGS);
    let mut documentation = step::cargo(&["doc", "--locked", "--workspace", "--no-deps"]);
    documentation.env("RUSTDOCFLAGS", DENY_WARNINGS.join(" "));
    let mut steps = vec![
        ("formatting", step::cargo(&["fmt", "--all", "--check"])),
        ("lints", clippy),
        ("documentation", documentation),
    ];
    if has_cargo_deny() {
        steps.push(("licences, bans, sources", step::cargo(&DEPENDENCIES)));
    } else {
        println!("SKIPPED: licences, bans, sources (cargo install --locked cargo-deny)");
    }
    if instructions::can_count() {
        steps.push(("instructions", step::cargo(&["xtask", "instructions"])));
    } else {
        println!("SKIPPED: instructions of the hot path (apt-get install valgrind)");
    }
    // Run all tests even after a failure, so that one run shows all failures.
    let mut tests = step::cargo(&["test", "--locked", "--workspace", "--no-fail-fast"]);
    // Run more tests at once than there are cores, because the longest tests mostly wait for a
    // server or a timeout.
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    tests.env("RUST_TEST_THREADS", (2 * cores).to_string());
    tests.envs(server_folder());
    steps.push(("tests", tests));
    // The deploy step uses the binary that the tests have built. Only CI downloads missing tools.
    let mut deploy = step::cargo(&["xtask", "deploy"]);
    let mut book = step::cargo(&["xtask", "book"]);
    if std::env::var_os("CI").is_some() {
        deploy.arg("--fetch");
        book.arg("--fetch");
    }
    steps.push(("files of deploy/", deploy));
    steps.push(("documents as a website", book));
    let mut torture = step::cargo(&TORTURE);
    // Use the binary that the tests have already built.
    torture
        .arg("--binary")
        .arg(step::target_folder().join(Path::new("debug/postrider")))
        .envs(server_folder());
    steps.push(("schedules of faults", torture));
    steps
}

/// Returns the variable that puts the folders of the test servers into memory, if there is enough room. On a disk, about
/// a third of the tests' CPU time is spent on creating and removing the files of databases.
fn server_folder() -> Option<(&'static str, &'static str)> {
    const FOLDER: &str = "/dev/shm";
    const ROOM_MIB: u64 = 8 << 10;
    let mut free = Command::new("df");
    free.args(["--output=avail", "--block-size=1M", FOLDER]);
    let answer = free.stderr(Stdio::null()).output().ok()?;
    let answer = String::from_utf8_lossy(&answer.stdout);
    let free: u64 = answer.lines().nth(1)?.trim().parse().ok()?;
    (free >= ROOM_MIB).then_some(("SCRATCH_POSTGRES_FOLDER", FOLDER))
}

fn has_cargo_deny() -> bool {
    let mut asked = step::cargo(&["deny", "--version"]);
    asked.stdout(Stdio::null()).stderr(Stdio::null());
    asked.status().is_ok_and(|status| status.success())
}

fn print_times(times: &[(&str, Duration)]) {
    println!("\n== everything passed");
    for (name, took) in times {
        println!("{:>6.1} s  {name}", took.as_secs_f64());
    }
}
