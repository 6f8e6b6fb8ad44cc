//! Defines the commands and their own arguments. `setting_flags` adds a flag for each setting that a
//! command uses.
use std::path::PathBuf;
use std::sync::OnceLock;

use clap::error::{ContextKind, ErrorKind};
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

use super::raw_args::{without_help_of_help, without_secrets};
use super::report::{self, ReportForm, wrong_usage};
use super::{output, setting_flags, wrap};
use crate::build_info;
use crate::error::{Code, Error};

/// Returns the version. If the build recorded the commit and its date, adds them:
/// `0.1.0 (1f2e3d4, 2026-11-21)`.
fn version() -> &'static str {
    static VERSION: OnceLock<String> = OnceLock::new();
    VERSION.get_or_init(|| {
        let known = [build_info::commit(), build_info::commit_date()];
        let known: Vec<&str> = known.into_iter().flatten().collect();
        match &known[..] {
            [] => build_info::VERSION.to_owned(),
            known => format!("{} ({})", build_info::VERSION, known.join(", ")),
        }
    })
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
    /// Relay events until SIGTERM or SIGINT
    ///
    /// Reads the slot, publishes each event, records it in outbox.dispatch (with dispatch = full),
    /// and only then confirms the slot's position. Needs no settings file: environment variables are
    /// enough. The first SIGTERM or SIGINT starts a graceful shutdown; a second signal ends the
    /// process at once. Serves /metrics, /livez, /readyz, /status and a page at /.
    Run,
    /// Show or apply the SQL that the relay needs, and create its slot
    ///
    /// Prints the statements with comments, to read or to feed to a migration tool; --apply runs
    /// them. Running it again only adds missing objects. The slot is created last: every row
    /// committed after that is delivered. Run it as the owner of the database (the relay's own role
    /// gets fewer rights). If steps are left to do, it lists them and exits with code 1.
    #[command(after_long_help = "\
Examples:
  postrider init > postrider.sql
  postrider init --apply --relay-user shop_relay
  postrider init --apply --payload bytea  # Protobuf, Avro")]
    Init(super::init::InitArgs),
    /// Check everything that the relay needs, in PostgreSQL and in Pub/Sub
    ///
    /// Changes nothing. Checks server settings, rights, publication, tables, slot, the mapping of
    /// sampled events, credentials, endpoint, topics and subscriptions. Run it with the settings and
    /// the database role of the relay. Lists the problems; --all also lists the checks that passed. Exit
    /// code: 0 ready, 1 with warnings, 2 with errors.
    #[command(after_long_help = "\
Example:
  export DATABASE_URL=postgres://shop_relay@db/shop
  export PUBSUB_PROJECT_ID=shop
  postrider check")]
    Check(super::check::CheckArgs),
    /// Show the whole relay on one screen: is it delivering, how far behind is it, what holds it up
    ///
    /// Reads only the database, so it works from any machine, and also while the relay is down. The
    /// relay writes to outbox.relay what holds it up, such as a missing topic. Exit code: 0 ok,
    /// 1 warning, 2 critical, 3 missing or unknown.
    #[command(after_long_help = "\
Examples:
  postrider status
  postrider status --watch  # live, with graphs; q leaves it
  postrider status --json")]
    Status(super::status::StatusArgs),
    /// Show the replication slot; create, drop or advance it
    ///
    /// Without a command, it shows the slot that --slot or POSTRIDER_SLOT names.
    #[command(after_long_help = "\
Examples:
  postrider slot           # health, lag and what to do
  postrider slot show --watch
  postrider slot show --json --critical-bytes 2GB

Exit code: 0 ok, 1 warning, 2 critical, 3 no slot.")]
    Slot(super::slot::SlotArgs),
    /// Show what has become of an event: from its row to its record and its Pub/Sub message
    ///
    /// Takes the id of its row, its uuid, or `schema.table:id`, and works while the relay runs or is
    /// down. With --key or --since it lists the newest events instead. Exit code: 0 found, 1 nothing
    /// found.
    #[command(after_long_help = "\
Examples:
  postrider event 0190163d-8694-739b-aea5-966c26f8ad91
  postrider event 4711  # a numbered id
  postrider event --key order-17 --limit 5
  postrider event --since 10min --topic order.events --json")]
    Event(super::event::EventArgs),
    /// Show events as they are published, until interrupted
    ///
    /// Follows outbox.dispatch, so it needs no subscription and works from any machine that reaches
    /// the database. Does not show rows that a recovery or the auditor publishes from their table.
    /// With dispatch = exceptions published events get no record: of the new events, only those that
    /// were quarantined appear.
    #[command(after_long_help = "\
Examples:
  postrider tail
  postrider tail --topic order.events
  postrider tail --message  # with attributes and data
  postrider tail --since 10min --json | jq .message_id")]
    Tail(super::tail::TailArgs),
    /// Compare the outbox tables with outbox.dispatch: is there an outcome for every event
    ///
    /// Changes nothing. Reads the tables in short statements, so it may run at any time, also while
    /// the relay is down. Exit code: 0 complete, 1 events wait or are in quarantine, 2 the slot has
    /// passed events that have no record.
    #[command(after_long_help = "\
Examples:
  postrider audit
  postrider audit --since 2d --json")]
    Audit(super::audit::AuditArgs),
    /// Delete old events that have a final outcome, and old records that nobody needs
    ///
    /// Never deletes an event that waits or is in quarantine, nor a record that the relay may need
    /// after a crash. Deletes in small steps while services and the relay continue; run it again if
    /// it was stopped. Needs DELETE on the tables: run it as their owner, with the settings of the
    /// relay (DATABASE_URL with another user). Exit code: 0 done, 1 some rows must stay for now.
    #[command(after_long_help = "\
Examples:
  postrider prune --older-than 30d --dry-run
  postrider prune --older-than 30d --yes
  postrider prune --older-than 7d --yes --pause 500ms")]
    Prune(super::prune::PruneArgs),
    /// Publish events again
    ///
    /// Selects published events, and lets the running relay publish them again: each key in order,
    /// and never mixed with new events of the same key. Their rows must still be in the outbox. The
    /// messages carry the name of the replay in the attribute `replay`, and their old `event_id`, so
    /// consumers that deduplicate must let them through. Exit code: 0 all are published, 1 some are
    /// not.
    #[command(after_long_help = "\
Examples:
  postrider replay --yes \\
    0190163d-8694-739b-aea5-966c26f8ad91
  postrider replay --topic order.events --since 2h --dry-run
  postrider replay --key order-17 --yes --name after-the-fix
  postrider replay --yes --rate 200 \\
    --since 2026-11-27T08:00:00Z \\
    --until 2026-11-27T09:00:00Z
  postrider replay --resume after-the-fix")]
    Replay(super::replay::ReplayArgs),
    /// List, release or discard quarantined events
    ///
    /// The relay puts an event that can never be published into quarantine, and the later events of
    /// its ordering key behind it (on_bad_event). These commands work whether or not the relay runs.
    #[command(after_long_help = "\
Examples:
  postrider quarantine list
  postrider quarantine release --key order-17")]
    Quarantine(super::quarantine::QuarantineArgs),
    /// Publish unrecorded rows from the tables, after the slot or the server was lost
    ///
    /// A relay recovers automatically when its slot is missing, lost or recreated. This command previews
    /// a recovery, requests one, and adopts a database that was restored or migrated to another
    /// server. --slot or POSTRIDER_SLOT names the slot.
    #[command(after_long_help = "\
Examples:
  postrider recover --dry-run  # what would it publish?
  postrider recover --yes  # now, or at the next start
  postrider recover --adopt --yes  # on a new server")]
    Recover(super::recover::RecoverArgs),
    /// Explain an error code or a check's code, and what to do
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
    /// Reads the arguments of the process, and the settings given as flags. If the arguments are
    /// invalid, prints the error and exits.
    pub fn from_process() -> (Self, Vec<(String, String)>) {
        let arguments = without_help_of_help(Cli::command(), std::env::args_os());
        let matches = command().try_get_matches_from(arguments);
        let matches = matches.unwrap_or_else(|error| leave(&error));
        let cli = match Cli::from_arg_matches(&matches) {
            Ok(cli) => cli,
            Err(error) => error.exit(),
        };
        (cli, setting_flags::given(&Cli::command(), &matches))
    }
}

/// Prints the help or the error, and exits. Reports an unknown flag with the code `setting-unknown`.
fn leave(error: &clap::Error) -> ! {
    let context = |kind| error.get(kind).map(ToString::to_string);
    match (error.kind(), context(ContextKind::InvalidArg)) {
        (ErrorKind::UnknownArgument, Some(flag)) if flag.starts_with("--") => {
            let arguments =
                std::env::args_os().map(|argument| argument.to_string_lossy().into_owned());
            let suggested = context(ContextKind::SuggestedArg);
            let unknown = unknown_flag(&flag, suggested.as_deref(), arguments);
            ReportForm::of_process().report(&unknown);
            std::process::exit(unknown.code().exit_status().into());
        }
        _ if error.use_stderr() && ReportForm::of_process() != ReportForm::Text => {
            let text = without_secrets(&error.to_string(), std::env::args_os());
            ReportForm::of_process().report(&wrong_usage(&text));
            std::process::exit(error.exit_code());
        }
        _ if error.use_stderr() => {
            let text = without_secrets(&error.to_string(), std::env::args_os());
            report::write_part(&wrap::lines(&text, wrap::error_width()));
            std::process::exit(error.exit_code());
        }
        _ => error.exit(),
    }
}

/// Returns the error for a flag that the command does not have.
fn unknown_flag(
    flag: &str,
    suggested: Option<&str>,
    mut arguments: impl Iterator<Item = String>,
) -> Error {
    let command = Cli::command();
    let is_command = |name: &String| command.find_subcommand(name).is_some();
    let follows_a_command = arguments
        .by_ref()
        .skip(1)
        .take_while(|argument| !argument.starts_with(flag))
        .any(|argument| is_command(&argument));
    if !setting_flags::is_setting(flag) {
        // `flag` may contain more than the name of a flag, even a secret. So show it only if it is plain.
        let is_plain = flag
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || "-_".contains(c));
        let shown = if is_plain { flag } else { "--..." };
        let unknown = Error::new(Code::SettingUnknown, format!("unknown flag `{shown}`"));
        return match suggested {
            Some(known) => unknown.hint(format!("did you mean `{known}`?")),
            None => unknown.hint("`--help` after the command lists its flags"),
        };
    }
    if follows_a_command {
        let what = format!("this command does not use the setting `{flag}`");
        return Error::new(Code::SettingUnknown, what).hint(
            "write it after the last word of the command, or leave it out; `--help` after the command lists \
             the settings that it uses. A settings file and the environment may hold settings for all commands",
        );
    }
    let what = format!("`{flag}` is before the command");
    Error::new(Code::SettingUnknown, what).hint(format!(
        "write it after the command: `postrider run {flag} ...`"
    ))
}

/// Builds the command line, with the flags of the settings.
pub fn command() -> clap::Command {
    let without_settings = ["explain", "completions"];
    without_settings
        .iter()
        .fold(setting_flags::added(Cli::command()), |command, name| {
            command.mut_subcommand(name, |command| command.arg(setting_flags::hidden_config()))
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

    fn refused(line: &[&str], flag: &str) -> (String, String) {
        let matched = command().try_get_matches_from(line);
        let kind = matched.unwrap_err().kind();
        assert_eq!(kind, ErrorKind::UnknownArgument, "{line:?}");
        let error = unknown_flag(flag, None, line.iter().map(ToString::to_string));
        (error.what().to_owned(), error.hint_text().to_owned())
    }

    #[test]
    fn a_setting_that_has_no_effect_is_refused_with_the_reason() {
        let (what, _) = refused(
            &["postrider", "status", "--in-flight-mib", "8"],
            "--in-flight-mib",
        );
        assert_eq!(
            what,
            "this command does not use the setting `--in-flight-mib`"
        );
        let (what, _) = refused(&["postrider", "explain", "--slot=a"], "--slot");
        assert_eq!(what, "this command does not use the setting `--slot`");
        let (what, hint) = refused(&["postrider", "--slot", "a", "run"], "--slot");
        assert_eq!(what, "`--slot` is before the command");
        assert!(hint.contains("postrider run --slot"), "{hint}");
        let (what, _) = refused(&["postrider", "run", "--colour"], "--colour");
        assert_eq!(what, "unknown flag `--colour`");
    }
}
