//! Commands that are packages of their own, with their own arguments and help. So their dependencies do
//! not slow the build of xtask.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;

use clap::Args;

use xtask::step;

/// Arguments that the other program reads.
#[derive(Debug, Args)]
pub(crate) struct Forwarded {
    /// Arguments of the program; its --help lists them
    #[arg(
        value_name = "ARGUMENTS",
        trailing_var_arg = true,
        allow_hyphen_values = true
    )]
    arguments: Vec<OsString>,
}

/// Continues as the program of `package`, which gets the words in `first` before the arguments.
///
/// # Errors
/// If cargo does not start. Otherwise the call does not return.
pub(crate) fn run(package: &str, first: &[&str], forwarded: &Forwarded) -> Result<(), String> {
    let mut program = step::cargo(&["run", "--quiet", "--package", package, "--"]);
    // Paths in the arguments are relative to the folder of the caller.
    program.current_dir(".");
    let error = program.args(first).args(&forwarded.arguments).exec();
    Err(format!("cargo did not start: {error}"))
}
