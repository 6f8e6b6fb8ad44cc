//! `postrider explain`: the page of an error code.

use std::process::ExitCode;

use super::output;
use crate::error::Code;

pub(super) fn explain(code: Option<Code>) -> ExitCode {
    match code {
        Some(code) => print!("{}", code.page()),
        None => Code::ALL
            .iter()
            .for_each(|code| println!("{code:32} {}", code.hint())),
    }
    ExitCode::SUCCESS
}
