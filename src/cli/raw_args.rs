//! What happens to the process's arguments outside clap:
//!
//! - Before clap parses them, help flags that it would refuse are removed.
//! - If clap returns an error, arguments that may contain a secret are removed from the error's text.

use std::ffi::OsString;

/// Removes `--help` and `-h` after the command `help`, because clap refuses them there. So `postrider help --help`
/// does the same as `postrider help`.
pub(super) fn without_help_of_help(
    mut command: clap::Command,
    mut arguments: impl Iterator<Item = OsString>,
) -> Vec<OsString> {
    let mut follows_help = false;
    let mut kept = Vec::new();
    kept.extend(arguments.next());
    for argument in arguments {
        if follows_help && (argument == "--help" || argument == "-h") {
            continue;
        }
        if !follows_help {
            follows_help = command.has_subcommands() && argument == "help";
            // After a flag or an unknown word, no longer look for `help`, because the next word may be the
            // value of a flag instead of a command.
            command = match command.find_subcommand(&argument) {
                Some(inner) => inner.clone(),
                None => clap::Command::default(),
            };
        }
        kept.push(argument);
    }
    kept
}

/// Replaces the arguments that are not plain words with `...` in the text of a clap error. The text may quote an
/// argument or the value of a flag. Either may be a URL with a password, or a part of such a URL.
pub(super) fn without_secrets(text: &str, arguments: impl Iterator<Item = OsString>) -> String {
    let arguments: Vec<String> = arguments
        .skip(1)
        .map(|argument| argument.to_string_lossy().into_owned())
        .collect();
    let values = arguments
        .iter()
        .filter_map(|argument| value_of_flag(argument));
    let all = arguments.iter().map(String::as_str).chain(values);
    all.filter(|argument| !is_plain(argument))
        .fold(text.to_owned(), |text, argument| {
            // Clap does not escape arguments, so the text contains the argument unchanged.
            text.replace(argument, "...")
        })
}

/// Whether the text is a word that cannot be a connection string.
pub(super) fn is_plain(text: &str) -> bool {
    text.chars()
        .all(|c: char| c.is_ascii_alphanumeric() || "-_".contains(c))
}

/// Returns the value in `--flag=value` or `-fvalue`.
fn value_of_flag(argument: &str) -> Option<&str> {
    if argument.starts_with("--") {
        return argument.split_once('=').map(|(_, value)| value);
    }
    let letter = argument.strip_prefix('-')?.chars().next()?;
    Some(&argument[1 + letter.len_utf8()..])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::command;

    #[test]
    fn help_flags_after_the_help_command_are_removed() {
        let line = |line: &str| {
            let words = line.split(' ').map(OsString::from);
            let kept = without_help_of_help(command(), words);
            let kept: Vec<&str> = kept.iter().filter_map(|word| word.to_str()).collect();
            kept.join(" ")
        };
        for (given, kept) in [
            ("postrider help --help", "postrider help"),
            ("postrider help -h", "postrider help"),
            ("postrider help status --help", "postrider help status"),
            ("postrider slot help --help", "postrider slot help"),
            ("postrider --help", "postrider --help"),
            ("postrider status --help", "postrider status --help"),
            ("postrider event help --help", "postrider event help --help"),
            (
                "postrider --config help run -h",
                "postrider --config help run -h",
            ),
        ] {
            assert_eq!(line(given), kept);
        }
    }

    #[test]
    fn an_argument_that_may_be_a_secret_is_not_repeated() {
        let url = "postgres://u:hunter2@h/d";
        for arguments in [
            vec!["run".to_owned(), url.to_owned()],
            vec![
                "prune".to_owned(),
                "--older-than".to_owned(),
                url.to_owned(),
            ],
            vec!["prune".to_owned(), format!("--older-than={url}")],
            vec!["replay".to_owned(), format!("--since={url}")],
            vec!["recover".to_owned(), format!("--adopt={url}")],
            vec!["run".to_owned(), format!("-q{url}")],
        ] {
            let line = std::iter::once("postrider".to_owned()).chain(arguments);
            let line: Vec<OsString> = line.map(OsString::from).collect();
            let error = command()
                .try_get_matches_from(&line)
                .unwrap_err()
                .to_string();
            let shown = without_secrets(&error, line.into_iter());
            assert!(
                !shown.contains("hunter2") && shown.contains("error:"),
                "{shown}"
            );
        }
    }
}
