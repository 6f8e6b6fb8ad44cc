//! The relay as a separate process, so that it can be killed without warning.
//!
//! The relay never outlives the demonstration. When the demonstration ends by itself, `Drop` kills
//! the relay. When the demonstration is killed, the kernel closes a pipe, and a shell that reads
//! from this pipe kills the relay.

use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{self, Stdio};

use tokio::process::{Child, Command};

use crate::error::{Error, Result, failed};

/// Shell script that kills the relay when its input ends. Each input line contains the process id
/// of the current relay. An empty line means that no relay runs.
const WATCHDOG: &str = r#"
relay=
while read -r line; do relay=$line; done
[ -z "$relay" ] || kill -s KILL "$relay"
"#;

/// A running `postrider run`.
#[derive(Debug)]
pub(crate) struct RelayProcess {
    child: Child,
    watchdog: Watchdog,
}

impl RelayProcess {
    /// Starts the relay with only these environment variables. The relay appends its log to the
    /// file `log`.
    pub(crate) fn start(
        program: &Path,
        environment: &[(&str, String)],
        log: &Path,
    ) -> Result<Self> {
        let file = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(log);
        let file = file.map_err(|e| failed("cannot write the relay's log").caused_by(e))?;
        let mut watchdog = Watchdog::start()?;
        let child = Command::new(program)
            .arg("run")
            .env_clear()
            .envs(environment.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(file)
            .process_group(0) // a Ctrl-C on the terminal must not reach the relay
            .kill_on_drop(true)
            .spawn()
            .map_err(|e| failed("cannot start the relay").caused_by(e))?;
        watchdog.tell(child.id())?;
        Ok(Self { child, watchdog })
    }

    /// The relay's process id, or `None` if the relay has ended.
    pub(crate) fn pid(&self) -> Option<u32> {
        self.child.id()
    }

    /// Sends SIGKILL and waits until the process is gone.
    pub(crate) async fn kill_9(mut self) -> Result<()> {
        self.child
            .kill()
            .await
            .map_err(|e| failed("cannot kill the relay").caused_by(e))?;
        self.watchdog.tell(None)
    }

    /// Returns an error if the relay has ended on its own.
    pub(crate) fn must_run(&mut self) -> Result<()> {
        match self.child.try_wait() {
            Ok(None) => Ok(()),
            Ok(Some(status)) => Err(failed(format!("the relay has ended ({status})"))),
            Err(error) => Err(failed("cannot get the relay's status").caused_by(error)),
        }
    }
}

/// The shell that kills the relay if the demonstration itself was killed.
#[derive(Debug)]
struct Watchdog {
    shell: process::Child,
}

impl Watchdog {
    fn start() -> Result<Self> {
        let shell = process::Command::new("sh")
            .args(["-c", WATCHDOG])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .map_err(cannot_guard)?;
        Ok(Self { shell })
    }

    fn tell(&mut self, pid: Option<u32>) -> Result<()> {
        let pipe = self
            .shell
            .stdin
            .as_mut()
            .expect("invariant: stdin is piped and never taken");
        let line = pid.map(|pid| pid.to_string()).unwrap_or_default();
        writeln!(pipe, "{line}").map_err(cannot_guard)
    }
}

fn cannot_guard(error: std::io::Error) -> Error {
    failed("cannot guard the relay's process with a shell").caused_by(error)
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        // `wait` first closes the pipe, and the shell then ends. `wait` fails only if the shell has
        // already ended.
        let _ = self.shell.wait();
    }
}
