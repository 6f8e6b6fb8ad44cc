//! Installs Google's Python and Node clients once, below the cargo target directory.
//!
//! Versions are pinned, so that a new release of a client does not change the tests. A file lock
//! keeps two test runs from installing at the same time. A stamp file marks a complete
//! installation.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const PYTHON_CLIENT: &str = "google-cloud-pubsub==2.44.0";
const NODE_CLIENT: &str = "@google-cloud/pubsub@6.3.0";

/// Returns the interpreter of a virtual environment in which the client is installed.
pub(crate) fn python_client() -> Option<PathBuf> {
    let installed = once("python3", PYTHON_CLIENT, |folder| {
        run(Command::new("python3")
            .args(["-m", "venv", "--clear"])
            .arg(folder))?;
        let pip = [
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            PYTHON_CLIENT,
        ];
        run(Command::new(folder.join("bin/python")).args(pip))
    });
    Some(installed?.join("bin/python"))
}

/// Returns the `node_modules` folder with the client.
pub(crate) fn node_client() -> Option<PathBuf> {
    let installed = once("node", NODE_CLIENT, |folder| {
        let npm = [
            "install",
            "--no-audit",
            "--no-fund",
            "--loglevel=error",
            NODE_CLIENT,
        ];
        run(Command::new("npm").args(npm).arg("--prefix").arg(folder))
    });
    Some(installed?.join("node_modules"))
}

/// Installs the client unless it is already installed. Prints the reason if the installation fails.
fn once(
    interpreter: &str,
    client: &str,
    install: impl FnOnce(&Path) -> Result<(), String>,
) -> Option<PathBuf> {
    let cache = Path::new(env!("CARGO_TARGET_TMPDIR")).join("google-clients");
    let folder = cache.join(client.replace(['@', '/', '='], "-"));
    fs::create_dir_all(&folder).expect("the target directory can be written");
    let lock = File::create(folder.with_added_extension("lock")).expect("a lock file");
    lock.lock().expect("file locks work");
    let stamp = folder.join("complete");
    let installed = run(Command::new(interpreter).arg("--version")).and_then(|()| {
        if stamp.exists() {
            return Ok(());
        }
        install(&folder)?;
        File::create(&stamp)
            .map(drop)
            .map_err(|error| error.to_string())
    });
    match installed {
        Ok(()) => Some(folder),
        Err(reason) => {
            // Write to standard error directly, because the test harness shows captured output only
            // for a failed test.
            let _ = writeln!(io::stderr(), "SKIPPED: Google's client {client}: {reason}");
            None
        }
    }
}

fn run(command: &mut Command) -> Result<(), String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.stdin(Stdio::null()).output();
    let output = output.map_err(|error| format!("cannot run {program}: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    let stderr = String::from_utf8_lossy(&output.stderr);
    // The last lines of npm only say where its log is, so look for a line with the reason.
    let says_why = |line: &&str| line.to_lowercase().contains("no matching");
    let is_error = |line: &&str| line.to_lowercase().contains("error");
    let reason = stderr
        .lines()
        .find(says_why)
        .or_else(|| stderr.lines().find(is_error));
    let reason = reason.unwrap_or("it gives no reason");
    Err(format!("{program} failed with {}: {reason}", output.status))
}
