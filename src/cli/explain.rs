//! `postrider explain`: the page of an error code.

use std::process::ExitCode;

use super::output;
use crate::error::Code;

pub(super) fn explain(code: Option<Code>) -> ExitCode {
    match code {
        Some(code) => output::write(code.page()),
        None => {
            let line = |code: &Code| format!("{code:32} {}\n", code.hint());
            output::write(&Code::ALL.iter().map(line).collect::<String>());
        }
    }
    ExitCode::SUCCESS
}
