//! Forwards what `password_command` writes to standard error to the log, line by line, so that the log keeps
//! its format.
//!
//! Not here: running the command, and the password that it prints (the parent module).

use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::process::ChildStderr;

use crate::printable::printable;

/// How many lines of the standard error of a command are logged, and how many bytes of each.
const LOGGED_LINES: usize = 20;
const LOGGED_BYTES: u64 = 1 << 10;

/// How long to wait, once the command has ended, for what it has written to standard error.
const LAST_WORDS_LIMIT: Duration = Duration::from_millis(100);

/// The result of `running`, which logs what the command writes to standard error meanwhile. Does not
/// wait for programs in the background.
pub(super) async fn while_logging<T>(
    stderr: Option<ChildStderr>,
    running: impl Future<Output = T>,
) -> T {
    let mut line = Vec::new();
    let result = {
        let logging = async {
            if let Some(stderr) = stderr {
                // An unreadable pipe is no reason to fail.
                let _ = log_lines(stderr, &mut line).await;
            }
        };
        let (mut running, mut logging) = (std::pin::pin!(running), std::pin::pin!(logging));
        let result = tokio::select! {
            result = &mut running => result,
            () = &mut logging => return running.await,
        };
        let _ = tokio::time::timeout(LAST_WORDS_LIMIT, logging).await;
        result
    };
    // The last line may have no end, while a program in the background keeps the pipe open.
    if !line.is_empty() {
        log_line(&line);
    }
    result
}

/// Logs each line, up to a limit, and drops the rest so that the command does not end for a closed pipe. A
/// line that is not complete yet is in `line`.
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
    tracing::warn!(
        "password_command: {}",
        printable(String::from_utf8_lossy(line).trim_end())
    );
}
