//! Commands that run other packages, which have their own arguments and help. They are separate
//! packages so that their dependencies do not slow down the build of xtask.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;

use clap::Args;

use xtask::step;

/// Arguments that xtask passes on to the other program.
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

/// Replaces this process with the program of `package`. The program gets the words in `first`, followed
/// by the arguments.
///
/// # Errors
/// Returns an error if cargo does not start. Otherwise the call does not return.
pub(crate) fn run(package: &str, first: &[&str], forwarded: &Forwarded) -> Result<(), String> {
    let mut program = step::cargo(&["run", "--quiet", "--package", package, "--"]);
    // Stay in the caller's working directory, because paths in the arguments are relative to it.
    program.current_dir(".");
    let error = program.args(first).args(&forwarded.arguments).exec();
    Err(format!("cargo did not start: {error}"))
}
