//! Tests of the relay's log: the format of its lines, the first lines (version, settings, database and server), and
//! repeated lines.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::harness::{self, Database, Relay, eventually, insert_orders};
use crate::http::free_addr;

#[test]
fn the_error_that_ends_the_relay_is_a_line_of_a_json_log() {
    let run = |settings: &[(&str, &str)]| {
        let environment = [&[("POSTRIDER_LOG_FORMAT", "json")], settings].concat();
        let ran = harness::postrider(&["run"], &environment).output().unwrap();
        let log = String::from_utf8(ran.stderr).unwrap();
        let last = log.lines().last().unwrap_or_default();
        let line: Value = serde_json::from_str(last).unwrap_or_else(|e| panic!("{e}: {log}"));
        (ran.status.code(), line)
    };
    let url = "postgres://nobody@127.0.0.1:1/x";
    let (code, line) = run(&[("DATABASE_URL", url), ("POSTRIDER_HTTP_ADDR", "off")]);
    assert_eq!(
        (code, &line["code"]),
        (Some(2), &"project-missing".into()),
        "{line}"
    );
    assert!(
        line["hint"].as_str().unwrap().contains("PUBSUB_PROJECT_ID"),
        "{line}"
    );
    let (code, line) = run(&[("DATABASE_URL", url), ("POSTRIDER_SLOT", "Not A Slot")]);
    assert_eq!(
        (code, &line["code"]),
        (Some(2), &"setting-invalid".into()),
        "{line}"
    );
    assert_eq!(line["level"], "ERROR");
}

#[tokio::test(flavor = "multi_thread")]
async fn every_line_of_a_log_for_cloud_logging_has_severity_time_and_message() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let host = emulator.addr().to_string();
    let settings = [
        ("POSTRIDER_LOG_FORMAT", "cloud_logging"),
        ("POSTRIDER_ON_BAD_EVENT", "halt"),
        // At this level the libraries log too.
        ("RUST_LOG", "trace"),
    ];
    let relay = Relay::start_with(&database, &host, &settings);
    insert_orders(&database, 10, 5).await;
    database.wait_until_recorded().await;
    let bad = "INSERT INTO outbox.events (aggregatetype, event_type, headers) \
               VALUES ('order', E'B\na\"d', jsonb_build_object('x', repeat('y', 2000)))";
    database.execute(bad).await;
    relay.wait_for_log("\"severity\":\"ERROR\"").await;
    let log = relay.log();
    let mut severities = BTreeSet::new();
    for line in log.lines() {
        let entry: Value = serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"));
        assert!(entry["message"].is_string(), "{line}");
        let time = entry["time"].as_str().unwrap();
        assert!(time.starts_with("20") && time.ends_with('Z'), "{line}");
        severities.insert(entry["severity"].as_str().unwrap().to_owned());
    }
    let all = ["DEBUG", "ERROR", "INFO"].map(str::to_owned);
    assert_eq!(severities, all.into());
    assert_eq!(relay.wait().await.code(), Some(5), "{log}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_log_says_once_what_runs_and_where() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let addr = free_addr();
    let host = emulator.addr().to_string();
    let relay = Relay::start_with(&database, &host, &[("POSTRIDER_HTTP_ADDR", &addr)]);
    insert_orders(&database, 10, 5).await;
    database.wait_until_recorded().await;
    let end_session = format!(
        "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = '{}'",
        database.slot()
    );
    database.execute(&end_session).await;
    insert_orders(&database, 10, 5).await;
    database.wait_until_recorded().await;
    let of = |log: &str, text: &str| log.lines().filter(|line| line.contains(text)).count();
    eventually("a second session streams", || async {
        (of(&relay.log(), "streaming slot=") == 2).then_some(())
    })
    .await;
    let log = relay.log();
    assert_eq!(of(&log, "postrider starts"), 1, "{log}");
    assert_eq!(of(&log, "connected to PostgreSQL"), 1, "{log}");
    let mut lines = log.lines();
    let (first, line) = (lines.next().unwrap(), lines.next().unwrap());
    assert!(first.contains("postrider starts"), "{log}");
    assert!(line.contains("connected to PostgreSQL"), "{log}");
    assert_parts(
        first,
        &[
            format!("version=\"{}\"", env!("CARGO_PKG_VERSION")),
            "commit=\"".to_owned(),
            format!("slot={}", database.slot()),
            "tables=\"outbox.events\"".to_owned(),
            "topics=\"{aggregatetype}.events\"".to_owned(),
            format!("http_addr=\"{addr}\""),
        ],
    );
    let server = "SELECT split_part(current_setting('server_version'), ' ', 1)";
    let name = "SELECT current_database()::text";
    assert_parts(
        line,
        &[
            format!("database=\"{}\"", database.text(name).await),
            format!("server=\"{}\"", database.text(server).await),
        ],
    );
}

fn assert_parts(line: &str, parts: &[String]) {
    for part in parts {
        assert!(line.contains(part), "{part} in {line}");
    }
}

/// Every poll fails to write the confirmed position, while all other checks of the poll succeed.
#[tokio::test(flavor = "multi_thread")]
async fn a_line_that_each_poll_would_repeat_is_logged_once_in_ten_seconds() {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    let host = emulator.addr().to_string();
    // With a timeout of 8 s the relay polls once a second, because it polls eight times per timeout.
    let poll_each_second = [
        ("POSTRIDER_WAL_SENDER_TIMEOUT_S", "8"),
        ("POSTRIDER_PUBLISH_TIMEOUT_S", "1"),
    ];
    let relay = Relay::start_with(&database, &host, &poll_each_second);
    relay.wait_for_log("streaming").await;
    // A sequence keeps its value when the statement fails, so it counts the attempts.
    database
        .execute(
            "CREATE SEQUENCE attempts; \
             CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
                 PERFORM nextval('public.attempts'); RAISE EXCEPTION 'refused'; END $$; \
             CREATE TRIGGER refuse BEFORE UPDATE OF confirmed_lsn ON outbox.relay \
                 FOR EACH ROW EXECUTE FUNCTION refuse()",
        )
        .await;
    eventually("four polls fail", || async {
        insert_orders(&database, 1, 1).await;
        let attempts = "SELECT last_value FROM attempts";
        (database.number(attempts).await >= 4).then_some(())
    })
    .await;
    let log = relay.log();
    let lines = log.matches("cannot write the confirmed position").count();
    assert_eq!(lines, 1, "{log}");
    relay.kill_9();
}
