//! The temporary folder of one server: `data/`, `log` and the Unix socket.
//!
//! This module creates the folder, and the watchdog removes it. So a folder is removed in the same way
//! whether its server is dropped or the server's owner is killed.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::account::Account;
use crate::{Error, process};

/// Maximum length of a folder's path in bytes. The path of a socket (`sockaddr_un`) may have 107 bytes on Linux and
/// 103 on macOS, so we use 103. The longest file name in the folder, `/.s.PGSQL.12345.lock`, takes 20 of them.
const LONGEST_FOLDER_BYTES: usize = 103 - 20;

/// Environment variable that names the parent of the servers' folders, instead of the system's temp folder.
const PARENT_VARIABLE: &str = "SCRATCH_POSTGRES_FOLDER";

const PREFIX: &str = "scratch-pg-";

#[derive(Debug, Clone)]
pub(crate) struct Folder {
    root: PathBuf,
}

impl Folder {
    /// Creates a folder for a server. Its parent is the folder that [`PARENT_VARIABLE`] names, or else the system's temp
    /// folder. If the path is too long for a socket, or if the server's account may not enter the parent, the parent is
    /// `/tmp`.
    pub(crate) fn create(account: Account) -> Result<Self, Error> {
        let parent =
            std::env::var_os(PARENT_VARIABLE).map_or_else(std::env::temp_dir, PathBuf::from);
        let candidates = [parent, PathBuf::from("/tmp")];
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
            return None; // dropping `temp` removes the folder again
        }
        std::fs::set_permissions(temp.path(), std::fs::Permissions::from_mode(0o700)).ok()?;
        account.take(temp.path()).ok()?;
        // Only the account itself can find out whether it may enter every parent folder.
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
