//! Runs the program under test as a process: reads its log, sends signals, and waits for its exit.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use pubsub_emulator::RunningEmulator;

use super::{Database, PATIENCE, eventually};

/// The command that runs the binary under test, with `environment` and no other variables (except that
/// `check` gets `POSTRIDER_HTTP_ADDR`).
pub(crate) fn postrider(arguments: &[&str], environment: &[(&str, &str)]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_postrider"));
    command.args(arguments).env_clear();
    if arguments.first() == Some(&"check") {
        // Another process of this machine may use the default port.
        command.env("POSTRIDER_HTTP_ADDR", "off");
    }
    command.envs(environment.iter().copied());
    command
}

/// Sends the signal `name`, for example `STOP`, to a process.
pub(crate) fn signal(name: &str, pid: impl std::fmt::Display) {
    let (option, pid) = (format!("-{name}"), pid.to_string());
    let sent = Command::new("kill").args([option, pid]).status();
    assert!(sent.unwrap().success());
}

/// A running relay. It is killed when dropped.
pub(crate) struct Relay {
    child: Child,
    log: Arc<Mutex<Vec<String>>>,
}

impl Relay {
    pub(crate) fn start(database: &Database, emulator: &RunningEmulator) -> Self {
        Self::start_with(database, &emulator.addr().to_string(), &[])
    }

    /// The command that [`start_with`](Self::start_with) runs.
    pub(crate) fn command(database: &Database, emulator: &str, more: &[(&str, &str)]) -> Command {
        let mut environment = vec![
            ("DATABASE_URL", database.url.as_str()),
            ("PUBSUB_EMULATOR_HOST", emulator),
            ("PUBSUB_PROJECT_ID", "demo"),
            ("POSTRIDER_HTTP_ADDR", "off"),
            ("POSTRIDER_SLOT", database.slot()),
        ];
        environment.extend(more);
        postrider(&["run"], &environment)
    }

    pub(crate) fn start_with(database: &Database, emulator: &str, more: &[(&str, &str)]) -> Self {
        Self::spawn(Self::command(database, emulator, more))
    }

    /// Starts a relay with this command.
    pub(crate) fn spawn(mut command: Command) -> Self {
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let log = Arc::new(Mutex::new(Vec::new()));
        let lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let sink = log.clone();
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                sink.lock().unwrap().push(line);
            }
        });
        Self { child, log }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn log(&self) -> String {
        self.log.lock().unwrap().join("\n")
    }

    /// Whether a session of this relay lost its lease on the slot. If so, the relay may have repeated
    /// the requests that were in flight.
    pub(crate) fn has_lost_its_slot(&self) -> bool {
        self.log().contains("code=lease-lost")
    }

    pub(crate) async fn wait_for_log(&self, text: &str) {
        eventually(
            &format!("the log contains {text:?}; it is\n{}", self.log()),
            || async { self.log().contains(text).then_some(()) },
        )
        .await;
    }

    /// Waits until the relay has printed the whole error, down to its last line.
    pub(crate) async fn wait_for_error(&self, code: &str) {
        self.wait_for_log(&format!("error[{code}]")).await;
        self.wait_for_log(&format!("postrider explain {code}"))
            .await;
    }

    /// Waits until the relay has installed its handler for SIGTERM. Before that, SIGTERM kills the
    /// process at once. (This does no harm, because the relay has not changed anything by then.)
    pub(crate) async fn wait_until_it_takes_sigterm(&self) {
        const SIGTERM: u32 = 15;
        let path = format!("/proc/{}/status", self.child.id());
        eventually("the relay takes SIGTERM itself", || async {
            let status = std::fs::read_to_string(&path).unwrap();
            let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
            let caught = u64::from_str_radix(caught.unwrap().trim(), 16).unwrap();
            (caught & 1 << (SIGTERM - 1) != 0).then_some(())
        })
        .await;
    }

    /// The peak resident memory of the process, in KiB.
    pub(crate) fn peak_rss_kib(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kib = peak.unwrap().trim().strip_suffix(" kB").unwrap();
        kib.parse().unwrap()
    }

    /// The number of file descriptors that the process has open.
    pub(crate) fn open_files(&self) -> usize {
        let folder = format!("/proc/{}/fd", self.child.id());
        std::fs::read_dir(folder).unwrap().count()
    }

    pub(crate) fn kill_9(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub(crate) fn terminate(&self) {
        self.signal("TERM");
    }

    /// Sends the signal `name`, for example `STOP`.
    pub(crate) fn signal(&self, name: &str) {
        signal(name, self.child.id());
    }

    /// Sends SIGTERM and waits for the process to exit with success.
    pub(crate) async fn stop(self) {
        self.wait_until_it_takes_sigterm().await;
        self.terminate();
        let log = self.log.clone();
        let status = self.wait().await;
        assert!(
            status.success(),
            "{status}:\n{}",
            log.lock().unwrap().join("\n")
        );
    }

    pub(crate) async fn wait(mut self) -> ExitStatus {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(
                Instant::now() < deadline,
                "the relay did not end:\n{}",
                self.log()
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("log of the failed test's relay:\n{}\n", self.log());
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
