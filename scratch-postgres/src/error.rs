//! Errors of a scratch server, with advice on what to do.

use std::path::PathBuf;
use std::time::Duration;

use crate::StopMode;

/// A scratch server could not be created, started or stopped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No folder with `initdb` and `postgres` was found.
    #[error(
        "no PostgreSQL server programs found (looked in {looked_in}): install them with \
         `apt-get install postgresql`, or set POSTRIDER_PG_BIN to the folder that holds \
         initdb and postgres"
    )]
    NoServerPrograms {
        /// The locations that were searched, separated by commas.
        looked_in: String,
    },
    /// We are root, and there is no other account under which the server can run.
    #[error(
        "PostgreSQL refuses to run as root and neither the account `postgres` nor `nobody` \
         exists: run as an ordinary user, or `apt-get install postgresql`"
    )]
    NoAccount,
    /// Each temporary folder either has a path that is too long for a socket or is closed to the
    /// server's account.
    #[error(
        "no usable temporary folder (tried {tried}): set TMPDIR to a short path that the \
         server's account may enter"
    )]
    NoFolder {
        /// The folders that were tried, separated by commas.
        tried: String,
    },
    /// An operation of the operating system failed.
    #[error("{action} failed: {source}; check permissions and free space in the temp folder")]
    Io {
        /// The action that failed, with its path or program.
        action: String,
        /// The error of the operating system.
        source: std::io::Error,
    },
    /// A helper program, such as `initdb` or `cp`, ended with an error.
    #[error("{program} failed ({status}); its output says why:\n{output}")]
    Program {
        /// The program's path or name.
        program: String,
        /// The program's exit status.
        status: std::process::ExitStatus,
        /// The program's standard output and standard error.
        output: String,
    },
    /// The server exited, or was not ready in time.
    #[error("the server in {} did not start: {reason}; its log ends with:\n{log_tail}", data_dir.display())]
    DidNotStart {
        /// The server's data folder.
        data_dir: PathBuf,
        /// The exit status, or a note that the time was up.
        reason: String,
        /// The last lines of the server log.
        log_tail: String,
    },
    /// The server did not stop in time. It is still shutting down.
    #[error(
        "the server did not stop within {timeout:?} of a {mode:?} shutdown: a client or a \
         walsender delays it; disconnect it, wait longer or stop with StopMode::Immediate"
    )]
    StillRunning {
        /// The requested shutdown mode.
        mode: StopMode,
        /// How long we waited.
        timeout: Duration,
    },
    /// The call needs a running server.
    #[error("the server is not running: call start_again() first")]
    NotRunning,
    /// The call needs a stopped server.
    #[error("the server is running: call stop() first")]
    Running,
}

impl Error {
    pub(crate) fn io(action: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let action = action.into();
        move |source| Self::Io { action, source }
    }
}
