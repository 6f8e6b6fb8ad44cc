//! The relay as a process of its own, so that it can be killed without a warning.
//!
//! However the demonstration ends, the relay ends with it: by `Drop` when we still run code, and
//! by a shell that waits on a pipe when we were killed ourselves. The kernel closes that pipe.

use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{self, Stdio};

use tokio::process::{Child, Command};

use super::failed;
use crate::error::{Error, Result};

/// Each line is the pid to kill at the end of the input; an empty one means none.
const WATCHDOG: &str = r#"
relay=
while read -r line; do relay=$line; done
[ -z "$relay" ] || kill -s KILL "$relay"
"#;

/// A running `postrider run`.
#[derive(Debug)]
pub(super) struct RelayProcess {
    child: Child,
    watchdog: Watchdog,
}

impl RelayProcess {
    /// Starts it with these variables alone; its log is appended to a file.
    pub(super) fn start(environment: &[(&str, String)], log: &Path) -> Result<Self> {
        let file = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(log);
        let file = file.map_err(|e| failed("cannot write the relay's log").caused_by(e))?;
        let mut watchdog = Watchdog::start()?;
        let child = Command::new(own_program()?)
            .arg("run")
            .env_clear()
            .envs(environment.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(file)
            .process_group(0) // a Ctrl-C on the terminal is for us
            .kill_on_drop(true)
            .spawn()
            .map_err(|e| failed("cannot start the relay").caused_by(e))?;
        watchdog.tell(child.id())?;
        Ok(Self { child, watchdog })
    }

    /// Its process id.
    pub(super) fn pid(&self) -> Option<u32> {
        self.child.id()
    }

    /// SIGKILL, and waits until it is gone.
    pub(super) async fn kill_9(mut self) -> Result<()> {
        self.child
            .kill()
            .await
            .map_err(|e| failed("cannot kill the relay").caused_by(e))?;
        self.watchdog.tell(None)
    }

    /// An error when it has ended by itself.
    pub(super) fn must_run(&mut self) -> Result<()> {
        match self.child.try_wait() {
            Ok(None) => Ok(()),
            Ok(Some(status)) => Err(failed(format!("the relay has ended ({status})"))),
            Err(error) => Err(failed("the relay is out of reach").caused_by(error)),
        }
    }
}

/// The program that runs now: its other commands are the actors of the demonstration.
pub(super) fn own_program() -> Result<PathBuf> {
    std::env::current_exe().map_err(|e| failed("cannot find this very program").caused_by(e))
}

/// The shell that kills the relay when we cannot any more.
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
        // Closes the pipe first. A failure means that the shell is gone: nothing to do.
        let _ = self.shell.wait();
    }
}
