//! Tests of help texts, flags and output that need no database.

use crate::support::{PATIENCE, assert_contains, command, postrider};

#[tokio::test]
async fn the_help_of_every_command_has_an_example() {
    for command in [
        &["init"][..],
        &["check"],
        &["slot"],
        &["slot", "show"],
        &["slot", "list"],
        &["slot", "create"],
        &["slot", "drop"],
        &["slot", "advance"],
        &["event"],
        &["audit"],
        &["prune"],
        &["quarantine"],
        &["quarantine", "list"],
        &["quarantine", "show"],
        &["quarantine", "release"],
        &["quarantine", "discard"],
    ] {
        let ran = postrider(&[command, &["--help"]].concat(), &[]).await;
        ran.assert_status(0);
        assert!(ran.stdout.contains("Example"), "{ran}");
    }
}

/// Runs every command with `flag`, which is `-h` or `--help`. Returns each command with its help.
async fn helps(flag: &str, columns: &str) -> Vec<(String, String)> {
    let mut commands = vec![String::new()];
    let mut helps = Vec::new();
    while let Some(name) = commands.pop() {
        let args: Vec<&str> = name.split_whitespace().chain([flag]).collect();
        let ran = postrider(&args, &[("COLUMNS", columns)]).await;
        ran.assert_status(0);
        let listed = ran.stdout.split_once("Commands:\n").map(|(_, rest)| rest);
        let listed = listed.and_then(|rest| rest.split("\n\n").next());
        let lines = listed.unwrap_or_default().lines();
        // Skip lines with more indentation, because such a line continues the description above it.
        let names = lines.filter(|line| line.starts_with("  ") && !line.starts_with("   "));
        let names = names.filter_map(|line| line.split_whitespace().next());
        commands.extend(
            names
                .filter(|inner| *inner != "help")
                .map(|inner| format!("{name} {inner}")),
        );
        helps.push((name.trim().to_owned(), ran.stdout));
    }
    assert!(helps.len() > 20, "only {} commands", helps.len());
    helps
}

#[tokio::test]
async fn a_setting_is_in_the_help_of_the_commands_that_use_it() {
    for (command, help) in helps("--help", "100").await {
        let has = |flag: &str| help.contains(&format!("      --{flag} <"));
        let uses_all = ["run", "check"].contains(&command.as_str());
        assert_eq!(has("in-flight-mib"), uses_all, "{command}");
        let is_plain = ["", "quarantine", "explain", "completions"].contains(&command.as_str());
        assert_eq!(has("database-url"), !is_plain, "{command}");
        let uses_no_settings = ["explain", "completions"].contains(&command.as_str());
        assert_eq!(has("config"), !uses_no_settings, "{command}");
        if has("dispatch") {
            assert_contains(&help, "[possible values: full, exceptions]");
        }
        let settings = help.split_once("\nSettings:\n");
        let lines = settings.map_or(0, |(_, settings)| settings.lines().count());
        let longest = if uses_all { 160 } else { 50 };
        assert!(lines < longest, "{command}: {lines}\n{help}");
    }
}

#[tokio::test]
async fn the_short_help_has_a_few_lines_for_each_setting() {
    for (command, help) in helps("-h", "100").await {
        assert!(help.lines().count() < 80, "{command}: {help}");
        assert!(!help.contains("POSTRIDER_SLOT,"), "{command}: {help}");
    }
}

#[tokio::test]
async fn help_fits_a_terminal_of_60_columns() {
    for flag in ["-h", "--help"] {
        for (command, help) in helps(flag, "60").await {
            for line in help.lines() {
                // A line of one or two words, such as a URL or a flag with its value, may be longer,
                // because it cannot be wrapped.
                let is_word = line.split_whitespace().count() <= 2;
                let fits = line.chars().count() <= 60;
                assert!(fits || is_word, "{command} {flag}: {line}");
            }
        }
    }
}

/// A narrow terminal wraps a longer line, and a wrapped command is hard to copy.
#[tokio::test]
async fn no_line_of_an_example_is_wider_than_60_columns() {
    let mut seen = 0;
    for (command, help) in helps("--help", "200").await {
        let examples = help.split_once("\nExample").map(|(_, examples)| examples);
        for line in examples.unwrap_or_default().lines() {
            assert!(line.chars().count() <= 60, "{command}: {line}");
            seen += 1;
        }
    }
    assert!(seen > 40, "{seen}");
}

#[tokio::test]
async fn a_flag_that_a_command_does_not_use_is_refused() {
    let ran = postrider(&["status", "--in-flight-mib", "8"], &[]).await;
    ran.assert_status(2);
    assert_contains(&ran.stderr, "does not use the setting `--in-flight-mib`");
    let ran = postrider(&["--slot", "a", "run"], &[]).await;
    ran.assert_status(2);
    assert_contains(&ran.stderr, "postrider run --slot");
    let ran = postrider(&["run", "--start", "nothing"], &[]).await;
    ran.assert_status(2);
    assert_contains(
        &ran.stderr,
        "--start: setting `start` must be `new` or `all`",
    );
}

#[tokio::test]
async fn init_prints_the_whole_script_without_a_database() {
    let ran = postrider(
        &["init", "--slot", "mine", "--relay-user", "Shop Relay"],
        &[],
    )
    .await;
    ran.assert_status(0);
    let order: Vec<usize> = [
        "create table if not exists outbox.migrations",
        "create table if not exists outbox.events",
        "create table if not exists outbox.dispatch",
        "create publication postrider",
        "grant postrider_relay to \"Shop Relay\"",
        "slot_name => 'mine'",
    ]
    .map(|part| {
        ran.stdout
            .find(part)
            .unwrap_or_else(|| panic!("{part} is not in {ran}"))
    })
    .into();
    assert!(order.is_sorted(), "{order:?}");
}

#[tokio::test]
async fn output_to_a_pipe_has_no_colours() {
    let ran = postrider(&["check"], &[]).await;
    assert!(!ran.stdout.contains('\x1b'), "{ran}");
    assert_contains(&ran.stdout, "database-url-invalid");
}

#[tokio::test]
async fn a_pipe_that_is_closed_early_causes_no_crash() {
    for args in [&["explain"][..], &["init"], &["check"]] {
        let mut child = command(args, &[]).spawn().unwrap();
        drop(child.stdout.take());
        let output = tokio::time::timeout(PATIENCE, child.wait_with_output())
            .await
            .unwrap();
        let stderr = String::from_utf8(output.unwrap().stderr).unwrap();
        assert!(stderr.is_empty(), "{args:?}: {stderr}");
    }
}

#[tokio::test]
async fn a_command_without_settings_takes_the_file_and_a_mistyped_flag_shows_no_secret() {
    for arguments in [
        ["explain", "--config", "x.toml", "slot-missing"],
        ["completions", "--config", "x.toml", "bash"],
    ] {
        postrider(&arguments, &[]).await.assert_status(0);
    }
    for flag in [
        "--database-urlpostgres://u:hunter2@h/d",
        "--postgres://u:hunter2@h/d",
    ] {
        let ran = postrider(&["run", flag], &[]).await;
        ran.assert_status(2);
        assert_contains(&ran.stderr, "unknown flag");
        assert!(!ran.stderr.contains("hunter2"), "{ran}");
    }
}

#[tokio::test]
async fn help_of_the_help_command_is_the_general_help() {
    for (asked, same) in [
        (&["help", "--help"][..], &["help"][..]),
        (&["help", "-h"], &["help"]),
        (&["quarantine", "help", "--help"], &["quarantine", "help"]),
        (&["help", "status", "--help"], &["help", "status"]),
    ] {
        let ran = postrider(asked, &[]).await;
        ran.assert_status(0);
        assert_eq!(ran.stdout, postrider(same, &[]).await.stdout);
    }
}

#[tokio::test]
async fn quarantine_commands_without_events_say_how_to_choose_them() {
    for action in ["release", "discard"] {
        for more in [&[][..], &["--topic", "t"]] {
            let ran = postrider(&[&["quarantine", action], more].concat(), &[]).await;
            ran.assert_status(2);
            for part in ["ID", "--key KEY", "--all", "quarantine list"] {
                assert_contains(&ran.stderr, part);
            }
        }
    }
}

/// A plain `cargo build` in a git checkout records HEAD. A build from an archive records no commit, so
/// the test then expects only the version.
#[tokio::test]
async fn the_version_names_the_commit_and_its_date() {
    let git = |format: &str| {
        let format = format!("--format={format}");
        let arguments = ["show", "--no-patch", &format, "HEAD"];
        let ran = std::process::Command::new("git").args(arguments).output();
        let ran = ran.ok().filter(|ran| ran.status.success())?;
        Some(String::from_utf8(ran.stdout).unwrap().trim().to_owned())
    };
    let ran = postrider(&["--version"], &[]).await;
    ran.assert_status(0);
    let is_given = std::env::var_os("POSTRIDER_COMMIT").is_some();
    let is_checkout = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
        .join(".git")
        .exists();
    match (git("%H"), git("%cs")) {
        (Some(commit), Some(date)) if is_checkout && !is_given => {
            assert_contains(&ran.stdout, &format!("({commit}, {date})"));
        }
        _ => assert_contains(&ran.stdout, "postrider "),
    }
}
