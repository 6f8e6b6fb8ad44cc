//! The commands of `postrider`, one file or folder each. A command parses its arguments, calls
//! `ops`, prints the result, and chooses the exit code. Only the command `init` contains SQL.
//!
//! `args` defines the command line. `setting_flags` adds a flag for each setting that a command uses, from
//! the table of settings ([`crate::settings::KEYS`]).

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
mod report;
mod run;
mod setting_flags;
mod signals;
mod slot;
mod status;
mod tail;
mod wrap;

pub use args::{Cli, command};

use std::fs::File;
use std::process::ExitCode;

use crate::error::{Error, Result, is_open_files_limit};
use crate::ops::capture;
use crate::ops::rights::{self, Purpose};
use crate::settings::{Settings, environment};
use args::Command;
use report::ReportForm;

/// Runs the command that the arguments of the process name.
pub fn main() -> ExitCode {
    // Installs the TLS provider for libraries that use the process's default provider. An error means that a
    // provider is already installed, so it can be ignored.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let (cli, flags) = Cli::from_process();
    let load = || {
        let environment = environment(std::env::vars_os())?;
        Settings::load(cli.config.as_deref(), &environment, &flags)
    };
    let purpose = purpose(&cli.command);
    let ended = dispatch(cli.command, load);
    match ended.map_err(|error| ended_with(error, load, purpose)) {
        Ok(code) => code,
        Err(error) => ReportForm::of_process().report(&error),
    }
}

/// The purpose for which a command needs privileges. If a privilege is missing, the error names the GRANT for
/// this purpose.
#[derive(Debug, Clone, Copy)]
enum CommandPurpose {
    /// The command `run`. The relay has already put the GRANT into the hint of the error.
    Relay,
    Command(Purpose),
    /// A command whose errors about privileges already say what to do.
    Other,
}

fn purpose(command: &Command) -> CommandPurpose {
    CommandPurpose::Command(match command {
        Command::Run => return CommandPurpose::Relay,
        Command::Init(_) | Command::Explain { .. } | Command::Completions { .. } => {
            return CommandPurpose::Other;
        }
        Command::Check(_)
        | Command::Slot(_)
        | Command::Status(_)
        | Command::Event(_)
        | Command::Tail(_)
        | Command::Audit(_) => Purpose::Read,
        Command::Quarantine(args) => args.purpose(),
        Command::Replay(_) => Purpose::Replay,
        Command::Recover(_) => Purpose::Recover,
        Command::Prune(_) => Purpose::Prune,
    })
}

/// Adapts the hint of an error to a command: unlike the relay, a command does not retry. If a privilege is missing,
/// the hint names the GRANT.
async fn for_command(error: Error, settings: &Settings, purpose: Purpose) -> Error {
    rights::named(error, settings, purpose).await.for_command()
}

/// Adapts the hint of the error that ends `command`. Leaves an error of `run` unchanged.
fn ended_with(error: Error, load: impl Fn() -> Result<Settings>, command: CommandPurpose) -> Error {
    match (load(), command) {
        (_, CommandPurpose::Relay) => error,
        (Ok(settings), CommandPurpose::Command(purpose)) => {
            block_on(async { Ok(for_command(error, &settings, purpose).await) })
                .unwrap_or_else(|error| error)
        }
        _ => error.for_command(),
    }
}

fn dispatch(command: Command, load: impl Fn() -> Result<Settings>) -> Result<ExitCode> {
    match command {
        Command::Run => run::run(load()?),
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

/// Minimum number of files that a command must be able to open at once.
const FILES: usize = 16;

/// Checks that the process can open this number of files. Without this check, the runtime would panic instead of
/// returning an error.
fn require_files(count: usize) -> Result<()> {
    let opened = (0..count).map(|_| File::open("/dev/null"));
    let opened: std::io::Result<Vec<File>> = opened.collect();
    match opened {
        Err(error) if is_open_files_limit(&error) => {
            let what = format!("this process cannot open the {count} files that it needs");
            Err(Error::of_system(what, error))
        }
        // If /dev/null cannot be opened for another reason, the attempt says nothing about the limit, so continue.
        Ok(_) | Err(_) => Ok(()),
    }
}

/// Runs a command to its end on this thread.
fn block_on<T>(command: impl Future<Output = Result<T>>) -> Result<T> {
    require_files(FILES)?;
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| Error::of_system("cannot start a runtime", e))?
        .block_on(command)
}
