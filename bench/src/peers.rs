//! The programs of `examples/bench_peers`. One of these programs is the emulator, which runs as a
//! process of its own and prints a report when it ends.

use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{ChildStdout, Command, Stdio};

use serde::Deserialize;
use xtask::step;

use crate::cores::Cores;
use crate::process::{self, Running, TOPIC, Usage};

pub(crate) fn binary() -> PathBuf {
    step::target_folder().join("release/examples/bench_peers")
}

pub(crate) fn build() -> Result<(), String> {
    process::build_release(&["--example", "bench_peers"])
}

/// Our emulator in a process of its own.
pub(crate) struct Emulator {
    running: Running,
    said: BufReader<ChildStdout>,
    pub(crate) host: String,
}

/// The emulator's report on the messages that it has received.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct Told {
    pub(crate) requests: u64,
    pub(crate) stored: u64,
    /// When each event first arrived, by event id, in microseconds since 1970. Empty unless the
    /// emulator was started with `--arrivals`.
    pub(crate) arrivals: HashMap<String, i64>,
}

impl Emulator {
    pub(crate) fn start(delay_ms: u64, arrivals: bool, cores: Cores) -> Result<Self, String> {
        let mut command = Self::command();
        command
            .args(["--delay-ms", &delay_ms.to_string()])
            .args(arrivals.then_some("--arrivals"));
        Self::launch(cores.of_program(command)?)
    }

    /// Starts an emulator at the address of an emulator that has ended.
    pub(crate) fn start_at(host: &str) -> Result<Self, String> {
        let mut command = Self::command();
        command.args(["--listen", host]);
        Self::launch(command)
    }

    fn command() -> Command {
        let mut command = Command::new(binary());
        command.args(["emulator", "--topic", TOPIC]);
        command
    }

    fn launch(mut command: Command) -> Result<Self, String> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut running = process::start(&mut command)?;
        let stdout = running.0.stdout.take();
        let mut said = BufReader::new(stdout.expect("invariant: the output is a pipe"));
        let mut host = String::new();
        said.read_line(&mut host).map_err(|e| e.to_string())?;
        let host = host.trim().to_owned();
        if host.is_empty() {
            Err("the emulator did not start".into())
        } else {
            Ok(Self {
                running,
                said,
                host,
            })
        }
    }

    pub(crate) fn usage(&mut self) -> Result<Usage, String> {
        self.running.usage()
    }

    /// Stops the emulator and reads its report.
    pub(crate) fn finish(mut self) -> Result<Told, String> {
        // The emulator prints its report and ends when its input is closed.
        drop(self.running.0.stdin.take());
        let mut words = String::new();
        self.said.read_line(&mut words).map_err(|e| e.to_string())?;
        serde_json::from_str(&words).map_err(|e| format!("the emulator's report: {e}"))
    }
}
