//! Runs `postrider-demo` as a new user does, but for a shorter time.
//!
//! The demonstration runs the `postrider` in the same target folder. `cargo test --workspace`
//! builds that program too. Before `cargo test --package postrider-demo`, run `cargo build
//! --package postrider`.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// How long each wait may take. The limit is generous, because other processes can keep the machine busy.
const PATIENCE: Duration = Duration::from_secs(120);

/// The command that runs the demonstration with its own temp folder, so that the test sees any
/// leftovers.
fn demo(temp: &Path, arguments: &[&str]) -> Command {
    let program = Path::new(env!("CARGO_BIN_EXE_postrider-demo"));
    demo_of(program, temp, arguments)
}

fn demo_of(program: &Path, temp: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(program);
    command
        .args(arguments)
        .env("TMPDIR", temp)
        .stdout(Stdio::piped());
    command.stderr(Stdio::piped());
    command
}

/// A folder that the PostgreSQL account may enter, with a path short enough for the socket.
fn temp_folder() -> tempfile::TempDir {
    let everybody = std::fs::Permissions::from_mode(0o777);
    tempfile::Builder::new()
        .prefix("demo-")
        .permissions(everybody)
        .tempdir_in("/tmp")
        .unwrap()
}

/// Lists the files in the temp folder, and the processes that still use the folder.
fn left_behind(temp: &Path) -> Vec<PathBuf> {
    let files = std::fs::read_dir(temp)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let processes = std::fs::read_dir("/proc")
        .unwrap()
        .map(|entry| entry.unwrap().path());
    files
        .chain(processes.filter(|process| has_to_do_with(process, temp)))
        .collect()
}

/// Whether the folder occurs in the arguments or the environment of the process, or the process has
/// a file in the folder open.
fn has_to_do_with(process: &Path, folder: &Path) -> bool {
    let folder = folder.to_str().unwrap();
    let named = ["cmdline", "environ"].into_iter().any(|file| {
        let bytes = std::fs::read(process.join(file)).unwrap_or_default();
        String::from_utf8_lossy(&bytes).contains(folder)
    });
    let open = std::fs::read_dir(process.join("fd"))
        .into_iter()
        .flatten()
        .flatten()
        .any(|fd| {
            std::fs::read_link(fd.path()).is_ok_and(|file| file.to_string_lossy().contains(folder))
        });
    named || open
}

/// Waits until no file and no process is left. This can take a moment, because a killed relay does not end
/// at once.
fn assert_nothing_left(temp: &Path) {
    eventually("nothing is left", || left_behind(temp).is_empty());
}

fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(
            Instant::now() < deadline,
            "still not after {PATIENCE:?}: {what}"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Reads standard output until it contains `text`. Returns everything that was read.
fn read_until(child: &mut Child, text: &str) -> String {
    let stdout = child.stdout.as_mut().unwrap();
    let (mut read, mut byte) = (Vec::new(), [0]);
    while !String::from_utf8_lossy(&read).contains(text) {
        let count = stdout.read(&mut byte).unwrap();
        assert!(
            count == 1,
            "the output ended without {text:?}: {}",
            String::from_utf8_lossy(&read)
        );
        read.push(byte[0]);
    }
    String::from_utf8(read).unwrap()
}

fn signal(name: &str, pid: u32) {
    let pid = pid.to_string();
    assert!(
        Command::new("sh")
            .args(["-c", &format!("kill -s {name} {pid}")])
            .status()
            .unwrap()
            .success()
    );
}

#[test]
fn the_demo_survives_a_kill_and_leaves_nothing_behind() {
    let temp = temp_folder();
    let output = demo(temp.path(), &["--seconds", "6", "--rate", "500"])
        .output()
        .unwrap();
    let (shown, error) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert!(output.status.success(), "{shown}\n{error}");
    for line in [
        "kill -9",
        "A new relay",
        "  lost             0\n",
        "  out of order     0\n",
        "; 0 of them arrived\n",
        "; 0 without a row\n",
        "Nothing lost, nothing out of order.\n",
    ] {
        assert!(shown.contains(line), "{line:?} in\n{shown}\n{error}");
    }
    assert!(
        !shown.contains('\x1b'),
        "no colours without a terminal\n{shown}"
    );
    assert_nothing_left(temp.path());
}

#[test]
fn the_summary_is_json_with_the_json_flag() {
    let temp = temp_folder();
    let output = demo(temp.path(), &["--seconds", "5", "--rate", "200", "--json"])
        .output()
        .unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    let summary: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let events = summary["events"].as_u64().unwrap();
    assert!(events > 100, "{summary}");
    assert_eq!(summary["totals"]["delivered"], events);
    assert_eq!(summary["dispatch"]["published"], events);
    assert_eq!(summary["verdict"]["lost"], 0);
    assert!(
        summary["totals"]["rolled_back"].as_u64().unwrap() > 0,
        "{summary}"
    );
    assert_nothing_left(temp.path());
}

#[test]
fn an_order_that_changes_without_an_event_fails_the_demo() {
    let temp = temp_folder();
    let mut child = demo(temp.path(), &["--seconds", "5", "--rate", "100"])
        .spawn()
        .unwrap();
    let shown = read_until(&mut child, "  order\n");
    let port = shown
        .split("on port ")
        .nth(1)
        .unwrap()
        .split(',')
        .next()
        .unwrap();
    let url = format!("postgres://postgres@127.0.0.1:{port}/shop");
    execute(&url, "update orders set version = version + 1 where id = 7");
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let (shown, error) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert!(
        shown.contains("FAILED: 1 orders that disagree with their events"),
        "{shown}"
    );
    assert!(shown.contains("The end of the relay's log"), "{shown}");
    assert!(
        error.starts_with("error: a promise was broken: 1 orders"),
        "{error}"
    );
    assert_nothing_left(temp.path());
}

#[test]
fn ctrl_c_ends_the_demo_early_and_cleans_up() {
    let temp = temp_folder();
    let mut child = demo(temp.path(), &[]).spawn().unwrap();
    read_until(&mut child, "4 writers");
    signal("INT", child.id());
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert_nothing_left(temp.path());
}

#[test]
fn with_keep_the_demo_shows_inserted_events_until_ctrl_c() {
    let temp = temp_folder();
    let arguments = ["--seconds", "5", "--rate", "100", "--keep"];
    let mut child = demo(temp.path(), &arguments).spawn().unwrap();
    let shown = read_until(&mut child, "Press Ctrl-C to stop everything.");
    let url = shown
        .split("DATABASE_URL=")
        .nth(1)
        .unwrap()
        .split_whitespace()
        .next()
        .unwrap();
    let sql = r#"select outbox.emit('order', '7', 'OrderLost', '{"by": "hand"}')"#;
    execute(url, sql);
    read_until(&mut child, r#"received 7: OrderLost {"by": "hand"}"#);
    signal("INT", child.id());
    assert!(child.wait().unwrap().success());
    assert_nothing_left(temp.path());
}

#[tokio::main(flavor = "current_thread")]
async fn execute(url: &str, sql: &str) {
    let (client, connection) = tokio_postgres::connect(url, tokio_postgres::NoTls)
        .await
        .unwrap();
    tokio::spawn(connection);
    client.batch_execute(sql).await.unwrap();
}

#[test]
fn a_demo_killed_by_sigkill_leaves_nothing_behind() {
    let temp = temp_folder();
    let mut child = demo(temp.path(), &["--rate", "100"]).spawn().unwrap();
    read_until(&mut child, "order\n");
    child.kill().unwrap();
    child.wait().unwrap();
    assert_nothing_left(temp.path());
}

#[test]
fn without_postgresql_the_demo_says_how_to_install_it() {
    let temp = temp_folder();
    let output = demo(temp.path(), &[])
        .env("POSTRIDER_PG_BIN", temp.path())
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(
        error.starts_with("error: no PostgreSQL installation found"),
        "{error}"
    );
    assert!(error.contains("hint:  run `make demo`"), "{error}");
    assert_nothing_left(temp.path());
}

#[test]
fn without_the_program_postrider_the_demo_says_how_to_build_it() {
    let temp = temp_folder();
    let folder = tempfile::tempdir().unwrap();
    let alone = folder.path().join("postrider-demo");
    std::fs::copy(env!("CARGO_BIN_EXE_postrider-demo"), &alone).unwrap();
    let output = demo_of(&alone, temp.path(), &[]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let error = String::from_utf8_lossy(&output.stderr);
    let expected = format!(
        "error: there is no program {}/postrider\n",
        folder.path().display()
    );
    assert!(error.starts_with(&expected), "{error}");
    for way in [
        "`make demo`",
        "`cargo build --package postrider`",
        "--postrider",
    ] {
        assert!(error.contains(way), "{way:?} in {error}");
    }
    assert_nothing_left(temp.path());
}

#[test]
fn the_demo_runs_the_program_that_the_flag_names() {
    let temp = temp_folder();
    let arguments = ["--postrider", "/nowhere/postrider"];
    let output = demo(temp.path(), &arguments).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(
        error.starts_with("error: there is no program /nowhere/postrider\n"),
        "{error}"
    );
    let folder = tempfile::tempdir().unwrap();
    let refusing = folder.path().join("postrider");
    std::fs::write(&refusing, "#!/bin/sh\necho not today\nexit 1\n").unwrap();
    std::fs::set_permissions(&refusing, std::fs::Permissions::from_mode(0o755)).unwrap();
    let arguments = ["--postrider", refusing.to_str().unwrap()];
    let output = demo(temp.path(), &arguments).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(
        error.starts_with("error: `postrider init --apply` failed\n  cause: not today\n"),
        "{error}"
    );
    assert_nothing_left(temp.path());
}
