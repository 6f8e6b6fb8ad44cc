//! Builds and starts the measured programs, samples them while they run, and kills them when the
//! measurement ends.

use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use xtask::step;

/// Number of clock ticks per second. Linux reports times in /proc in these ticks.
const TICKS_PER_SECOND: f64 = 100.0;

/// The topic to which the events are published.
pub(crate) const TOPIC: &str = "projects/bench/topics/order.events";

#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Usage {
    pub(crate) peak_rss_kib: u64,
    pub(crate) cpu_seconds: f64,
}

/// The release binary under test.
pub(crate) fn binary() -> PathBuf {
    step::target_folder().join("release/postrider")
}

/// Builds only the relay. If the other programs were built together with the relay, Cargo would
/// also enable their features in the relay.
pub(crate) fn build_relay() -> Result<(), String> {
    build_release(&["--bins"])
}

/// Builds these targets of the root package.
pub(crate) fn build_release(targets: &[&str]) -> Result<(), String> {
    let mut build = step::cargo(&["build", "--release", "--locked", "--package", "postrider"]);
    build.args(targets);
    step::run(build)
}

/// A process that is killed when this value is dropped.
#[derive(Debug)]
pub(crate) struct Running(pub(crate) Child);

impl Running {
    /// The resources used so far.
    ///
    /// Returns an error if the process has exited.
    pub(crate) fn usage(&mut self) -> Result<Usage, String> {
        if let Some(status) = self.0.try_wait().map_err(|e| e.to_string())? {
            return Err(format!("the process ended with {status}"));
        }
        usage(self.0.id()).ok_or_else(|| "the process cannot be read from /proc".into())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // An error of `kill` only means that the process has exited on its own.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The resources that the process has used so far, or `None` if it has exited.
pub(crate) fn usage(pid: u32) -> Option<Usage> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let peak = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))?;
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // After the name in parentheses, the first field is the state. Fields 12 and 13, counted from
    // the state as the first, are the user time and the system time.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks = |n: usize| fields.get(n)?.parse::<f64>().ok();
    Some(Usage {
        peak_rss_kib: peak.trim().strip_suffix(" kB")?.trim().parse().ok()?,
        cpu_seconds: (ticks(11)? + ticks(12)?) / TICKS_PER_SECOND,
    })
}

/// The CPU time, in seconds, that a process with one thread has used so far. More exact than [`usage`].
/// `None` if the process has exited.
pub(crate) fn cpu_of_single_thread(pid: u32) -> Option<f64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/schedstat")).ok()?;
    let nanoseconds: f64 = stat.split_whitespace().next()?.parse().ok()?;
    Some(nanoseconds / 1e9)
}

/// Starts the relay on the slot `postrider` of the database at `url`. The relay publishes to the emulator
/// at `host`.
pub(crate) fn relay(binary: &Path, url: &str, host: &str) -> Result<Running, String> {
    start(Command::new(binary).arg("run").envs(environment(url, host)))
}

/// The environment of a program that reads the slot `postrider` of the database at `url`.
pub(crate) fn environment<'a>(url: &'a str, host: &'a str) -> [(&'static str, &'a str); 5] {
    [
        ("DATABASE_URL", url),
        ("PUBSUB_EMULATOR_HOST", host),
        ("PUBSUB_PROJECT_ID", "bench"),
        ("POSTRIDER_HTTP_ADDR", "off"),
        ("RUST_LOG", "error"),
    ]
}

/// Starts a program that is killed when the returned value is dropped.
pub(crate) fn start(command: &mut Command) -> Result<Running, String> {
    let name = command.get_program().to_string_lossy().into_owned();
    command
        .spawn()
        .map(Running)
        .map_err(|e| format!("{name}: {e}"))
}
