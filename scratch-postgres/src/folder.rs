//! The temporary folder of one server: `data/`, `log` and the Unix socket.
//!
//! The folder is removed by the watchdog, not here: there is one way in which servers go away,
//! whether they are dropped or their owner is killed.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::account::Account;
use crate::{Error, process};

/// `sockaddr_un` holds 107 bytes and a zero (103 on macOS); `/.s.PGSQL.12345.lock` takes 20.
const LONGEST_FOLDER_BYTES: usize = 103 - 20;

const PREFIX: &str = "scratch-pg-";

#[derive(Debug, Clone)]
pub(crate) struct Folder {
    root: PathBuf,
}

impl Folder {
    /// Makes a folder below the system's temp folder, or below `/tmp` when that one is too deep
    /// for a socket or closed to the server's account.
    pub(crate) fn create(account: Account) -> Result<Self, Error> {
        let candidates = [std::env::temp_dir(), PathBuf::from("/tmp")];
        for candidate in &candidates {
            if let Some(folder) = Self::create_in(candidate, account) {
                return Ok(folder);
            }
        }
        let tried: Vec<_> = candidates.iter().map(|c| c.display().to_string()).collect();
        Err(Error::NoFolder {
            tried: tried.join(", "),
        })
    }

    fn create_in(parent: &Path, account: Account) -> Option<Self> {
        let parent = parent.canonicalize().ok()?;
        let temp = tempfile::Builder::new()
            .prefix(PREFIX)
            .tempdir_in(parent)
            .ok()?;
        if temp.path().as_os_str().len() > LONGEST_FOLDER_BYTES {
            return None; // dropping `temp` removes it again
        }
        std::fs::set_permissions(temp.path(), std::fs::Permissions::from_mode(0o700)).ok()?;
        account.take(temp.path()).ok()?;
        // Only the account itself can tell whether it may enter every folder above.
        process::run(&mut account.command("true", temp.path())).ok()?;
        Some(Self { root: temp.keep() })
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    pub(crate) fn data(&self) -> PathBuf {
        self.root.join("data")
    }

    pub(crate) fn log(&self) -> PathBuf {
        self.root.join("log")
    }
}
