//! Adds a flag for each setting that a command uses, from the table of settings.
//!
//! A command refuses flags of settings that it does not use: `postrider status --in-flight-mib 8` is an
//! error. But it ignores such settings in the settings file and in the environment, because all
//! commands share the file and the environment.

use clap::builder::{PossibleValue, StringValueParser, TypedValueParser, ValueParser};
use clap::{Arg, ArgMatches, Command};

use crate::settings::{KEYS, SettingKey, SettingKind};

/// The settings that every command with a database connection uses.
const DATABASE: &[&str] = &["database_url", "password_command"];

/// The settings of a command that reads outbox rows and their records.
const EVENTS: &[&str] = &[
    "slot",
    "dispatch",
    "table",
    "topic",
    "ordering",
    "envelope",
    "time_zone",
];

/// The settings of a command that creates a slot.
const NEW_SLOT: &[&str] = &["slot", "publication", "slot_failover", "start", "table"];

/// The setting that tells `init` whether to grant the relay the right to delete.
const PRUNING: &[&str] = &["prune_after"];

/// Returns the settings that a command uses, in groups; `None` if it uses all settings.
fn used_by(path: &[&str]) -> Option<Vec<&'static [&'static str]>> {
    Some(match path {
        ["run" | "check"] => return None,
        ["init"] => vec![DATABASE, NEW_SLOT, PRUNING],
        ["slot", "create"] => vec![DATABASE, NEW_SLOT],
        ["status" | "slot"] | ["slot", "show"] => vec![DATABASE, EVENTS, &["publication"]],
        ["slot", "drop" | "advance"] | ["prune"] => vec![DATABASE, EVENTS],
        ["event" | "tail" | "replay"] => vec![DATABASE, EVENTS, &["start", "project"]],
        ["audit"] => vec![DATABASE, EVENTS, &["start"]],
        ["recover"] => vec![DATABASE, EVENTS, &["publication", "start", "project"]],
        ["slot", "list"] | ["quarantine", "list" | "show" | "discard"] => vec![DATABASE],
        ["quarantine", "release"] => vec![DATABASE, &["on_bad_event"]],
        _ => Vec::new(),
    })
}

/// Returns the settings that a command uses. Leaves out a setting if the command has its own argument
/// of that name, such as `--topic` of `event`.
fn settings_of<'c>(
    command: &'c Command,
    path: &[&str],
) -> impl Iterator<Item = &'static SettingKey> + use<'c> {
    let used = used_by(path);
    KEYS.iter().filter(move |key| {
        let is_used = used
            .as_ref()
            .is_none_or(|used| used.iter().any(|names| names.contains(&key.name)));
        is_used && command.get_arguments().all(|own| own.get_id() != key.name)
    })
}

/// Adds the flags to every command.
pub(super) fn added(command: Command) -> Command {
    add(command, &[])
}

fn add(command: Command, path: &[&str]) -> Command {
    let explain = used_by(path).is_none();
    let flags: Vec<Arg> = settings_of(&command, path)
        .map(|key| flag(key, explain))
        .collect();
    let command = command.mut_subcommands(|subcommand| {
        let name = subcommand.get_name().to_owned();
        let path: Vec<&str> = path.iter().copied().chain([name.as_str()]).collect();
        add(subcommand, &path)
    });
    command.args(flags)
}

/// Returns the names and texts of the settings that are given as flags. `command` is the definition of the command
/// line, before [`added`] adds the flags of settings.
pub(super) fn given(command: &Command, matches: &ArgMatches) -> Vec<(String, String)> {
    let mut given = Vec::new();
    let mut path: Vec<&str> = Vec::new();
    let (mut command, mut matches) = (command, matches);
    // In `slot --slot a show --slot b`, the flags of the inner command come later and win.
    while let Some((name, inner)) = matches.subcommand() {
        let Some(inner_command) = command.find_subcommand(name) else {
            break;
        };
        (command, matches) = (inner_command, inner);
        path.push(name);
        given.extend(settings_of(command, &path).filter_map(|key| {
            let text = matches.get_one::<String>(key.name)?;
            Some((key.name.to_owned(), text.clone()))
        }));
    }
    given
}

/// Whether this is the flag of a setting.
pub(super) fn is_setting(flag: &str) -> bool {
    KEYS.iter()
        .any(|key| flag.strip_prefix("--") == Some(&key.flag()))
}

/// Returns the hidden argument `--config` for a command that has no settings. Every command accepts
/// `--config`, because users may write it before the command.
pub(super) fn hidden_config() -> Arg {
    Arg::new("config")
        .long("config")
        .value_name("FILE")
        .value_parser(clap::value_parser!(std::path::PathBuf))
        .hide(true)
}

/// The parser for the flag of a setting that allows only certain words. The parser shows these words in help and
/// completions, but accepts any text. `settings` checks the text later, as it checks an environment variable.
#[derive(Clone)]
struct ChoiceParser(&'static [&'static str]);

impl TypedValueParser for ChoiceParser {
    type Value = String;

    fn parse_ref(
        &self,
        command: &Command,
        arg: Option<&Arg>,
        value: &std::ffi::OsStr,
    ) -> Result<String, clap::Error> {
        StringValueParser::new().parse_ref(command, arg, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(
            self.0.iter().map(|word| PossibleValue::new(*word)),
        ))
    }
}

/// Creates the flag of a setting. The flag's help says in one short sentence what the setting does. If `explain`,
/// `--help` gives a longer text instead, with the reason for the default.
fn flag(key: &'static SettingKey, explain: bool) -> Arg {
    let arg = Arg::new(key.name).long(key.flag()).help_heading("Settings");
    let arg = match key.kind {
        SettingKind::Text(placeholder) => arg.value_name(placeholder),
        SettingKind::Choice(words) => arg
            .value_name("WORD")
            .value_parser(ValueParser::new(ChoiceParser(words))),
        SettingKind::Number(..) => arg.value_name("N"),
        SettingKind::Switch => arg.value_name("true|false"),
    };
    let bound = match key.kind {
        SettingKind::Number(min, max) => format!(", {min} to {max}"),
        SettingKind::Text(_) | SettingKind::Choice(_) | SettingKind::Switch => String::new(),
    };
    let default = match key.default {
        "" => String::new(),
        default => format!(", default {default}"),
    };
    let long = format!("{} [{}{bound}{default}]", key.reason, key.variable());
    let short = match key.default {
        "" => key.summary().to_owned(),
        default => format!("{} [default: {default}]", key.summary()),
    };
    if explain {
        arg.help(short).long_help(long)
    } else {
        arg.help(short)
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::cli::args::{Cli, command};

    fn set(line: &[&str]) -> Vec<(String, String)> {
        given(
            &Cli::command(),
            &command().try_get_matches_from(line).unwrap(),
        )
    }

    fn each_command(
        command: &Command,
        path: &[String],
        seen: &mut impl FnMut(&Command, &[String]),
    ) {
        seen(command, path);
        for inner in command.get_subcommands() {
            let path = [path, &[inner.get_name().to_owned()]].concat();
            each_command(inner, &path, seen);
        }
    }

    #[test]
    fn the_settings_of_each_command_exist() {
        let mut count = 0;
        each_command(&Cli::command(), &[], &mut |_, path| {
            let path: Vec<&str> = path.iter().map(String::as_str).collect();
            for name in used_by(&path).into_iter().flatten().flatten() {
                assert!(KEYS.iter().any(|key| key.name == *name), "{path:?}: {name}");
            }
            // These commands have only subcommands, or use no settings.
            let is_plain = ["", "quarantine", "explain", "completions"].contains(&&*path.join(" "));
            let uses_some = used_by(&path).is_none_or(|used| !used.is_empty());
            assert_ne!(is_plain, uses_some, "{path:?}");
            count += 1;
        });
        assert!(count > 20, "only {count} commands");
    }

    #[test]
    fn a_flag_of_a_command_is_not_the_setting_of_the_same_name() {
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
        }
        let line = [
            "postrider",
            "event",
            "--key",
            "k",
            "--topic",
            "orders",
            "--slot",
            "a",
        ];
        assert_eq!(set(&line), [("slot".to_owned(), "a".to_owned())]);
        let line = ["postrider", "run", "--topic", "orders"];
        assert_eq!(set(&line), [("topic".to_owned(), "orders".to_owned())]);
    }

    #[test]
    fn the_flags_of_an_inner_command_come_last() {
        let slot = |text: &str| ("slot".to_owned(), text.to_owned());
        assert_eq!(
            set(&["postrider", "slot", "--slot", "a", "show"]),
            [slot("a")]
        );
        let line = ["postrider", "slot", "--slot", "a", "show", "--slot", "b"];
        assert_eq!(set(&line), [slot("a"), slot("b")]);
    }

    #[test]
    fn a_wrong_choice_after_a_flag_is_passed_on_to_the_settings() {
        let line = ["postrider", "run", "--start", "nothing"];
        assert_eq!(set(&line), [("start".to_owned(), "nothing".to_owned())]);
    }

    #[test]
    fn the_short_help_of_every_setting_has_from_10_to_100_bytes() {
        for key in KEYS {
            let summary = key.summary();
            assert!(
                (10..=100).contains(&summary.len()),
                "{}: {summary}",
                key.name
            );
        }
    }
}
