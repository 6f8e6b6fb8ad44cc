//! The operating system account that the server runs as.
//!
//! PostgreSQL refuses to run as root. So if we are root, the data folder and the processes belong
//! to another account. An ordinary user runs everything under its own account.

use std::io;
use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use crate::{Error, process};

/// Accounts that root may run the server as, in order of preference.
const CANDIDATES: [&str; 2] = ["postgres", "nobody"];

#[derive(Debug, Clone, Copy)]
pub(crate) enum Account {
    /// The account that we run as.
    Own,
    /// Another account; only root can use this.
    Other { uid: u32, gid: u32 },
}

impl Account {
    pub(crate) fn choose() -> Result<Self, Error> {
        if id(&["-u"])? != Some(0) {
            return Ok(Self::Own);
        }
        for name in CANDIDATES {
            if let (Some(uid), Some(gid)) = (id(&["-u", name])?, id(&["-g", name])?) {
                return Ok(Self::Other { uid, gid });
            }
        }
        Err(Error::NoAccount)
    }

    /// Creates a command that runs as this account. `folder` is the command's working directory, so the
    /// account must be allowed to enter it.
    pub(crate) fn command(self, program: impl AsRef<std::ffi::OsStr>, folder: &Path) -> Command {
        let mut command = Command::new(program);
        command
            .current_dir(folder)
            .env("LC_ALL", "C")
            .env_remove("PGDATA")
            .env_remove("PGPORT");
        if let Self::Other { uid, gid } = self {
            command.uid(uid).gid(gid); // also drops root's supplementary groups
        }
        command
    }

    /// Makes this account the owner of a file or folder.
    pub(crate) fn take(self, path: &Path) -> io::Result<()> {
        match self {
            Self::Own => Ok(()),
            Self::Other { uid, gid } => chown(path, Some(uid), Some(gid)),
        }
    }
}

/// Runs `id` and returns the number that it prints. Returns `None` if the account does not exist.
fn id(arguments: &[&str]) -> Result<Option<u32>, Error> {
    let output = Command::new("id")
        .args(arguments)
        .output()
        .map_err(Error::io("running `id`"))?;
    if !output.status.success() {
        return Ok(None);
    }
    Ok(process::text(&output.stdout).trim().parse().ok())
}
