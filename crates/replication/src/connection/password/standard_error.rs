//! Copies what `password_command` writes to standard error into the relay's log, in the format of
//! the log.
//!
//! Not here: the command's standard output, which is the password.

use std::time::Duration;

use printable::printable;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::process::ChildStderr;

use crate::LOG_TARGET;

/// Maximum number of lines of the command's standard error that are logged. An error message fits into this
/// many lines. A command that prints more must not flood the log.
const LOGGED_LINES: usize = 20;
/// Maximum length in bytes of a logged line. A longer line is logged in pieces of this length, and each piece
/// counts as a line.
const LOGGED_BYTES: u64 = 1 << 10;

/// How long to wait for the rest of standard error after the command has ended.
const LAST_WORDS_LIMIT: Duration = Duration::from_millis(100);

/// Waits for `running` and returns its result. Meanwhile, logs the command's standard error. Does
/// not wait for programs that the command leaves in the background.
pub(super) async fn while_logging<T>(
    stderr: Option<ChildStderr>,
    running: impl Future<Output = T>,
) -> T {
    let mut line = Vec::new();
    let result = {
        let logging = async {
            match stderr {
                Some(stderr) => log_lines(stderr, &mut line).await,
                None => Ok(()),
            }
        };
        let (mut running, mut logging) = (std::pin::pin!(running), std::pin::pin!(logging));
        let result = tokio::select! {
            result = &mut running => result,
            // Standard error has ended or cannot be read. In both cases the command itself may
            // still succeed.
            _ = &mut logging => return running.await,
        };
        let _ = tokio::time::timeout(LAST_WORDS_LIMIT, logging).await;
        result
    };
    // Log a last line that has no line end yet. `log_lines` logs such a line only when the pipe is closed, but a
    // program that the command has left in the background may keep the pipe open.
    if !line.is_empty() {
        log_line(&line);
    }
    result
}

/// Logs the first lines, then reads the rest and drops it, because a closed pipe would make the
/// command fail. When the future is dropped, `line` holds the beginning of a line that is not
/// logged yet.
async fn log_lines(stderr: ChildStderr, line: &mut Vec<u8>) -> std::io::Result<()> {
    let mut reader = BufReader::new(stderr);
    for _ in 0..LOGGED_LINES {
        let mut start = (&mut reader).take(LOGGED_BYTES);
        if start.read_until(b'\n', line).await? == 0 {
            return Ok(());
        }
        log_line(line);
        line.clear();
    }
    tokio::io::copy(&mut reader, &mut tokio::io::sink()).await?;
    Ok(())
}

fn log_line(line: &[u8]) {
    let line = String::from_utf8_lossy(line);
    tracing::warn!(target: LOG_TARGET, "password_command: {}", printable(line.trim_end()));
}
