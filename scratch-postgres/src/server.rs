//! A running scratch server: starting, stopping, crashing, its addresses and its log.
//!
//! The postmaster is our direct child, so we know its pid and notice its end at once. We find out
//! whether the server is ready from the last line of `postmaster.pid`, as `pg_ctl` does. This needs
//! no connection, and cannot mistake another server on the same port for ours.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus, Stdio};
use std::time::Duration;

use crate::account::Account;
use crate::binaries::Binaries;
use crate::builder::{Builder, setting_line};
use crate::folder::Folder;
use crate::port::{self, HOST, Port};
use crate::watchdog::Watchdog;
use crate::{Error, process};

/// How long a server may take to start. Crash recovery is slow on a machine under load.
const START_TIMEOUT: Duration = Duration::from_secs(120);

/// How long [`ScratchPostgres::restart`] waits for the server to stop.
const RESTART_STOP_TIMEOUT: Duration = Duration::from_secs(60);

/// How long we wait for the immediate shutdown of a dropped server, and for killed processes to
/// end. The shutdown usually takes milliseconds.
const DROP_STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// Maximum number of ports that we try. Another process can take a free port before our server
/// binds it, and then we try another one.
const PORT_TRIES: u32 = 10;

/// How a server shuts down.
/// See <https://www.postgresql.org/docs/current/server-shutdown.html>.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopMode {
    /// Waits for every client to disconnect.
    Smart,
    /// Ends the client sessions, waits until the walsenders have sent all WAL, then stops.
    Fast,
    /// Stops without a checkpoint. The next start recovers from the WAL.
    Immediate,
}

impl StopMode {
    fn signal(self) -> &'static str {
        match self {
            Self::Smart => "TERM",
            Self::Fast => "INT",
            Self::Immediate => "QUIT",
        }
    }
}

/// A throw-away PostgreSQL server. Dropping it stops the server and removes its folder.
#[derive(Debug)]
pub struct ScratchPostgres {
    binaries: Binaries,
    account: Account,
    folder: Folder,
    data_dir: PathBuf,
    port: Option<Port>,
    postmaster: Option<Child>,
    watchdog: Watchdog,
}

impl ScratchPostgres {
    /// Describes a server. Nothing is started before [`Builder::start`].
    #[must_use]
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// Creates a server in an empty folder, which the watchdog removes when this value is dropped.
    pub(crate) fn new(binaries: Binaries, account: Account, folder: Folder) -> Result<Self, Error> {
        let watchdog = Watchdog::watch(folder.root())?;
        let data_dir = folder.data();
        Ok(Self {
            binaries,
            account,
            folder,
            data_dir,
            port: None,
            postmaster: None,
            watchdog,
        })
    }

    /// The address that the server listens on.
    #[must_use]
    pub fn host(&self) -> &str {
        HOST
    }

    /// The TCP port, which stays the same across restarts.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port.as_ref().map_or(0, |port| port.number)
    }

    /// The folder of the Unix socket.
    #[must_use]
    pub fn socket_dir(&self) -> &Path {
        self.folder.root()
    }

    /// The data folder (`PGDATA`).
    #[must_use]
    pub fn data_dir(&self) -> &Path {
        &self.data_dir
    }

    /// The folder of the server's programs.
    #[must_use]
    pub fn programs(&self) -> &Path {
        self.binaries.folder()
    }

    /// URL over TCP for the superuser `postgres`, without a password.
    #[must_use]
    pub fn url(&self, database: &str) -> String {
        format!(
            "postgres://postgres@{HOST}:{}/{}",
            self.port(),
            percent_encoded(database)
        )
    }

    /// URL over the Unix socket for the superuser `postgres`, without a password.
    #[must_use]
    pub fn socket_url(&self, database: &str) -> String {
        let host = percent_encoded(&self.socket_dir().to_string_lossy());
        format!(
            "postgres://postgres@{host}:{}/{}",
            self.port(),
            percent_encoded(database)
        )
    }

    /// The major version, such as 15.
    ///
    /// # Errors
    /// The data folder has no readable `PG_VERSION`.
    pub fn major_version(&self) -> Result<u32, Error> {
        let path = self.data_dir.join("PG_VERSION");
        fs::read_to_string(&path)
            .and_then(|text| text.trim().parse().map_err(std::io::Error::other))
            .map_err(Error::io(format!("reading {}", path.display())))
    }

    /// The pid of the postmaster, if the server is running.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.postmaster.as_ref().map(Child::id)
    }

    /// The server's log, from its first start on.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn log(&self) -> Result<String, Error> {
        let bytes = fs::read(self.folder.log()).map_err(Error::io("reading the server log"))?;
        Ok(process::text(&bytes))
    }

    /// Writes a setting to `postgresql.auto.conf`. Some settings take effect at
    /// [`reload`](Self::reload), others only at the next start.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn set(&self, setting: &str, value: &str) -> Result<(), Error> {
        OpenOptions::new()
            .append(true)
            .open(self.data_dir.join("postgresql.auto.conf"))
            .and_then(|mut file| file.write_all(setting_line(setting, value).as_bytes()))
            .map_err(Error::io("writing postgresql.auto.conf"))
    }

    /// Makes the server reload its configuration. Open sessions use the new settings a moment later.
    ///
    /// # Errors
    /// [`Error::NotRunning`].
    pub fn reload(&self) -> Result<(), Error> {
        process::signal("HUP", &[self.pid().ok_or(Error::NotRunning)?])
    }

    /// Stops the server and waits until it has stopped.
    ///
    /// # Errors
    /// [`Error::StillRunning`] if the time is up. The server continues to shut down: call this
    /// again to wait longer or to use a harder mode. [`Error::NotRunning`].
    pub fn stop(&mut self, mode: StopMode, timeout: Duration) -> Result<(), Error> {
        let postmaster = self.postmaster.as_mut().ok_or(Error::NotRunning)?;
        process::signal(mode.signal(), &[postmaster.id()])?;
        if !process::wait_until(timeout, || !matches!(postmaster.try_wait(), Ok(None))) {
            return Err(Error::StillRunning { mode, timeout });
        }
        self.postmaster = None;
        self.watchdog.server_stopped()
    }

    /// Starts the server again after [`stop`](Self::stop) or [`kill_9`](Self::kill_9), on the same
    /// data and port.
    ///
    /// # Errors
    /// [`Error::Running`], or [`Error::DidNotStart`] with the end of the log.
    pub fn start_again(&mut self) -> Result<(), Error> {
        if self.postmaster.is_some() {
            return Err(Error::Running);
        }
        self.launch()
    }

    /// Stops and starts the server.
    ///
    /// # Errors
    /// The errors of [`stop`](Self::stop), which waits for up to a minute here, and the errors of
    /// [`start_again`](Self::start_again).
    pub fn restart(&mut self, mode: StopMode) -> Result<(), Error> {
        self.stop(mode, RESTART_STOP_TIMEOUT)?;
        self.start_again()
    }

    /// Crashes the server: sends SIGKILL to the postmaster and all its children.
    ///
    /// # Errors
    /// [`Error::NotRunning`]. [`Error::StillRunning`] if a process does not end within seconds.
    pub fn kill_9(&mut self) -> Result<(), Error> {
        let postmaster = self.postmaster.as_mut().ok_or(Error::NotRunning)?;
        let pid = postmaster.id();
        process::signal("STOP", &[pid])?; // the postmaster must not fork while we list its children
        let mut pids = process::children_of(pid);
        pids.push(pid);
        for pid in &pids {
            let _ = process::signal("KILL", &[*pid]); // the process may have ended already
        }
        postmaster
            .wait()
            .map_err(Error::io("waiting for the killed postmaster"))?;
        self.postmaster = None;
        self.watchdog.server_stopped()?;
        // A child that is still alive holds the shared memory, so the next start would fail.
        if process::wait_until(DROP_STOP_TIMEOUT, || !process::any_alive(&pids)) {
            return Ok(());
        }
        let timeout = DROP_STOP_TIMEOUT;
        Err(Error::StillRunning {
            mode: StopMode::Immediate,
            timeout,
        })
    }

    /// Chooses a port and starts the server for the first time.
    pub(crate) fn start_first(&mut self) -> Result<(), Error> {
        let mut tries = 0;
        loop {
            self.port = Some(port::free()?);
            tries += 1;
            match self.launch() {
                // Another process took the port: try another one. Other errors are real failures.
                Err(Error::DidNotStart { .. })
                    if tries < PORT_TRIES && !port::is_free(self.port()) => {}
                other => return other,
            }
        }
    }

    fn launch(&mut self) -> Result<(), Error> {
        let log = OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.folder.log())
            .map_err(Error::io("opening the server log"))?;
        let child = self.spawn_postmaster(log)?;
        let pid = child.id();
        self.postmaster = Some(child);
        self.watchdog.server_started(pid)?;
        self.wait_until_ready(pid)
    }

    fn spawn_postmaster(&self, log: File) -> Result<Child, Error> {
        self.account
            .command(&self.binaries.postgres, self.folder.root())
            .arg("-D")
            .arg(&self.data_dir)
            .arg("-p")
            .arg(self.port().to_string())
            .arg("-k")
            .arg(self.socket_dir())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .process_group(0) // a Ctrl-C on the terminal must not reach the server
            .spawn()
            .map_err(Error::io(format!(
                "starting {}",
                self.binaries.postgres.display()
            )))
    }

    fn wait_until_ready(&mut self, pid: u32) -> Result<(), Error> {
        let mut ended: Option<ExitStatus> = None;
        let ready = process::wait_until(START_TIMEOUT, || {
            ended = self
                .postmaster
                .as_mut()
                .and_then(|child| child.try_wait().ok().flatten());
            ended.is_some() || pid_file_says_ready(&self.data_dir, pid)
        });
        if ready && ended.is_none() {
            return Ok(());
        }
        let reason = match ended {
            Some(status) => {
                self.postmaster = None;
                self.watchdog.server_stopped()?;
                format!("it ended ({status})")
            }
            None => {
                self.kill_9()?;
                format!("it was not ready after {START_TIMEOUT:?}")
            }
        };
        let log_tail = last_lines(&self.log()?, 20);
        Err(Error::DidNotStart {
            data_dir: self.data_dir.clone(),
            reason,
            log_tail,
        })
    }
}

impl Drop for ScratchPostgres {
    fn drop(&mut self) {
        if self.postmaster.is_some() && self.stop(StopMode::Immediate, DROP_STOP_TIMEOUT).is_err() {
            let _ = self.kill_9();
        }
        // The field `watchdog` is dropped next, which removes the folder.
    }
}

/// Whether line 8 of `postmaster.pid`, which contains the status, is `ready`. Line 1 must contain our
/// server's pid, because the file can be left over from a crashed server.
fn pid_file_says_ready(data_dir: &Path, pid: u32) -> bool {
    let Ok(text) = fs::read_to_string(data_dir.join("postmaster.pid")) else {
        return false;
    };
    let mut lines = text.lines().map(str::trim);
    lines.next() == Some(pid.to_string().as_str()) && matches!(lines.nth(6), Some("ready"))
}

fn last_lines(text: &str, count: usize) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(count)..].join("\n")
}

/// Replaces every byte except letters, digits and `-._~` with `%XX`.
fn percent_encoded(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            encoded.push_str(&format!("%{byte:02X}"));
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stale_pid_file_does_not_count_as_ready() {
        let temp = tempfile::tempdir().expect("tempdir");
        let file = temp.path().join("postmaster.pid");
        fs::write(
            &file,
            "100\n/data\n1\n2\n/tmp\n127.0.0.1\n  1  2\nready   \n",
        )
        .expect("write");
        assert!(pid_file_says_ready(temp.path(), 100));
        assert!(!pid_file_says_ready(temp.path(), 101));
        fs::write(
            &file,
            "100\n/data\n1\n2\n/tmp\n127.0.0.1\n  1  2\nstarting\n",
        )
        .expect("write");
        assert!(!pid_file_says_ready(temp.path(), 100));
    }

    #[test]
    fn names_are_percent_encoded_in_urls() {
        assert_eq!(percent_encoded("/tmp/a b"), "%2Ftmp%2Fa%20b");
    }
}
