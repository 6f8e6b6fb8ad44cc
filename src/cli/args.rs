//! The shape of the command line. One flag for each setting, made from the table of settings.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::OnceLock;

use clap::error::{ContextKind, ErrorKind};
use clap::{Arg, ArgMatches, CommandFactory, FromArgMatches, Parser, Subcommand};

use super::output;
use crate::error::{Code, Error, Report};
use crate::settings::{KEYS, SettingKind};

/// Version and, where the build has recorded it, commit: releases set `POSTRIDER_COMMIT` when they are built.
pub(super) fn version() -> &'static str {
    match option_env!("POSTRIDER_COMMIT") {
        None | Some("") => env!("CARGO_PKG_VERSION"),
        Some(commit) => {
            static VERSION: OnceLock<String> = OnceLock::new();
            VERSION.get_or_init(|| format!("{} ({commit})", env!("CARGO_PKG_VERSION")))
        }
    }
}

/// Delivers a PostgreSQL transactional outbox to Google Cloud Pub/Sub, in order per key, losing
/// nothing.
///
/// `postrider init` shows the SQL that it needs, `postrider check` lists missing pieces, `postrider run`
/// relays. Settings come from flags, from the environment (DATABASE_URL, PUBSUB_PROJECT_ID,
/// POSTRIDER_...) or from a TOML file; the first of these wins.
#[derive(Debug, Parser)]
#[command(
    name = "postrider",
    version = version(),
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
    /// Relay events until a signal stops it
    ///
    /// Reads the slot, publishes each event, records it in outbox.dispatch, and only then confirms
    /// its position. Needs no settings file: environment variables are enough. SIGTERM starts a
    /// graceful shutdown; a second one ends the process at once. Serves /metrics, /livez, /readyz,
    /// /status and a page at /.
    Run,
    /// Show or apply the SQL that the relay needs, and create its slot
    ///
    /// Prints the statements with comments, to read or to feed to a migration tool; --apply runs
    /// them. Running it again only adds missing objects. The slot is created last: every row
    /// committed after that is delivered. Run it as the owner of the database (the relay's own role
    /// gets fewer rights). If steps are left to do, it lists them and exits with code 1.
    ///
    /// Examples:
    ///   postrider init > postrider.sql
    ///   postrider init --apply --relay-user shop_relay
    ///   postrider init --apply --payload bytea       (Protobuf, Avro)
    #[command(verbatim_doc_comment)]
    Init(super::init::InitArgs),
    /// Check everything that the relay needs, in PostgreSQL and in Pub/Sub
    ///
    /// Changes nothing. Looks at server settings, rights, publication, tables, slot, the mapping of
    /// sampled events, credentials, endpoint, topics and subscriptions. Run it with the settings and
    /// the database role of the relay. Lists the problems; --all also lists the checks that passed. Exit
    /// code: 0 ready, 1 with warnings, 2 with errors.
    ///
    /// Example: DATABASE_URL=postgres://shop_relay@db/shop PUBSUB_PROJECT_ID=shop postrider check
    #[command(verbatim_doc_comment)]
    Check(super::check::CheckArgs),
    /// Show the whole relay on one screen: is it delivering, how far behind is it, what holds it up
    ///
    /// Reads the database only, so it works from any machine, and also while the relay is down. The
    /// relay itself says in outbox.relay what holds it up, such as a topic that is missing. Exit
    /// code: 0 ok, 1 warning, 2 critical, 3 missing or unknown.
    ///
    /// Examples:
    ///   postrider status
    ///   postrider status --watch       (a live view with graphs; q leaves it)
    ///   postrider status --json
    #[command(verbatim_doc_comment)]
    Status(super::status::StatusArgs),
    /// Look at the replication slot; create, drop or advance it
    ///
    /// Without a command, it shows the slot that --slot or POSTRIDER_SLOT names.
    ///
    /// Examples:
    ///   postrider slot                               (health, lag and what to do)
    ///   postrider slot show --watch
    ///   postrider slot show --json --critical-bytes 2GB   (exit code: 0 ok, 1 warning, 2 critical,
    ///                                                      3 missing or unknown)
    #[command(verbatim_doc_comment)]
    Slot(super::slot::SlotArgs),
    /// Show what has become of an event: from its row to its record and its Pub/Sub message
    ///
    /// Takes the id of its row, its uuid, or `schema.table:id`, and works while the relay runs or is
    /// down. With --key or --since it lists the newest events instead. Exit code: 0 found, 1 nothing
    /// found.
    ///
    /// Examples:
    ///   postrider event 0190163d-8694-739b-aea5-966c26f8ad91
    ///   postrider event 4711                        (a numbered id)
    ///   postrider event --key order-17 --limit 5
    ///   postrider event --since 10min --topic order.events --json
    #[command(verbatim_doc_comment)]
    Event(super::event::EventArgs),
    /// Show events as they are published, until interrupted
    ///
    /// Follows outbox.dispatch, so it needs no subscription and works from any machine that reaches the
    /// database. Does not show rows that a recovery or the auditor publishes from their table. With
    /// dispatch = exceptions only events that were quarantined appear, because other published events
    /// have no record.
    ///
    /// Examples:
    ///   postrider tail
    ///   postrider tail --topic order.events --message        (with attributes and data)
    ///   postrider tail --since 10min --json | jq .message_id
    #[command(verbatim_doc_comment)]
    Tail(super::tail::TailArgs),
    /// Compare the outbox tables with outbox.dispatch: is there an outcome for every event
    ///
    /// Changes nothing. Reads the tables in short statements, so it may run at any time, also while
    /// the relay is down. Exit code: 0 complete, 1 events wait or are in quarantine, 2 the slot has
    /// passed events that have no record.
    ///
    /// Examples:
    ///   postrider audit
    ///   postrider audit --since 2d --json
    #[command(verbatim_doc_comment)]
    Audit(super::audit::AuditArgs),
    /// Delete old events that have a final outcome, and old records that nobody needs
    ///
    /// Never deletes an event that waits or is in quarantine, nor a record that the relay may need
    /// after a crash. Deletes in small steps while services and the relay continue; run it again if
    /// it was stopped. Needs DELETE on the tables: run it as their owner, with the settings of the
    /// relay (DATABASE_URL with another user). Exit code: 0 done, 1 some rows can go only later.
    ///
    /// Examples:
    ///   postrider prune --older-than 30d --dry-run
    ///   postrider prune --older-than 30d --yes
    ///   postrider prune --older-than 7d --yes --chunk 1000 --pause 500ms
    #[command(verbatim_doc_comment)]
    Prune(super::prune::PruneArgs),
    /// List, release or discard quarantined events
    ///
    /// The relay puts an event that can never be published into quarantine, and the later events of
    /// its ordering key behind it (on_bad_event). These commands work whether or not the relay runs.
    ///
    /// Examples:
    ///   postrider quarantine list
    ///   postrider quarantine release --key order-17
    #[command(verbatim_doc_comment)]
    Quarantine(super::quarantine::QuarantineArgs),
    /// Publish unrecorded rows from the tables, after the slot or the server was lost
    ///
    /// A relay recovers by itself when its slot is missing, lost or recreated. This command previews
    /// a recovery, requests one, and adopts a database that was restored or migrated to another
    /// server. --slot or POSTRIDER_SLOT names the slot.
    ///
    /// Examples:
    ///   postrider recover --dry-run          (is it needed, and which rows would be published?)
    ///   postrider recover --yes              (do it now, or at the relay's next start)
    ///   postrider recover --adopt --yes      (this server or database replaces
    ///                                         the old one)
    #[command(verbatim_doc_comment)]
    Recover(super::recover::RecoverArgs),
    /// Explain a code of an error or of a check, and what to do about it
    Explain {
        /// A code such as `slot-missing`; without one, all are listed
        code: Option<String>,
    },
    /// Print completions for a shell
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
}

impl Cli {
    /// Reads the arguments of the process, and the settings given as flags. Prints help and exits
    /// when the arguments are invalid.
    pub fn from_process() -> (Self, Vec<(String, String)>) {
        let command = command();
        let matches = command.clone().try_get_matches();
        let matches = matches.unwrap_or_else(|error| leave(&error));
        let cli = match Cli::from_arg_matches(&matches) {
            Ok(cli) => cli,
            Err(error) => error.exit(),
        };
        (cli, settings(&command, &matches))
    }
}

/// The settings that are given as flags.
fn settings(command: &clap::Command, matches: &ArgMatches) -> Vec<(String, String)> {
    let keys = KEYS
        .iter()
        .filter(|key| !is_of_a_command(command, matches, key.name));
    let flags = keys.filter_map(|key| {
        let text = matches.get_one::<String>(key.name)?;
        Some((key.name.to_owned(), text.clone()))
    });
    flags.collect()
}

/// Whether the command that was given has an argument of its own under this name, as `quarantine list`
/// has `--topic`. Then it is not the setting of that name.
fn is_of_a_command(command: &clap::Command, matches: &ArgMatches, name: &str) -> bool {
    let Some((subcommand, matches)) = matches.subcommand() else {
        return false;
    };
    command.find_subcommand(subcommand).is_some_and(|command| {
        command.get_arguments().any(|own| own.get_id() == name)
            || is_of_a_command(command, matches, name)
    })
}

/// Prints help or the error, and exits. An unknown flag is reported as an unknown setting.
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
            eprint!(
                "{}",
                without_secrets(&error.to_string(), std::env::args_os())
            );
            std::process::exit(error.exit_code());
        }
        _ => error.exit(),
    }
}

/// Hides arguments in clap's error text: clap repeats an unexpected argument, which may be a URL with a
/// password or a part of one. Arguments may be any bytes.
fn without_secrets(text: &str, arguments: impl Iterator<Item = OsString>) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_".contains(c);
    let hidden = arguments
        .skip(1)
        .map(|argument| argument.to_string_lossy().into_owned())
        .filter(|argument| !argument.is_empty() && !argument.chars().all(is_plain));
    hidden.fold(text.to_owned(), |text, argument| {
        // clap escapes nothing.
        text.replace(&argument, "...")
    })
}

/// The command line, with one flag per setting.
pub(super) fn command() -> clap::Command {
    KEYS.iter().fold(Cli::command(), |command, key| {
        let value_name = match key.kind {
            SettingKind::Text => "TEXT",
            SettingKind::Number(..) => "N",
            SettingKind::Switch => "true|false",
        };
        let bound = match key.kind {
            SettingKind::Number(min, max) => format!(", {min} to {max}"),
            SettingKind::Text | SettingKind::Switch => String::new(),
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
        let shown = without_secrets(&error, line.map(OsString::from).into_iter());
        assert!(
            !shown.contains("hunter2") && shown.contains("unexpected argument"),
            "{shown}"
        );
    }

    #[test]
    fn a_flag_of_a_command_is_not_the_setting_of_the_same_name() {
        let set = |line: &[&str]| {
            let command = command();
            let matches = command.clone().try_get_matches_from(line).unwrap();
            settings(&command, &matches)
        };
        for action in ["list", "release", "discard"] {
            let line = [
                "postrider",
                "quarantine",
                action,
                "--key",
                "k",
                "--topic",
                "orders",
            ];
            assert_eq!(set(&line), [], "{action}");
            let with_slot = [&line[..], &["--slot", "a"]].concat();
            assert_eq!(set(&with_slot), [("slot".to_owned(), "a".to_owned())]);
        }
        let line = ["postrider", "run", "--topic", "orders"];
        assert_eq!(set(&line), [("topic".to_owned(), "orders".to_owned())]);
    }

    #[test]
    fn a_setting_may_come_before_or_after_the_command() {
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
