//! The shape of the command line. One flag for each setting, made from the table of settings.

use std::path::PathBuf;

use clap::error::{ContextKind, ErrorKind};
use clap::{Arg, CommandFactory, FromArgMatches, Parser, Subcommand};

use super::emulator::EmulatorArgs;
use super::output;
use crate::error::{Code, Error, Report};
use crate::settings::{KEYS, Kind};

/// Delivers a PostgreSQL transactional outbox to Google Cloud Pub/Sub, in order per key, losing
/// nothing.
///
/// Start with `postrider demo`. To adopt it: `postrider init` shows the SQL it needs, `postrider
/// check` what is missing, `postrider run` relays. Settings come from flags, from the environment
/// (DATABASE_URL, PUBSUB_PROJECT_ID, POSTRIDER_...) or from a TOML file, in this order.
#[derive(Debug, Parser)]
#[command(
    name = "postrider",
    version,
    propagate_version = false,
    max_term_width = 100
)]
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
    /// See it work in half a minute: everything from a row to a message, and a kill -9
    ///
    /// Starts a throw-away PostgreSQL, a Pub/Sub emulator, services that write, the relay and a
    /// subscriber; kills the relay half-way, starts it again, and checks against the database that
    /// nothing was lost, swapped or delivered without a commit. Needs PostgreSQL's programs
    /// (`make demo` installs them) and nothing else. Leaves nothing behind.
    Demo(super::demo::Args),
    /// Show or apply the SQL that the relay needs, and create its slot
    ///
    /// Prints the statements with comments, to read or to feed to a migration tool; --apply runs
    /// them. Running it again changes nothing but what is missing. Publication first, slot last:
    /// every row committed after it is delivered. Needs the owner of the database (the relay's own
    /// role gets fewer rights) and says what is left to do; the exit code is 1 then.
    ///
    /// Examples:
    ///   postrider init > postrider.sql
    ///   postrider init --apply --relay-user shop_relay
    ///   postrider init --apply --payload bytea       (Protobuf, Avro)
    #[command(verbatim_doc_comment)]
    Init(super::init::Args),
    /// Check everything that the relay needs, in PostgreSQL and in Pub/Sub
    ///
    /// Changes nothing. Looks at server settings, rights, publication, tables, slot, the mapping of
    /// sampled events, credentials, endpoint, topics and subscriptions. Run it with the settings
    /// and as the role of the relay. Exit code: 0 ready, 1 with warnings, 2 with errors.
    ///
    /// Example: DATABASE_URL=postgres://shop_relay@db/shop PUBSUB_PROJECT_ID=shop postrider check
    #[command(verbatim_doc_comment)]
    Check(super::check::Args),
    /// Look at the replication slot; create, drop or advance it
    ///
    /// Without a command: show. --slot or POSTRIDER_SLOT names the slot.
    ///
    /// Examples:
    ///   postrider slot                               (what an operator asks at 3 a.m.)
    ///   postrider slot show --watch
    ///   postrider slot show --json --critical-bytes 2GB   (exit code: 0 ok, 1 warning, 2 critical,
    ///                                                      3 missing or unknown)
    #[command(verbatim_doc_comment)]
    Slot(super::slot::Args),
    /// Look at events that were set aside; release or discard them
    ///
    /// An event that can never be published is set aside in quarantine, and so are the later events
    /// of its ordering key (on_bad_event). Works while the relay runs, and while it does not.
    ///
    /// Examples:
    ///   postrider quarantine list
    ///   postrider quarantine release --key order-17
    #[command(verbatim_doc_comment)]
    Quarantine(super::quarantine::Args),
    /// Deliver from the tables what has no record: after the loss of the slot, or of a cluster
    ///
    /// A relay does this by itself when it finds its slot missing, lost or made anew; this command
    /// shows beforehand what that would send, asks for it, and lets a relay run on a database that
    /// was restored or migrated to another server. --slot or POSTRIDER_SLOT names the slot.
    ///
    /// Examples:
    ///   postrider recover --dry-run          (is it needed, and what would be sent?)
    ///   postrider recover --yes              (do it now, or at the relay's next start)
    ///   postrider recover --adopt --yes      (this server or database took the
    ///                                         place of the old one)
    #[command(verbatim_doc_comment)]
    Recover(super::recover::Args),
    Emulator(EmulatorArgs),
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
        let matches = command()
            .try_get_matches()
            .unwrap_or_else(|error| leave(&error));
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

/// Prints help or what is wrong, and leaves. A flag that is not known is an unknown setting.
fn leave(error: &clap::Error) -> ! {
    let context = |kind| error.get(kind).map(ToString::to_string);
    match (error.kind(), context(ContextKind::InvalidArg)) {
        (ErrorKind::UnknownArgument, Some(flag)) if flag.starts_with("--") => {
            let unknown = Error::new(Code::SettingUnknown, format!("unknown flag `{flag}`"));
            let unknown = match context(ContextKind::SuggestedArg) {
                Some(known) => unknown.hint(format!("did you mean `{known}`?")),
                None => unknown,
            };
            eprintln!("{}", Report(&unknown));
            std::process::exit(unknown.code().exit_status().into());
        }
        _ if error.use_stderr() => {
            eprint!("{}", without_secrets(&error.to_string(), std::env::args()));
            std::process::exit(error.exit_code());
        }
        _ => error.exit(),
    }
}

/// clap repeats an argument that it did not expect, which may be a URL with a password, or a part of
/// one.
fn without_secrets(text: &str, arguments: impl Iterator<Item = String>) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_".contains(c);
    let hidden = arguments
        .skip(1)
        .filter(|argument| !argument.is_empty() && !argument.chars().all(is_plain));
    hidden.fold(text.to_owned(), |text, argument| {
        // clap escapes nothing.
        text.replace(&argument, "...")
    })
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
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command(), "postrider", &mut script);
    output::write(&String::from_utf8_lossy(&script));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        command().debug_assert();
    }

    #[test]
    fn an_argument_that_may_be_a_secret_is_not_repeated() {
        let line = ["postrider", "run", "postgres://u:hunter2@h/d"];
        let error = command()
            .try_get_matches_from(line)
            .unwrap_err()
            .to_string();
        assert!(error.contains("hunter2"));
        let shown = without_secrets(&error, line.map(str::to_owned).into_iter());
        assert!(
            !shown.contains("hunter2") && shown.contains("unexpected argument"),
            "{shown}"
        );
    }

    #[test]
    fn a_setting_may_stand_before_or_after_the_command() {
        for line in [
            ["postrider", "--slot", "a", "run"],
            ["postrider", "run", "--slot", "a"],
        ] {
            let matches = command().try_get_matches_from(line).unwrap();
            assert_eq!(
                matches.get_one::<String>("slot").map(String::as_str),
                Some("a")
            );
        }
    }
}
