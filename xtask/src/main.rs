//! Automation of the repository: `cargo xtask <command>`.
//!
//! All checks start here: `.ci/run` calls `make test`, which installs packages that are missing and runs
//! `cargo xtask ci`. Programs with many dependencies are separate packages (such as `torture/` and `bench/`),
//! which xtask starts.

mod ci;
mod deploy;
mod forward;
mod instructions;
mod man;
mod pg_matrix;
mod settings_doc;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use forward::Forwarded;

#[derive(Debug, Parser)]
#[command(name = "cargo xtask", about = "Automation of the repository")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run everything that must pass before a change is merged: formatting, lints, documentation,
    /// licences, instruction counts, tests, files of deploy/, website, schedules of faults
    Ci,
    /// Drain a backlog and compare with pg_recvlogical: events per second, ratio, peak memory
    #[command(disable_help_flag = true)]
    Bench(Forwarded),
    /// Run seeded schedules of crashes, outages and faults against the relay, and judge each one
    #[command(disable_help_flag = true)]
    Torture(Forwarded),
    /// Count the instructions of the hot path per event, and fail when they have grown
    Instructions(instructions::InstructionsArgs),
    /// Build the documents as a website with search in target/book, and check its links
    #[command(disable_help_flag = true)]
    Book(Forwarded),
    /// Check the files of deploy/ with the tool for each kind of file, as far as the tools are installed
    Deploy(deploy::DeployArgs),
    /// Measure the relay's peak memory under loads that would make a careless relay grow without
    /// limit
    #[command(disable_help_flag = true)]
    Memory(Forwarded),
    /// Write the manual pages of the commands to target/man
    Man,
    /// Run the suites that need a server on every supported major version of PostgreSQL
    PgMatrix(pg_matrix::PgMatrixArgs),
    /// Write docs/reference/settings.md and settings.schema.json from the table of settings in
    /// src/settings/keys.rs
    SettingsDoc {
        /// Only check whether the files are up to date
        #[arg(long)]
        check: bool,
    },
}

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Ci => ci::run(),
        Command::Bench(args) => forward::run("bench", &["bench"], &args),
        Command::Torture(args) => forward::run("torture", &[], &args),
        Command::Instructions(args) => instructions::run(&args),
        Command::Book(args) => forward::run("book", &[], &args),
        Command::Deploy(args) => deploy::run(&args),
        Command::Memory(args) => forward::run("bench", &["memory"], &args),
        Command::Man => man::run(),
        Command::PgMatrix(args) => pg_matrix::run(&args),
        Command::SettingsDoc { check } => settings_doc::run(check),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("\nxtask: {error}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// For a command that another package implements, checks only the command's name and not its flags.
    #[test]
    fn every_xtask_command_on_the_pages_is_accepted() {
        let (mut folders, mut accepted) = (vec![xtask::step::root().join("docs")], 0);
        let mut pages = ["README.md", "CONTRIBUTING.md"]
            .map(|name| xtask::step::root().join(name))
            .to_vec();
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).expect("a folder") {
                let path = entry.expect("an entry").path();
                if path.is_dir() {
                    folders.push(path);
                } else if path.extension().is_some_and(|extension| extension == "md") {
                    pages.push(path);
                }
            }
        }
        for page in pages
            .iter()
            .filter(|page| !page.iter().any(|part| part == "adr"))
        {
            let text = std::fs::read_to_string(page).expect("a page");
            for command in text.split("cargo xtask ").skip(1) {
                let end = command
                    .find(['`', '\n', '#', ')', '&'])
                    .unwrap_or(command.len());
                let words = ["cargo xtask"]
                    .into_iter()
                    .chain(command[..end].split_whitespace());
                if let Err(error) = Cli::try_parse_from(words) {
                    panic!("{}: {error}", page.display());
                }
                accepted += 1;
            }
        }
        assert!(accepted > 25, "only {accepted} commands were recognised");
    }
}
