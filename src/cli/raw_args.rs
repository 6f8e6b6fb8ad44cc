//! Changes arguments as the process received them, before or after clap reads them.

use std::ffi::OsString;

/// Removes `--help` and `-h` after the command `help`, because clap has no help for `help`: `postrider help
/// --help` is the same as `postrider help`.
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
            // After a flag, a word may be the value of the flag.
            command = match command.find_subcommand(&argument) {
                Some(inner) => inner.clone(),
                None => clap::Command::default(),
            };
        }
        kept.push(argument);
    }
    kept
}

/// Hides arguments in clap's error text. Clap repeats an unexpected argument, which may be a URL with a
/// password, or a part of such a URL. Arguments may be any bytes.
pub(super) fn without_secrets(text: &str, arguments: impl Iterator<Item = OsString>) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_".contains(c);
    let hidden = arguments
        .skip(1)
        .map(|argument| argument.to_string_lossy().into_owned())
        .filter(|argument| !argument.is_empty() && !argument.chars().all(is_plain));
    hidden.fold(text.to_owned(), |text, argument| {
        // Clap repeats arguments unescaped, so the text contains the argument as it is.
        text.replace(&argument, "...")
    })
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
}
