//! Tests in which the relay's password changes while the relay runs. The relay reads the password from
//! libpq's password file or from the output of a command.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use crate::harness::{self, Database, Relay, eventually, insert_orders};

fn write(file: &Path, password: &str) {
    std::fs::write(file, format!("*:*:*:token:{password}\n")).unwrap();
    std::fs::set_permissions(file, PermissionsExt::from_mode(0o600)).unwrap();
}

/// The relay must read the file again at each login. In production, the password in the file may be a token that
/// another program renews every hour.
#[tokio::test(flavor = "multi_thread")]
async fn a_relay_logs_in_with_the_current_password_of_the_password_file() {
    with_a_new_password("file", |file| ("PGPASSFILE", file.to_owned())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_logs_in_with_what_the_password_command_prints_each_time() {
    with_a_new_password("command", |file| {
        let command = format!("cut -d: -f5 {file}");
        ("POSTRIDER_PASSWORD_COMMAND", command)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_other_settings_the_file_pgpass_at_home_is_used() {
    with_a_new_password("home/.pgpass", |file| {
        let home = file.strip_suffix("/.pgpass").unwrap();
        ("HOME", home.to_owned())
    })
    .await;
}

/// Changes the password of the role, and the password in the file `name`. Checks that the running relay logs
/// in with the new password. `setting` returns the variable that makes the relay use this file.
async fn with_a_new_password(name: &str, setting: impl Fn(&str) -> (&'static str, String)) {
    let database = Database::with_password("token", "first-hour").await;
    let emulator = harness::emulator().await;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join(name);
    std::fs::create_dir_all(file.parent().unwrap()).unwrap();
    write(&file, "first-hour");
    let (variable, value) = setting(file.to_str().unwrap());
    let url = database.url.replace("postgres@", "token@");
    let relay = Relay::start_with(
        &database,
        &emulator.addr().to_string(),
        &[("DATABASE_URL", &url), (variable, &value)],
    );
    insert_orders(&database, 50, 5).await;
    database.wait_until_recorded().await;
    write(&file, "second-hour");
    // Change the password in a separate statement, so that it is committed before any session ends.
    database
        .execute("ALTER ROLE token PASSWORD 'second-hour'")
        .await;
    database
        .execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'token'")
        .await;
    insert_orders(&database, 50, 5).await;
    database.wait_until_recorded().await;
    eventually("the same process streams again", || async {
        (relay.log().matches("streaming").count() >= 2).then_some(())
    })
    .await;
    let log = relay.log();
    assert!(!log.contains("-hour") && !log.contains("error["), "{log}");
    let report = harness::check_streamed(&database, &emulator).await;
    assert!(report.is_clean(), "{report}\n{log}");
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_password_command_writes_to_standard_error_is_a_line_of_the_json_log() {
    let database = Database::with_password("token", "pw").await;
    let emulator = harness::emulator().await;
    let url = database.url.replace("postgres@", "token@");
    let command = "echo 'token \"renewed\"' >&2; sleep 9 & echo pw; echo 'last words' >&2";
    let settings = [
        ("DATABASE_URL", url.as_str()),
        ("POSTRIDER_PASSWORD_COMMAND", command),
        ("POSTRIDER_LOG_FORMAT", "json"),
    ];
    let relay = Relay::start_with(&database, &emulator.addr().to_string(), &settings);
    relay.wait_for_log("streaming").await;
    relay.wait_for_log("last words").await;
    let log = relay.log();
    let lines = log.lines().map(|line| {
        serde_json::from_str::<serde_json::Value>(line).unwrap_or_else(|e| panic!("{e}: {line}"))
    });
    let told = lines.filter(|line| line["message"] == "password_command: token \"renewed\"");
    assert!(told.count() >= 2, "once for each session:\n{log}");
}
