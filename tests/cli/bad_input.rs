//! Checks how `postrider run` reacts to bad input. Within seconds it must print one message with a code
//! and a hint, and exit with the documented status, without a crash.

use std::net::TcpListener;
use std::time::{Duration, Instant};

use crate::support::{Database, LOCKED_PASSWORD, LOCKED_ROLE, Ran, assert_contains, postrider};

/// Settings with which `run` gives up soon and needs neither a port nor Pub/Sub.
pub(crate) const FAST: [(&str, &str); 3] = [
    ("POSTRIDER_START_TIMEOUT_S", "1"),
    ("POSTRIDER_HTTP_ADDR", "off"),
    ("PUBSUB_EMULATOR_HOST", "127.0.0.1:1"),
];

/// How long `run` may take: as long as a user would wait, with a margin for a busy machine.
const SOON: Duration = Duration::from_secs(25);

pub(crate) async fn run_without_database(env: &[(&str, &str)]) -> Ran {
    let began = Instant::now();
    let project = [("PUBSUB_PROJECT_ID", "demo")];
    let ran = postrider(&["run"], &[&FAST[..], &project, env].concat()).await;
    assert!(began.elapsed() < SOON, "took {:?}: {ran}", began.elapsed());
    ran
}

pub(crate) async fn run(database: &Database, env: &[(&str, &str)]) -> Ran {
    let all: Vec<(&str, &str)> = database
        .env()
        .into_iter()
        .chain(env.iter().copied())
        .collect();
    run_without_database(&all).await
}

#[tokio::test]
async fn an_invalid_url_is_refused_without_showing_its_password() {
    for url in [
        "shop",
        "mysql://u@h/d",
        "postgres://u:s3cret@h:port/d",
        "postgres://h?sslmode=no",
    ] {
        let ran = run_without_database(&[("DATABASE_URL", url)]).await;
        ran.assert_error("database-url-invalid", 2);
        assert!(!ran.stderr.contains("s3cret"), "{ran}");
    }
    run_without_database(&[])
        .await
        .assert_error("database-url-invalid", 2);
}

#[tokio::test]
async fn an_unreachable_server_ends_run_without_showing_the_password() {
    for url in [
        "postgres://u:s3cret@127.0.0.1:1/d",
        "postgres://u:s3cret@no-such-host.invalid/d",
    ] {
        let ran = run_without_database(&[("DATABASE_URL", url)]).await;
        ran.assert_error("postgres-unreachable", 3);
        assert!(!ran.stderr.contains("s3cret"), "{ran}");
    }
}

#[tokio::test]
async fn a_wrong_or_missing_password_is_an_authentication_error() {
    let database = Database::initialised().await;
    database.create_locked_role().await;
    let url = database.url_as(&format!("{LOCKED_ROLE}:s3cret"));
    let ran = run(&database, &[("DATABASE_URL", &url)]).await;
    ran.assert_error("postgres-authentication", 3);
    assert!(!ran.stderr.contains("s3cret"), "{ran}");
    let ran = run(
        &database,
        &[("DATABASE_URL", &database.url_as(LOCKED_ROLE))],
    )
    .await;
    ran.assert_error("postgres-authentication", 3);
    // With the right password, the relay logs in and fails only at a later check.
    let url = database.url_as(&format!("{LOCKED_ROLE}:{LOCKED_PASSWORD}"));
    run(&database, &[("DATABASE_URL", &url)])
        .await
        .assert_error("privilege-missing", 3);
}

#[tokio::test]
async fn a_database_that_does_not_exist_is_named() {
    let database = Database::new().await;
    let url = database.url.replace(&database.name, "no_such_database");
    let ran = run(&database, &[("DATABASE_URL", &url)]).await;
    ran.assert_error("database-url-invalid", 2);
    assert_contains(&ran.stderr, "no_such_database");
}

#[tokio::test]
async fn a_role_without_replication_is_reported_with_or_without_the_slot() {
    let database = Database::new().await;
    let role = format!("{}_relay", database.name);
    database.execute(&format!("create role {role} login")).await;
    database
        .run(&["init", "--apply", "--relay-user", &role])
        .await
        .assert_status(1);
    let url = database.url_as(&role);
    let ran = run(&database, &[("DATABASE_URL", &url)]).await;
    ran.assert_error("replication-right", 3);
    // Without the slot, `run` fails earlier, and must report the same code.
    database
        .run(&["slot", "drop", "--yes"])
        .await
        .assert_status(0);
    run(&database, &[("DATABASE_URL", &url)])
        .await
        .assert_error("replication-right", 3);
}

#[tokio::test]
async fn a_missing_schema_is_reported_with_the_command_that_creates_it() {
    let database = Database::new().await;
    let ran = run(&database, &[]).await;
    ran.assert_error("schema-missing", 3);
    assert_contains(&ran.stderr, "postrider init --apply");
}

#[tokio::test]
async fn a_publication_that_is_missing_or_lacks_the_table_is_reported_with_the_sql() {
    let database = Database::initialised().await;
    database
        .execute("alter publication postrider drop table outbox.events")
        .await;
    let ran = run(&database, &[]).await;
    ran.assert_error("publication-drift", 3);
    assert_contains(
        &ran.stderr,
        "alter publication postrider add table outbox.events",
    );
    database.execute("drop publication postrider").await;
    let ran = run(&database, &[]).await;
    ran.assert_error("publication-missing", 3);
    assert_contains(&ran.stderr, "create publication");
}

/// The only line on standard error, which must be a JSON object.
fn object(ran: &Ran) -> serde_json::Value {
    assert_eq!(ran.stderr.lines().count(), 1, "{ran}");
    serde_json::from_str(&ran.stderr).unwrap_or_else(|error| panic!("{error}: {ran}"))
}

#[tokio::test]
async fn with_a_json_log_every_error_that_ends_run_is_a_json_line() {
    for (format, level) in [("json", "level"), ("cloud_logging", "severity")] {
        for (arguments, more, code) in [
            (&["run"][..], ("RUST_LOG", "nosuch"), "setting-invalid"),
            (&["run", "--nosuch"], ("LANG", "C"), "setting-unknown"),
            (&["run", "extra"], ("LANG", "C"), "setting-invalid"),
            (
                &["run"],
                ("POSTRIDER_SLOT_ON_LOSS", "nosuch"),
                "setting-invalid",
            ),
        ] {
            let ran = postrider(arguments, &[("POSTRIDER_LOG_FORMAT", format), more]).await;
            ran.assert_status(2);
            let line = object(&ran);
            assert_eq!(line["code"], code, "{ran}");
            assert!(
                line["hint"].is_string() && line["message"].is_string() && line[level] == "ERROR",
                "{ran}"
            );
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("relay.toml");
    for mistake in ["slto = \"a\"", "slot = = 1", "[tables"] {
        std::fs::write(&file, format!("log_format = \"json\"\n{mistake}\n")).unwrap();
        let config = file.to_str().unwrap();
        let ran = postrider(&["run", "--config", config], &[]).await;
        ran.assert_status(2);
        assert_eq!(object(&ran)["level"], "ERROR", "{ran}");
    }
}

/// Checks that the only line on standard error is an object with the error and nothing else.
fn assert_only_error(ran: &Ran, code: &str) {
    let object = object(ran);
    let error = &object["error"];
    assert_eq!(error["code"], code, "{ran}");
    let members = |value: &serde_json::Value| {
        let names = value.as_object().unwrap().keys().cloned();
        names.collect::<Vec<String>>().join(" ")
    };
    assert_eq!(members(&object), "error", "{ran}");
    assert_eq!(members(error), "code hint what", "{ran}");
    assert!(
        error["what"].is_string() && error["hint"].is_string(),
        "{ran}"
    );
}

#[tokio::test]
async fn with_json_the_error_of_every_command_has_the_same_form() {
    let away = ("DATABASE_URL", "postgres://u@127.0.0.1:1/d");
    for command in [
        "status",
        "audit",
        "check",
        "event 1",
        "slot show",
        "slot list",
        "tail",
        "prune --older-than 1d --yes",
        "quarantine list",
        "quarantine show 1",
    ] {
        let mut arguments: Vec<&str> = command.split(' ').collect();
        arguments.push("--json");
        let ran = postrider(&arguments, &[away, ("POSTRIDER_SLOT", "not a slot")]).await;
        assert_only_error(&ran, "setting-invalid");
        if command == "check" {
            continue; // Without a server, `check` reports findings and no error.
        }
        let ran = postrider(&arguments, &[away]).await;
        assert_only_error(&ran, "postgres-unreachable");
        if ["status", "slot show"].contains(&command) {
            assert_eq!(ran.json()["error"], object(&ran)["error"], "{ran}");
        } else {
            assert_eq!(ran.stdout, "", "{ran}");
        }
    }
    let ran = postrider(&["audit", "--json", "--nosuch"], &[]).await;
    assert_only_error(&ran, "setting-unknown");
}

#[tokio::test]
async fn without_a_database_url_every_command_exits_with_the_code_of_the_error() {
    for command in [
        "run",
        "status",
        "status --watch",
        "slot",
        "slot show",
        "slot show --watch",
        "slot list",
        "slot create",
        "slot drop",
        "slot advance",
        "init --apply",
        "event 1",
        "tail",
        "audit",
        "prune --older-than 1d --yes",
        "replay 1",
        "quarantine list",
        "quarantine show 1",
        "quarantine release --all",
        "quarantine discard --all",
        "recover",
        "recover --dry-run",
    ] {
        let arguments: Vec<&str> = command.split(' ').collect();
        let ran = postrider(&arguments, &[("PUBSUB_PROJECT_ID", "demo")]).await;
        ran.assert_error("database-url-invalid", 2);
    }
    // `check` reports the error as a finding.
    let ran = postrider(&["check", "--json"], &[]).await;
    ran.assert_status(2);
    ran.finding("database-url-invalid");
}

#[tokio::test]
async fn a_token_that_is_too_short_is_refused_with_a_command_that_makes_one() {
    let ran = run_without_database(&[("POSTRIDER_HTTP_TOKEN", "x")]).await;
    ran.assert_error("setting-invalid", 2);
    assert_contains(&ran.stderr, "openssl rand -hex 16");
}

#[tokio::test]
async fn a_slot_of_another_plugin_or_a_physical_one_is_refused() {
    let database = Database::initialised().await;
    let other = format!("{}_other", database.name);
    let physical = format!("select pg_create_physical_replication_slot('{other}')");
    database.execute(&physical).await;
    let ran = run(&database, &[("POSTRIDER_SLOT", &other)]).await;
    ran.assert_error("slot-foreign", 3);
    database
        .execute(&format!("select pg_drop_replication_slot('{other}')"))
        .await;

    let plugin = format!("select pg_create_logical_replication_slot('{other}', 'test_decoding')");
    if let Err(error) = database.client.batch_execute(&plugin).await {
        eprintln!("SKIPPED: the plugin test_decoding is not installed: {error}");
        return;
    }
    let ran = run(&database, &[("POSTRIDER_SLOT", &other)]).await;
    ran.assert_error("slot-foreign", 3);
    assert_contains(&ran.stderr, "test_decoding");
}

#[tokio::test]
async fn a_column_in_the_settings_that_the_table_lacks_is_named() {
    let database = Database::initialised().await;
    let mut file = tempfile::NamedTempFile::new().unwrap();
    let text = b"[[tables]]\ntable = 'outbox.events'\ncolumns = { event_type = 'kind' }\n";
    std::io::Write::write_all(&mut file, text).unwrap();
    let path = file.path().to_str().unwrap();
    let ran = run(&database, &[("POSTRIDER_CONFIG", path)]).await;
    ran.assert_error("column-missing", 5);
    assert_contains(&ran.stderr, "kind");
}

#[tokio::test]
async fn an_unknown_setting_is_refused_in_the_environment_a_file_or_a_flag() {
    let ran = run_without_database(&[("POSTRIDER_PUBLICATON", "x")]).await;
    ran.assert_error("setting-unknown", 2);
    assert_contains(&ran.stderr, "did you mean `publication`?");

    let mut file = tempfile::NamedTempFile::new().unwrap();
    std::io::Write::write_all(&mut file, b"colour = 'red'\n").unwrap();
    let path = file.path().to_str().unwrap();
    run_without_database(&[("POSTRIDER_CONFIG", path)])
        .await
        .assert_error("setting-unknown", 2);

    let ran = postrider(&["run", "--publicaton", "x"], &[]).await;
    ran.assert_error("setting-unknown", 2);
    assert_contains(&ran.stderr, "--publication");
}

#[tokio::test]
async fn a_setting_out_of_bounds_and_a_missing_file_are_refused() {
    let ran = postrider(&["run", "--in-flight-mib", "0"], &[]).await;
    ran.assert_error("setting-invalid", 2);
    let ran = run_without_database(&[("POSTRIDER_CONFIG", "/no/such/file.toml")]).await;
    ran.assert_error("setting-invalid", 2);
    let ran = run_without_database(&[("POSTRIDER_SLOT", "Not-A-Slot")]).await;
    ran.assert_error("setting-invalid", 2);
}

#[tokio::test]
async fn a_port_in_use_is_named_by_run_and_check() {
    let database = Database::initialised().await;
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap().to_string();
    let ran = run(&database, &[("POSTRIDER_HTTP_ADDR", &addr)]).await;
    ran.assert_error("port-in-use", 2);
    assert_contains(&ran.stderr, &addr);
    let taken = [("POSTRIDER_HTTP_ADDR", addr.as_str())];
    let ran = database.run_with(&["check", "--json"], &taken).await;
    ran.assert_status(2);
    let found = ran.finding("port-in-use");
    assert_contains(&found["what"].to_string(), &addr);
    assert_contains(&ran.json()["run"]["stops"].to_string(), "port-in-use");
    drop(listener);
    let ran = database.run_with(&["check", "--json"], &taken).await;
    assert_eq!(ran.finding("http-port")["severity"], "ok");
}

#[tokio::test]
async fn a_missing_project_is_reported_with_its_variable() {
    let database = Database::initialised().await;
    let ran = run(&database, &[("PUBSUB_PROJECT_ID", "")]).await;
    ran.assert_error("project-missing", 2);
    assert_contains(&ran.stderr, "PUBSUB_PROJECT_ID");
}
