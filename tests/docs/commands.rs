//! Checks the commands on the pages. Each block for a shell must be valid for `sh`. The argument parser
//! of `postrider` must accept each `postrider` command. If no test checks the commands of a program, the
//! program must be in [`NOT_CHECKED`].
//!
//! `tests/guides/` runs some of the pages. The tests of xtask check the commands of `cargo xtask`.

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use clap::error::ErrorKind;

use super::blocks::{Block, blocks};
use super::{code_spans, files, read, root};

/// Programs whose commands on the pages are neither run nor parsed by a test, and the reason.
const NOT_CHECKED: [(&str, &str); 9] = [
    ("docker", "needs a container engine"),
    ("editor", "waits for a person"),
    ("gcloud", "needs an account at Google"),
    ("install", "writes to /etc"),
    (
        "kubectl",
        "needs a cluster; `cargo xtask deploy` renders the overlays",
    ),
    ("make", "the demo and the tests themselves"),
    ("npm", "needs packages; tests/producers does the same"),
    (
        "systemctl",
        "needs systemd; `cargo xtask deploy` checks the unit",
    ),
    (
        "terraform",
        "needs Google's provider; `cargo xtask deploy` checks the format",
    ),
];

/// Programs whose commands a test checks, or which need no check beyond the syntax of the shell.
const CHECKED: [(&str, &str); 15] = [
    ("alias", "a word of the shell"),
    ("apt-get", "the package itself cannot be installed here"),
    (
        "cargo",
        "the tests of xtask parse `cargo xtask`, without the flags of bench and torture",
    ),
    ("cd", "a word of the shell"),
    ("cp", "the file is checked by tests/deploy"),
    ("curl", "asks a public address"),
    ("date", "prints the time"),
    ("echo", "a word of the shell"),
    ("export", "a word of the shell"),
    (
        "helm",
        "`cargo xtask deploy` renders the chart with these values",
    ),
    ("pg_dump", "tests/guides runs the move"),
    ("printf", "a word of the shell"),
    ("psql", "tests/guides runs the tutorial and the moves"),
    ("pubsub-emulator", "its own tests run it"),
    ("sed", "prints a file of deploy/"),
];

/// The pages for operators and new users. Decision records are left out, because they describe older
/// versions.
fn pages() -> Vec<PathBuf> {
    let mut pages = files(&root().join("docs"), ".md");
    pages.retain(|page| !page.starts_with(root().join("docs/adr")));
    pages.push(root().join("README.md"));
    pages.sort();
    pages
}

fn shell_blocks() -> Vec<Block> {
    let of_page = |page: PathBuf| blocks(&page, &read(&page));
    let all = pages().into_iter().flat_map(of_page);
    all.filter(|block| block.language == "sh").collect()
}

/// Splits a script into commands, each as a list of words without quotes. Leaves out comments and
/// redirections.
fn commands(script: &str) -> Vec<Vec<String>> {
    let mut all = vec![Vec::new()];
    let (mut word, mut quote) = (None::<String>, None::<char>);
    let mut letters = script.chars().peekable();
    let end_word = |word: &mut Option<String>, all: &mut Vec<Vec<String>>| {
        if let (Some(word), Some(command)) = (word.take(), all.last_mut()) {
            command.push(word);
        }
    };
    while let Some(letter) = letters.next() {
        match (quote, letter) {
            (Some(open), _) if open == letter => quote = None,
            (None, '\'' | '"') => {
                quote = Some(letter);
                word.get_or_insert_default();
            }
            (None | Some('"'), '\\') => {
                if let Some(next) = letters.next().filter(|next| *next != '\n') {
                    word.get_or_insert_default().push(next);
                }
            }
            (None, '#') if word.is_none() => {
                while letters.next_if(|next| *next != '\n').is_some() {}
            }
            (None, '\n' | ';' | '|' | '&') => {
                end_word(&mut word, &mut all);
                all.push(Vec::new());
            }
            (None, ' ' | '\t') => end_word(&mut word, &mut all),
            _ => word.get_or_insert_default().push(letter),
        }
    }
    end_word(&mut word, &mut all);
    all.into_iter().filter_map(without_prefix).collect()
}

/// Removes assignments, braces and `sudo` from the front of a command.
fn without_prefix(mut words: Vec<String>) -> Option<Vec<String>> {
    let is_assignment = |word: &str| {
        let (name, _) = word.split_once('=').unwrap_or_default();
        !name.is_empty() && name.chars().all(|c| c.is_ascii_uppercase() || c == '_')
    };
    let is_prefix = |word: &String| is_assignment(word) || ["{", "}", "sudo"].contains(&&**word);
    let begin = words.iter().take_while(|word| is_prefix(word)).count();
    words.drain(..begin);
    // The words after `--` are a command of `postrider`, as in `kubectl exec ... -- postrider check`, so
    // check only these words.
    if let Some(inner) = words
        .windows(2)
        .position(|pair| pair == ["--", "postrider"])
    {
        words.drain(..=inner);
    }
    (!words.is_empty()).then_some(words)
}

/// The error with which `postrider`'s command line refuses these words, or `None` if it accepts them.
fn refusal(words: &[String]) -> Option<clap::Error> {
    let refused = postrider::cli::command()
        .try_get_matches_from(words)
        .err()?;
    let shows = [ErrorKind::DisplayHelp, ErrorKind::DisplayVersion];
    (!shows.contains(&refused.kind())).then_some(refused)
}

#[test]
fn every_shell_block_is_valid_for_the_shell() {
    let all = shell_blocks();
    assert!(all.len() > 80, "only {} blocks were recognised", all.len());
    for block in all {
        let mut shell = Command::new("sh");
        shell
            .args(["-n"])
            .stdin(Stdio::piped())
            .stderr(Stdio::piped());
        let mut shell = shell.spawn().expect("a shell");
        let mut input = shell.stdin.take().expect("a pipe");
        input
            .write_all(block.text.as_bytes())
            .expect("the shell reads");
        drop(input);
        let done = shell.wait_with_output().expect("the shell ends");
        let error = String::from_utf8_lossy(&done.stderr);
        let place = format!("{}:{}", block.page.display(), block.line);
        assert!(done.status.success(), "{place}: {error}\n{}", block.text);
    }
}

#[test]
fn every_command_in_a_block_is_accepted_or_listed_as_not_checked() {
    let known = || {
        NOT_CHECKED
            .iter()
            .chain(&CHECKED)
            .map(|(program, _)| *program)
    };
    let (mut accepted, mut unknown) = (0, Vec::new());
    for block in shell_blocks() {
        let place = format!("{}:{}", block.page.display(), block.line);
        for words in commands(&block.text) {
            if words[0] == "postrider" {
                if let Some(refused) = refusal(&words) {
                    panic!("{place}: {words:?}: {refused}");
                }
                accepted += 1;
            } else if !known().any(|program| program == words[0]) {
                unknown.push(format!("{place}: {words:?}"));
            }
        }
    }
    assert!(unknown.is_empty(), "in no list of this test: {unknown:#?}");
    assert!(accepted > 60, "only {accepted} commands were recognised");
}

/// A sentence may name a command without its required arguments, so missing arguments are no error here.
#[test]
fn every_command_in_a_sentence_is_accepted() {
    let mut accepted = 0;
    for page in pages() {
        let text = read(&page).replace("\\|", "|");
        let spans = code_spans(&text).filter(|span| span.starts_with("postrider "));
        for words in spans.flat_map(commands) {
            if words[0] != "postrider" || words.contains(&"COMMAND".to_owned()) {
                continue;
            }
            let incomplete = [
                ErrorKind::MissingRequiredArgument,
                ErrorKind::MissingSubcommand,
                ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand,
            ];
            let refused = refusal(&words).filter(|refused| !incomplete.contains(&refused.kind()));
            if let Some(refused) = refused {
                panic!("{}: {words:?}: {refused}", page.display());
            }
            accepted += 1;
        }
    }
    assert!(accepted > 150, "only {accepted} commands were recognised");
}

#[test]
fn commands_are_recognised() {
    let script = "A='x y' postrider check --all # why\nsudo cp a b && kubectl exec pod -- postrider status\n\
                  psql \"$U\" -c \"select '{\\\"a\\\"}'\" \\\n  -q";
    let words: Vec<String> = commands(script)
        .iter()
        .map(|words| words.join("|"))
        .collect();
    let expected = [
        "postrider|check|--all",
        "cp|a|b",
        "postrider|status",
        "psql|$U|-c|select '{\"a\"}'|-q",
    ];
    assert_eq!(words, expected);
    assert!(refusal(&["postrider".into(), "prune".into(), "--unknown".into()]).is_some());
}
