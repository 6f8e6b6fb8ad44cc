//! Stops the server and removes its folder when the owner process ends or drops the server.
//!
//! A shell reads from a pipe whose other end only the owner process holds. The kernel closes that
//! end when the owner ends, even by SIGKILL. The shell then reads the end of its input and cleans
//! up. So the shell does not have to poll the owner's pid, which another process might reuse.
//!
//! The owner writes the server's pid to the pipe when the server has started, and an empty line
//! when the server has stopped. So the shell never sends a signal to a stale pid.

use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::Error;

/// The shell's script, which gets the folder as `$1`. The script tries an immediate shutdown of the server
/// first, and SIGKILL after five seconds.
const SCRIPT: &str = r#"
server=
while read -r line; do server=$line; done
if [ -n "$server" ] && kill -s QUIT "$server" 2>/dev/null; then
    tries=0
    while [ "$tries" -lt 50 ] && kill -s 0 "$server" 2>/dev/null; do
        sleep 0.1
        tries=$((tries + 1))
    done
    kill -s KILL "$server" 2>/dev/null
fi
rm -rf -- "$1"
"#;

#[derive(Debug)]
pub(crate) struct Watchdog {
    shell: Child,
}

impl Watchdog {
    /// Starts the shell, which stops the server and removes `folder` when this value is dropped or our
    /// process ends.
    pub(crate) fn watch(folder: &Path) -> Result<Self, Error> {
        let shell = Command::new("sh")
            .args(["-c", SCRIPT, "sh"])
            .arg(folder)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .current_dir("/")
            .process_group(0) // a Ctrl-C on the terminal must not reach the shell
            .spawn()
            .map_err(Error::io("starting the watchdog shell"))?;
        Ok(Self { shell })
    }

    pub(crate) fn server_started(&mut self, pid: u32) -> Result<(), Error> {
        self.tell(&pid.to_string())
    }

    pub(crate) fn server_stopped(&mut self) -> Result<(), Error> {
        self.tell("")
    }

    fn tell(&mut self, line: &str) -> Result<(), Error> {
        let pipe = self
            .shell
            .stdin
            .as_mut()
            .expect("invariant: stdin is piped and never taken");
        writeln!(pipe, "{line}").map_err(Error::io("writing to the watchdog"))
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        // `wait` first closes the pipe, and the shell then cleans up and ends. `wait` fails only if the
        // shell has already ended.
        let _ = self.shell.wait();
    }
}
