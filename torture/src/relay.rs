//! The relays of a schedule: `postrider run` processes and their logs.
//!
//! No relay outlives the harness. `Drop` kills the relays. If the harness itself is killed, a shell
//! kills the relays as soon as its pipe from the harness closes.

use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

use pubsub_emulator::Journal;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};

use crate::log::Log;
use crate::plan::RelayPlan;

/// How long a relay may take to exit after SIGTERM. It is longer than the relay's own limit,
/// `SHUTDOWN_TIMEOUT_S`.
const STOP_LIMIT: Duration = Duration::from_secs(30);
const SIGTERM: i32 = 15;
const SHUTDOWN_TIMEOUT_S: &str = "15";

static BINARY: OnceLock<PathBuf> = OnceLock::new();

pub(crate) fn set_binary(path: PathBuf) -> Result<(), String> {
    let path = std::fs::canonicalize(&path).map_err(|e| format!("{}: {e}", path.display()))?;
    BINARY
        .set(path)
        .map_err(|_| "the program under test is set already".to_owned())
}

pub(crate) fn binary() -> Result<&'static Path, String> {
    let path = BINARY.get().ok_or("no program to test was named")?;
    Ok(path)
}

/// How to start a relay: its environment variables, and the emulator's journal. The clock of the journal gives
/// each log line of the relay its time.
#[derive(Debug, Clone)]
pub(crate) struct Launch {
    environment: Vec<(&'static str, String)>,
    journal: Journal,
}

impl Launch {
    pub(crate) fn new(
        plan: &RelayPlan,
        slot: &str,
        postgres: &str,
        pubsub: &str,
        journal: Journal,
    ) -> Self {
        let environment = vec![
            ("DATABASE_URL", postgres.to_owned()),
            ("PUBSUB_EMULATOR_HOST", pubsub.to_owned()),
            ("PUBSUB_PROJECT_ID", crate::schedule::PROJECT.to_owned()),
            ("POSTRIDER_SLOT", slot.to_owned()),
            ("POSTRIDER_HTTP_ADDR", "off".to_owned()),
            ("POSTRIDER_START_TIMEOUT_S", "120".to_owned()),
            (
                "POSTRIDER_SHUTDOWN_TIMEOUT_S",
                SHUTDOWN_TIMEOUT_S.to_owned(),
            ),
            (
                "POSTRIDER_IN_FLIGHT_REQUESTS",
                plan.in_flight_requests.to_string(),
            ),
            ("POSTRIDER_IN_FLIGHT_MIB", plan.in_flight_mib.to_string()),
            ("POSTRIDER_PUBSUB_CHANNELS", plan.channels.to_string()),
            (
                "POSTRIDER_PUBLISH_TIMEOUT_S",
                plan.publish_timeout.as_secs().to_string(),
            ),
            (
                "POSTRIDER_WAL_SENDER_TIMEOUT_S",
                plan.wal_sender_timeout.as_secs().to_string(),
            ),
            (
                "POSTRIDER_ON_BAD_EVENT",
                if plan.quarantines_key {
                    "quarantine_key".to_owned()
                } else {
                    "quarantine_event".to_owned()
                },
            ),
            (
                "POSTRIDER_DISPATCH",
                if plan.exceptions {
                    "exceptions".to_owned()
                } else {
                    "full".to_owned()
                },
            ),
            (
                "POSTRIDER_ORDERING",
                match plan.buckets {
                    Some(buckets) => format!("bucketed({buckets})"),
                    None => "key".to_owned(),
                },
            ),
            ("RUST_BACKTRACE", "1".to_owned()),
        ];
        Self {
            environment,
            journal,
        }
    }

    /// Returns a copy of this launch in which the settings name this outbox table instead of
    /// `outbox.events`.
    pub(crate) fn with_table(&self, table: &str) -> Self {
        let mut other = self.clone();
        (other.environment).push(("POSTRIDER_TABLE", table.to_owned()));
        other
    }
}

/// One running relay. It is killed when dropped.
#[derive(Debug)]
pub(crate) struct Relay {
    child: Child,
    pid: u32,
    /// The index of the seat in which this relay was started (see `seat`).
    seat: usize,
    log: Log,
    journal: Journal,
    reader: tokio::task::JoinHandle<()>,
}

impl Relay {
    pub(crate) fn start(launch: &Launch, seat: usize, log: Log) -> Result<Self, String> {
        let mut child = Command::new(binary()?)
            .arg("run")
            .env_clear()
            .envs(launch.environment.iter().map(|(k, v)| (k, v)))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .process_group(0) // a Ctrl-C on the terminal must reach only the harness
            .kill_on_drop(true)
            .spawn()
            .map_err(|e| format!("cannot start the relay: {e}"))?;
        let pid = child.id().expect("invariant: it has not been waited for");
        watchdog(&format!("{pid}"))?;
        log.born(pid, launch.journal.now());
        let stderr = child
            .stderr
            .take()
            .expect("invariant: a pipe was asked for");
        let (sink, journal) = (log.clone(), launch.journal.clone());
        let reader = tokio::spawn(async move {
            let mut lines = BufReader::new(stderr).lines();
            while let Ok(Some(line)) = lines.next_line().await {
                sink.said(pid, journal.now(), &line);
            }
        });
        Ok(Self {
            child,
            pid,
            seat,
            log,
            journal: launch.journal.clone(),
            reader,
        })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.pid
    }

    pub(crate) fn seat(&self) -> usize {
        self.seat
    }

    /// Sends SIGTERM, SIGSTOP or SIGCONT.
    pub(crate) async fn signal(&self, name: &str) -> Result<(), String> {
        let pid = self.pid.to_string();
        let done = Command::new("kill").args(["-s", name, &pid]).status().await;
        match done {
            Ok(status) if status.success() => Ok(()),
            Ok(status) => Err(format!("kill -s {name} {pid}: {status}")),
            Err(error) => Err(format!("kill: {error}")),
        }
    }

    /// Sends SIGKILL and waits until the process is gone.
    pub(crate) async fn kill_9(mut self) -> Result<(), String> {
        self.child
            .kill()
            .await
            .map_err(|e| format!("cannot kill the relay: {e}"))?;
        self.log.died(self.pid, self.journal.now(), "was killed");
        self.ended().await
    }

    /// Sends SIGTERM and waits until the process has ended. Returns an error if the relay exits with a failure.
    /// It is no error if the signal ends a relay that has not installed its signal handlers yet.
    pub(crate) async fn stop(mut self) -> Result<(), String> {
        self.signal("TERM").await?;
        let waited = tokio::time::timeout(STOP_LIMIT, self.child.wait()).await;
        let status = waited
            .map_err(|_| format!("the relay did not end within {STOP_LIMIT:?} after SIGTERM"))?
            .map_err(|e| e.to_string())?;
        let how = format!("ended with {status}");
        self.log.died(self.pid, self.journal.now(), &how);
        // A relay that has logged nothing may not have installed its signal handlers yet.
        let ended_by_kernel = status.signal() == Some(SIGTERM) && !self.log.has_spoken(self.pid);
        let pid = self.pid;
        self.ended().await?;
        if status.success() || ended_by_kernel {
            Ok(())
        } else {
            Err(format!("relay {pid} ended with {status} after SIGTERM"))
        }
    }

    /// The exit status, if the relay has exited on its own.
    pub(crate) fn has_ended(&mut self) -> Result<Option<ExitStatus>, String> {
        self.child.try_wait().map_err(|e| e.to_string())
    }

    /// Waits until the relay's log has been read to its end.
    async fn ended(mut self) -> Result<(), String> {
        (&mut self.reader).await.map_err(|e| e.to_string())
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        // Remove this relay from the shell's list, because the child is killed right after this call.
        // An error means that the shell has ended.
        let _ = watchdog(&format!("-{}", self.pid));
    }
}

/// Tells a shell about a relay: `PID` adds the relay to the shell's list, and `-PID` removes it. The
/// shell kills all relays on the list when the harness's end of its pipe closes. The first call starts
/// the shell.
fn watchdog(word: &str) -> Result<(), String> {
    const SCRIPT: &str = r#"
        pids=" "
        while read -r word; do
            case $word in
                -*) gone=${word#-}; pids="${pids%%" $gone "*} ${pids#*" $gone "}" ;;
                *) pids="$pids$word " ;;
            esac
        done
        for pid in $pids; do kill -s KILL "$pid"; done
    "#;
    static SHELL: Mutex<Option<std::process::Child>> = Mutex::new(None);
    let mut shell = SHELL.lock().unwrap_or_else(PoisonError::into_inner);
    if shell.is_none() {
        use std::os::unix::process::CommandExt;
        let child = std::process::Command::new("sh")
            .args(["-c", SCRIPT])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .map_err(|e| format!("cannot guard the relays with a shell: {e}"))?;
        *shell = Some(child);
    }
    let pipe = shell.as_mut().and_then(|shell| shell.stdin.as_mut());
    let pipe = pipe.expect("invariant: the shell was started with a pipe");
    writeln!(pipe, "{word}").map_err(|e| format!("the shell that guards the relays: {e}"))
}
