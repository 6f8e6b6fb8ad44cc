//! Writes to standard output. If the reader closes the pipe, as in `postrider slot list | head -1`, the
//! process ends silently.

use std::io::Write;
use std::process;

use serde::Serialize;

/// Writes text. If the reader has closed the pipe, ends the process as SIGPIPE would.
pub(super) fn write(text: &str) {
    let mut stdout = std::io::stdout().lock();
    if stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.flush())
        .is_err()
    {
        process::exit(141); // 128 + SIGPIPE, as a shell reports it
    }
}

/// Writes one JSON value, indented.
pub(super) fn write_json(value: &impl Serialize) {
    let text = serde_json::to_string_pretty(value).expect("invariant: our values have a JSON form");
    write(&(text + "\n"));
}

/// Writes one JSON value on a line of its own.
pub(super) fn write_json_line(value: &impl Serialize) {
    let text = serde_json::to_string(value).expect("invariant: our values have a JSON form");
    write(&(text + "\n"));
}
