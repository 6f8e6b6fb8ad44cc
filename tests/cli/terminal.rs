//! Tests the commands in a real terminal: what the screen shows, what it shows after a change of its
//! size, and whether the command leaves the terminal as it was before.

mod pseudo;
mod screen;

use std::os::unix::process::ExitStatusExt;

use crate::prune;
use crate::support::Database;
use pseudo::Terminal;

const WATCH: [&str; 4] = ["status", "--watch", "1", "--slot"];

fn watch(database: &Database) -> Terminal {
    let arguments = [&WATCH[..], &[database.name.as_str()]].concat();
    Terminal::run(database, &arguments, (24, 80))
}

/// Checks that the command used the alternate screen of the terminal and left it, and that the terminal
/// has its cursor and its modes back.
fn assert_restored(terminal: &Terminal) {
    terminal.wait_for_output("the first screen and the cursor are back", |output| {
        let last = |sequence: &str| output.rfind(sequence);
        last("\x1b[?1049h").is_some()
            && last("\x1b[?1049l") > last("\x1b[?1049h")
            && last("\x1b[?25h") > last("\x1b[?25l")
    });
    assert!(terminal.has_its_modes());
}

#[tokio::test]
async fn the_live_view_fills_the_terminal_and_follows_its_size() {
    let database = Database::initialised().await;
    let mut terminal = watch(&database);
    terminal.wait_for("the first snapshot", |screen| {
        screen.row(23).starts_with("q quit") && screen.text().contains(&database.name)
    });
    assert!(!terminal.has_its_modes(), "keys are read one by one");
    for (rows, columns) in [(40, 120), (24, 60), (12, 60), (50, 80)] {
        terminal.resize(rows, columns);
        terminal.wait_for("the new size", |screen| {
            screen.row(rows - 1).starts_with("q quit") && screen.text().contains("database  ")
        });
    }
    terminal.press("q");
    let ended = terminal.wait();
    assert!((0..=3).contains(&ended.code().unwrap()), "{ended:?}");
    assert_restored(&terminal);
}

#[tokio::test]
async fn every_way_to_end_the_live_view_restores_the_terminal() {
    let database = Database::initialised().await;
    for key in ["q", "\x1b", "\x03"] {
        let mut terminal = watch(&database);
        terminal.wait_for("the view", |screen| screen.row(23).starts_with("q quit"));
        terminal.press(key);
        let ended = terminal.wait();
        assert!(ended.code().is_some(), "{key:?}: {ended:?}");
        assert_restored(&terminal);
    }
    let mut terminal = watch(&database);
    terminal.wait_for("the view", |screen| screen.row(23).starts_with("q quit"));
    terminal.signal("TERM");
    assert_eq!(terminal.wait().code(), Some(143));
    assert_restored(&terminal);
}

#[tokio::test]
async fn tail_prints_below_what_is_there_and_ends_with_ctrl_c() {
    let database = Database::initialised().await;
    database.emit(3).await;
    database
        .execute(
            "insert into outbox.dispatch (commit_lsn, committed_at, ordinal, attempts, event_id, state, topic, \
                 ordering_key) \
             select '0/10', now(), seq, 1, id, 'published', 'projects/p/topics/order.events', aggregateid \
             from outbox.events",
        )
        .await;
    let id = "select id::text from outbox.events where seq = 3";
    let id = database.text(id).await;
    let arguments = ["tail", "--since", "1h"];
    let mut terminal = Terminal::run(&database, &arguments, (24, 100));
    terminal.wait_for("the last event", |screen| screen.text().contains(&id));
    terminal.resize(30, 60);
    terminal.press("\x03");
    assert_eq!(terminal.wait().signal(), Some(2));
    assert!(!terminal.output().contains("\x1b[?1049h"));
    assert!(terminal.has_its_modes());
}

#[tokio::test]
async fn errors_are_wrapped_at_the_width_of_the_terminal() {
    let database = Database::new().await;
    for arguments in [
        &["quarantine", "release"][..],
        &["event", "--since", "x"],
        &["status", "--watch", "0"],
    ] {
        let mut terminal = Terminal::run(&database, arguments, (24, 60));
        assert!(!terminal.wait().success(), "{arguments:?}");
        terminal.wait_for_output("an error", |output| {
            output.starts_with("error") && output.ends_with('\n')
        });
        let output = terminal.output();
        for line in output.lines() {
            assert!(line.chars().count() <= 60, "{arguments:?}: {output}");
        }
    }
}

#[tokio::test]
async fn a_terminal_gets_colours_unless_the_user_turns_them_off() {
    let database = Database::initialised().await;
    database.emit(1).await;
    for arguments in [&["audit"][..], &["slot", "show"], &["--help"]] {
        for (env, is_coloured, has_sequences) in [
            (("NO_COLOR", ""), true, true),
            // Without colours, `audit` still writes control sequences, because it rewrites its progress line in
            // place.
            (("NO_COLOR", "1"), false, arguments == ["audit"]),
            (("TERM", "dumb"), false, false),
        ] {
            let size = (24, 80);
            let mut terminal = Terminal::run_with(&database, arguments, size, &[env]);
            terminal.wait();
            terminal.wait_for_output("the whole output", |output| output.ends_with('\n'));
            let output = terminal.output();
            let mut sequences = output.split('\x1b').skip(1).map(|after| {
                after.trim_start_matches(|c: char| c == '[' || c == ';' || c.is_ascii_digit())
            });
            assert_eq!(
                (
                    sequences.any(|end| end.starts_with('m')),
                    output.contains('\x1b')
                ),
                (is_coloured, has_sequences),
                "{arguments:?} with {env:?}: {output:?}"
            );
        }
    }
}

#[tokio::test]
async fn answers_about_the_relay_and_its_events_fit_60_columns() {
    let database = Database::initialised().await;
    database.emit(3).await;
    database
        .execute(
            "insert into outbox.dispatch (commit_lsn, committed_at, ordinal, attempts, event_id, state, topic, \
                 ordering_key, error) \
             select '0/10', now(), seq, 3, id, 'quarantined', 'projects/p/topics/order.events', \
                 repeat('several words ', 10) || seq, 'event-too-large: ' || repeat('words of a reason ', 20) \
             from outbox.events",
        )
        .await;
    let id = "select id::text from outbox.events where seq = 3";
    let id = database.text(id).await;
    for arguments in [
        &["status"][..],
        &["check"],
        &["check", "--all"],
        &["slot", "show"],
        &["slot", "list"],
        &["quarantine", "list"],
        &["event", &id],
    ] {
        let mut terminal = Terminal::run_with(&database, arguments, (24, 60), &[("NO_COLOR", "1")]);
        terminal.wait();
        terminal.wait_for_output("the whole output", |output| output.ends_with('\n'));
        let output = terminal.output();
        for line in output.lines() {
            // Only a line with a single long word may be too long: the command does not break words, so that
            // they can be copied.
            let is_one_word = !line.trim().contains(' ');
            assert!(
                is_one_word || line.chars().count() <= 60,
                "{arguments:?}: {line:?} in {output}"
            );
        }
    }
}

#[tokio::test]
async fn prune_shows_a_bar_of_the_old_rows_that_it_has_read() {
    let server = prune::server();
    let database = Database::on(&server).await;
    database.run(&["init", "--apply"]).await.assert_status(0);
    prune::fill(&database, 3_000).await;
    let arguments = [
        "prune",
        "--older-than",
        "30d",
        "--yes",
        "--chunk",
        "100",
        "--pause",
        "50ms",
    ];
    // At 40 columns the line takes two rows, and each refresh has to erase both.
    let mut terminal = Terminal::run(&database, &arguments, (24, 40));
    terminal.wait_for("one bar for the rows", |screen| {
        let text = screen.text();
        text.contains("[####") && text.matches("outbox.events").count() == 1
    });
    terminal.press("\x03");
    terminal.wait_for_output("what is deleted", |output| {
        output.contains("Stopped before the end")
    });
    assert_eq!(terminal.wait().code(), Some(1));
}
