//! The commands of `postrider`, one file or folder each. A command parses its arguments, calls
//! `ops`, prints the result, and chooses the exit code. It contains no SQL, except for `init`.
//!
//! `args` defines the command line. `setting_flags` adds a flag for each setting, from the table of
//! settings ([`crate::settings::KEYS`]).

mod args;
mod audit;
mod check;
mod event;
mod explain;
mod figures;
mod findings;
mod init;
mod logging;
mod output;
mod paint;
mod prune;
mod quarantine;
mod raw_args;
mod recover;
mod replay;
mod run;
mod setting_flags;
mod signals;
mod slot;
mod status;
mod tail;
mod wrap;

pub use args::{Cli, command};

use std::io::Write;
use std::process::ExitCode;

use crate::error::{Code, Error, Report, Result};
use crate::ops::capture;
use crate::settings::{LogFormat, Settings, environment};
use args::Command;

/// Runs the command that the process was started with.
pub fn main() -> ExitCode {
    // Installs the TLS provider for libraries that use the process's default provider. An error means
    // that a provider is already installed.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let (cli, flags) = Cli::from_process();
    match dispatch(cli, &flags) {
        Ok(code) => code,
        Err(error) => {
            // One write, so that no other output comes between the lines. If the write fails, there is
            // no other place to report it.
            let report = format!("{}\n", Report(&error));
            let _ = std::io::stderr().write_all(report.as_bytes());
            ExitCode::from(error.code().exit_status())
        }
    }
}

fn dispatch(cli: Cli, flags: &[(String, String)]) -> Result<ExitCode> {
    let load = || {
        let environment = environment(std::env::vars_os())?;
        Settings::load(cli.config.as_deref(), &environment, flags)
    };
    match cli.command {
        Command::Run => match load() {
            Ok(settings) => run::run(settings),
            Err(error) => match asked_log_format(flags) {
                Some(format) if format != LogFormat::Text => {
                    logging::start(format)?;
                    Ok(run::fatal(&error))
                }
                _ => Err(error),
            },
        },
        Command::Init(args) => init::run(&load()?, &args),
        Command::Check(args) => check::run(&load()?, &args),
        Command::Slot(args) => slot::run(&load()?, args),
        Command::Status(args) => status::run(&load()?, &args),
        Command::Event(args) => event::run(&load()?, &args),
        Command::Tail(args) => tail::run(&load()?, &args),
        Command::Audit(args) => audit::run(&load()?, &args),
        Command::Prune(args) => prune::run(&load()?, &args),
        Command::Replay(args) => replay::run(&load()?, &args),
        Command::Quarantine(args) => quarantine::run(&load()?, args),
        Command::Recover(args) => recover::run(&load()?, &args),
        Command::Explain { code } => explain::explain(code.as_deref()),
        Command::Completions { shell } => {
            args::print_completions(shell);
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// Returns the log format that the flags or the environment ask for. Used to report an error in the
/// settings, which could not be read.
fn asked_log_format(flags: &[(String, String)]) -> Option<LogFormat> {
    let flag = flags.iter().rfind(|(name, _)| name == "log_format");
    match flag {
        Some((_, value)) => LogFormat::named(value),
        None => LogFormat::named(std::env::var("POSTRIDER_LOG_FORMAT").ok()?.as_str()),
    }
}

/// Runs a sequential command on this thread.
fn block_on<T>(command: impl Future<Output = Result<T>>) -> Result<T> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| Error::new(Code::Internal, "cannot start a runtime").caused_by(e))?
        .block_on(command)
}
