//! A pseudo terminal with a command in it.

use std::fs::File;
use std::io::{Read, Write};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use rustix::pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};

use super::screen::Screen;
use crate::support::{Database, PATIENCE};

/// A terminal in which a command runs. The command is killed when this value is dropped.
pub(super) struct Terminal {
    /// The end of the pseudo terminal where the test acts as window and keyboard.
    ours: File,
    /// The end of the pseudo terminal that the command uses as its terminal.
    theirs: File,
    modes: LocalModes,
    child: Child,
    output: Arc<Mutex<Vec<u8>>>,
    /// Rows and columns. `drawn_from` is the length of the output when the terminal got this size.
    size: (u16, u16),
    drawn_from: usize,
}

fn window((rows, columns): (u16, u16)) -> Winsize {
    Winsize {
        ws_row: rows,
        ws_col: columns,
        ws_xpixel: 0,
        ws_ypixel: 0,
    }
}

impl Terminal {
    /// Runs the command on this database, in a terminal with this number of rows and columns.
    pub(super) fn run(database: &Database, arguments: &[&str], size: (u16, u16)) -> Self {
        Self::run_with(database, arguments, size, &[])
    }

    /// Like `run`, with the additional variables `env`.
    pub(super) fn run_with(
        database: &Database,
        arguments: &[&str],
        size: (u16, u16),
        env: &[(&str, &str)],
    ) -> Self {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let ours = openpt(flags).unwrap();
        grantpt(&ours).unwrap();
        unlockpt(&ours).unwrap();
        let theirs = File::from(ioctl_tiocgptpeer(&ours, flags).unwrap());
        tcsetwinsize(&ours, window(size)).unwrap();
        let modes = tcgetattr(&theirs).unwrap().local_modes;
        let side = || Stdio::from(theirs.try_clone().unwrap());
        // `setsid --ctty` makes the terminal the controlling one, as a shell does, so that Ctrl-C and
        // changes of the size send signals. If the tests run in the background of a script, SIGINT is
        // ignored, so `env --default-signal=INT` resets SIGINT.
        let child = Command::new("setsid")
            .args(["--ctty", "env", "--default-signal=INT"])
            .arg(env!("CARGO_BIN_EXE_postrider"))
            .args(arguments)
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .env("TERM", "xterm-256color")
            .envs(database.env())
            .envs(env.iter().copied())
            .stdin(side())
            .stdout(side())
            .stderr(side())
            .spawn()
            .unwrap();
        let ours = File::from(ours);
        let output = Arc::new(Mutex::new(Vec::new()));
        let (mut reading, sink) = (ours.try_clone().unwrap(), output.clone());
        std::thread::spawn(move || {
            let mut bytes = [0; 4_096];
            while let Ok(count) = reading.read(&mut bytes) {
                sink.lock().unwrap().extend_from_slice(&bytes[..count]);
            }
        });
        Self {
            modes,
            ours,
            theirs,
            child,
            output,
            size,
            drawn_from: 0,
        }
    }

    /// Everything that the command has written.
    pub(super) fn output(&self) -> String {
        String::from_utf8_lossy(&self.output.lock().unwrap()).into_owned()
    }

    /// Waits until the screen fulfils the condition.
    pub(super) fn wait_for(&self, what: &str, holds: impl Fn(&Screen) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let output = self.output.lock().unwrap()[self.drawn_from..].to_vec();
            let screen = Screen::after(&String::from_utf8_lossy(&output), self.size);
            if holds(&screen) {
                return;
            }
            assert!(Instant::now() < deadline, "{what}:\n{}", screen.text());
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }

    /// Waits until the output fulfils the condition. The end of a command's output arrives after the
    /// command has ended.
    pub(super) fn wait_for_output(&self, what: &str, holds: impl Fn(&str) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !holds(&self.output()) {
            assert!(Instant::now() < deadline, "{what}: {:?}", self.output());
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }

    pub(super) fn press(&mut self, keys: &str) {
        self.ours.write_all(keys.as_bytes()).unwrap();
    }

    /// Changes the size. The command has to draw everything again.
    pub(super) fn resize(&mut self, rows: u16, columns: u16) {
        self.drawn_from = self.output.lock().unwrap().len();
        self.size = (rows, columns);
        tcsetwinsize(&self.ours, window(self.size)).unwrap();
    }

    pub(super) fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        let sent = Command::new("sh")
            .args(["-c", "kill -s \"$1\" \"$2\"", "sh", name, &pid])
            .status();
        assert!(sent.unwrap().success());
    }

    /// Waits until the command has ended.
    pub(super) fn wait(&mut self) -> ExitStatus {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(
                Instant::now() < deadline,
                "still running: {}",
                self.output()
            );
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }

    /// Whether the terminal has the modes that it had before the command, such as echo.
    pub(super) fn has_its_modes(&self) -> bool {
        tcgetattr(&self.theirs).unwrap().local_modes == self.modes
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
