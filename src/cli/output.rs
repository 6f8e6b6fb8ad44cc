//! Writes to standard output. If the reader closes the pipe, as in `postrider slot list | head -1`, the
//! process ends silently.

use std::io::{ErrorKind, Write};
use std::process;

use serde::Serialize;

use super::report::ReportForm;
use super::wrap;
use crate::error::{Code, Error};

/// Writes text. If the reader has closed the pipe, ends the process with the exit code of SIGPIPE. If the write
/// fails for another reason, such as a full disk, reports the error and ends the process.
pub(super) fn write(text: &str) {
    let mut stdout = std::io::stdout().lock();
    let Err(error) = stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.flush())
    else {
        return;
    };
    if error.kind() == ErrorKind::BrokenPipe {
        process::exit(141); // 128 + SIGPIPE, as a shell reports it
    }
    let what = format!("cannot write the output: {error}");
    let error = Error::new(Code::Internal, what)
        .hint("make room where the output goes, or send it to another place, and run this again");
    ReportForm::of_process().report(&error);
    process::exit(Code::Internal.exit_status().into())
}

/// Writes text for the operator. On a terminal, wraps lines that are too long.
pub(super) fn write_wrapped(text: &str) {
    write(&wrap::lines(text, wrap::terminal_width()));
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
