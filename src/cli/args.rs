//! The shape of the command line. One flag for each setting, made from the table of settings.

use std::path::PathBuf;

use clap::{Arg, CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::error::Code;
use crate::settings::{KEYS, Kind};

/// Delivers a PostgreSQL transactional outbox to Google Cloud Pub/Sub, in order per key, losing
/// nothing.
///
/// Start with `postrider demo`. To adopt it: `postrider init` shows the SQL it needs, `postrider
/// check` what is missing, `postrider run` relays. Settings come from flags, from the environment
/// (DATABASE_URL, PUBSUB_PROJECT_ID, POSTRIDER_...) or from a TOML file, in this order.
#[derive(Debug, Parser)]
#[command(name = "postrider", version, propagate_version = false, max_term_width = 100)]
pub struct Cli {
    /// TOML file with settings
    #[arg(long, value_name = "FILE", global = true, env = "POSTRIDER_CONFIG")]
    pub(super) config: Option<PathBuf>,
    #[command(subcommand)]
    pub(super) command: Command,
}

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Relay events until told to stop
    ///
    /// Reads the slot, publishes each event, records it in outbox.dispatch, and only then confirms
    /// its position. Starts from the environment alone. SIGTERM ends it in good order; a second
    /// one at once. Serves /metrics, /livez, /readyz and /status.
    Run,
    /// Say what an error code means and what to do about it
    Explain {
        /// A code such as `slot-missing`; none lists them all
        code: Option<Code>,
    },
    /// Print completions for a shell
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
}

impl Cli {
    /// Reads the arguments of the process; the second part is the settings given as flags.
    /// Prints help and leaves the process when they cannot be read.
    pub fn from_process() -> (Self, Vec<(String, String)>) {
        let matches = command().get_matches();
        let cli = match Cli::from_arg_matches(&matches) {
            Ok(cli) => cli,
            Err(error) => error.exit(),
        };
        let flags = KEYS.iter().filter_map(|key| {
            let text = matches.get_one::<String>(key.name)?;
            Some((key.name.to_owned(), text.clone()))
        });
        (cli, flags.collect())
    }
}

/// The whole command with the flags of the settings.
pub(super) fn command() -> clap::Command {
    KEYS.iter().fold(Cli::command(), |command, key| {
        let value_name = match key.kind {
            Kind::Text => "TEXT",
            Kind::Number(..) => "N",
            Kind::Switch => "true|false",
        };
        let bound = match key.kind {
            Kind::Number(min, max) => format!(", {min} to {max}"),
            Kind::Text | Kind::Switch => String::new(),
        };
        let default = match key.default {
            "" => String::new(),
            default => format!(", default {default}"),
        };
        let help = format!("{} [{}{bound}{default}]", key.reason, key.variable());
        command.arg(
            Arg::new(key.name)
                .long(key.flag())
                .value_name(value_name)
                .help(help)
                .help_heading("Settings")
                .hide_short_help(true)
                .global(true),
        )
    })
}

pub(super) fn print_completions(shell: clap_complete::Shell) {
    clap_complete::generate(shell, &mut command(), "postrider", &mut std::io::stdout());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        command().debug_assert();
    }

    #[test]
    fn a_setting_may_stand_before_or_after_the_command() {
        for line in [["postrider", "--slot", "a", "run"], ["postrider", "run", "--slot", "a"]] {
            let matches = command().try_get_matches_from(line).unwrap();
            assert_eq!(matches.get_one::<String>("slot").map(String::as_str), Some("a"));
        }
    }
}
