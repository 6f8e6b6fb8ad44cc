//! Tests with a server that has few free connections or slots, or with a limit on the relay's role. Each
//! limit has its own error code, and the relay continues automatically once there is room. The relay uses
//! no more connections than the docs say.

use std::time::Duration;

use pubsub_emulator::RunningEmulator;
use replication::{Confirmable, Environment, Source, StreamOptions, Target};
use scratch_postgres::{ScratchPostgres, StopMode};
use tokio_postgres::Client;

use crate::harness::{self, Database, Relay, eventually, insert_orders, postrider};
use crate::privileges::login_role;

/// Maximum number of connections that a relay normally uses, according to docs/reference/postgresql.md.
const CONNECTIONS: i64 = 6;

/// Starts a server with `settings`. Returns its prepared database, an emulator, and the URL for the
/// relay's role.
async fn server_with(settings: &[(&str, &str)]) -> (Database, RunningEmulator, String) {
    let mut builder = ScratchPostgres::builder();
    for (name, value) in settings {
        builder = builder.setting(name, value);
    }
    let database = Database::on(builder.start().unwrap()).await;
    let url = login_role(&database).await;
    (database, harness::emulator().await, url)
}

fn start(database: &Database, emulator: &RunningEmulator, url: &str) -> Relay {
    let host = emulator.addr().to_string();
    Relay::start_with(database, &host, &[("DATABASE_URL", url)])
}

/// The JSON output of `postrider check`, run as the relay's role.
fn check(url: &str) -> String {
    let environment = [("DATABASE_URL", url), ("PUBSUB_PROJECT_ID", "demo")];
    let ran = postrider(&["check", "--json"], &environment).output();
    String::from_utf8(ran.unwrap().stdout).unwrap()
}

/// The severity of the finding `code` in the output of `check`.
fn severity(checked: &str, code: &str) -> Option<String> {
    let json: serde_json::Value = serde_json::from_str(checked).unwrap();
    let findings = json["findings"].as_array().unwrap();
    let found = findings.iter().find(|finding| finding["code"] == code)?;
    found["severity"].as_str().map(str::to_owned)
}

async fn delivers(database: &Database, emulator: &RunningEmulator) {
    insert_orders(database, 20, 5).await;
    database.wait_until_recorded().await;
    let report = harness::check(database, emulator).await;
    assert!(report.is_clean(), "{report}");
}

async fn sessions(url: &str, count: usize) -> Vec<Client> {
    let mut sessions = Vec::new();
    for _ in 0..count {
        sessions.push(harness::connect(url).await);
    }
    sessions
}

#[tokio::test(flavor = "multi_thread")]
async fn one_slot_one_walsender_and_six_connections_are_enough_for_the_relay() {
    let settings = [("max_wal_senders", "1"), ("max_replication_slots", "1")];
    let (database, emulator, url) = server_with(&settings).await;
    database
        .execute(&format!(
            "ALTER ROLE shop_relay CONNECTION LIMIT {CONNECTIONS}"
        ))
        .await;
    let relay = start(&database, &emulator, &url);
    delivers(&database, &emulator).await;
    database
        .execute(
            "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, payload, headers) \
             VALUES ('order', 'o-bad', 'Bad', '{}', jsonb_build_object('long', repeat('x', 2000)))",
        )
        .await;
    database.wait_until_recorded().await;
    database.wait_until_audited().await;
    database
        .execute("UPDATE outbox.dispatch SET state = 'released' WHERE state = 'quarantined'")
        .await;
    eventually(
        "the released event is published or back in quarantine",
        || async {
            let waiting = "SELECT count(*) FROM outbox.dispatch WHERE state = 'released'";
            (database.number(waiting).await == 0).then_some(())
        },
    )
    .await;
    let log = relay.log();
    assert!(
        !log.contains("connection-limit") && !log.contains("used-up"),
        "{log}"
    );
    // The walsender of the killed relay may hold the slot for a moment longer. `drop_slot` waits until the
    // walsender has ended.
    relay.kill_9();
    database.drop_slot().await;
    insert_orders(&database, 20, 5).await;
    let relay = start(&database, &emulator, &url);
    relay.wait_for_log("recovered").await;
    insert_orders(&database, 20, 5).await;
    database.wait_until_recorded().await;
    database.wait_until_audited().await;
    let used = database
        .number("SELECT count(*) FROM pg_stat_activity WHERE usename = 'shop_relay'")
        .await;
    assert!(used <= CONNECTIONS, "{used}");
    let log = relay.log();
    assert!(!log.contains("connection-limit"), "{log}");
    relay.stop().await;
}

/// Another program that streams the slot `other`. It occupies the server's only walsender until the returned
/// value is dropped.
async fn stream_of_another_program(database: &Database, url: &str) -> Source {
    let create = "SELECT lsn::text FROM pg_create_logical_replication_slot('other', 'pgoutput')";
    let created = database.client.query_one(create, &[]).await.unwrap();
    let start: String = created.get(0);
    let target = Target::from_settings(url, &Environment::new()).unwrap();
    let options = StreamOptions {
        target: target.unwrap(),
        slot: "other".into(),
        publication: "postrider".into(),
        application_name: "another program".into(),
        wal_sender_timeout: Duration::from_secs(60),
        confirmed: Confirmable::by_slot(start.parse().unwrap()),
    };
    Source::open(options, || {}).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_waits_for_a_free_walsender_and_check_reports_the_limit() {
    let (database, emulator, url) = server_with(&[("max_wal_senders", "1")]).await;
    let other = stream_of_another_program(&database, &url).await;
    let checked = check(&url);
    assert_eq!(
        severity(&checked, "wal-senders-used-up").as_deref(),
        Some("error"),
        "{checked}"
    );
    let relay = start(&database, &emulator, &url);
    relay.wait_for_log("wal-senders-used-up").await;
    drop(other);
    insert_orders(&database, 20, 5).await;
    database.wait_until_recorded().await;
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_that_lost_its_slot_waits_for_a_free_one() {
    let (mut database, emulator, url) = server_with(&[("max_replication_slots", "1")]).await;
    let relay = start(&database, &emulator, &url);
    delivers(&database, &emulator).await;
    relay.stop().await;
    database.drop_slot().await;
    database
        .execute("SELECT pg_create_physical_replication_slot('taken')")
        .await;
    let checked = check(&url);
    assert!(
        severity(&checked, "replication-slots-used-up").is_some(),
        "{checked}"
    );
    let environment = [
        ("DATABASE_URL", url.as_str()),
        ("POSTRIDER_SLOT", "another"),
    ];
    database
        .execute("UPDATE outbox.capture SET slot = 'another'")
        .await;
    let ran = postrider(&["slot", "create"], &environment).output();
    let said = String::from_utf8(ran.unwrap().stderr).unwrap();
    assert!(said.contains("error[replication-slots-used-up]"), "{said}");
    database
        .execute("UPDATE outbox.capture SET slot = 'postrider'")
        .await;
    let attempts = |log: String| log.matches("all replication slots are in use").count();
    let before = attempts(database.server().log().unwrap());
    let relay = start(&database, &emulator, &url);
    relay.wait_for_log("replication-slots-used-up").await;
    eventually("the relay tries again and again", || {
        let now = attempts(database.server().log().unwrap());
        std::future::ready((now >= before + 4).then_some(()))
    })
    .await;
    // Each attempt is a recovery that fails. The cause of the first is the missing slot. The cause of all later ones is
    // the unfinished recovery. The relay logs each cause once, because it suppresses lines with the same cause that
    // follow soon.
    let lines = relay.log().matches("recovering: ").count();
    assert_eq!(lines, 2, "{}", relay.log());
    database
        .execute("SELECT pg_drop_replication_slot('taken')")
        .await;
    delivers(&database, &emulator).await;
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn each_connection_limit_has_its_code_and_the_relay_continues_once_one_is_free() {
    let settings = [
        ("max_connections", "12"),
        ("superuser_reserved_connections", "4"),
    ];
    let (mut database, emulator, url) = server_with(&settings).await;
    let version = "SELECT current_setting('server_version_num')::bigint";
    if database.number(version).await >= 160_000 {
        // Reserve the same number of connections, but half of them with `reserved_connections`.
        let server = database.server();
        server.set("superuser_reserved_connections", "2").unwrap();
        server.set("reserved_connections", "2").unwrap();
        server.restart(StopMode::Fast).unwrap();
        database.reconnect().await;
    } else {
        eprintln!("SKIPPED in part: reserved_connections needs PostgreSQL 16");
    }
    for (limit, code, relief, taken) in [
        (
            "ALTER ROLE shop_relay CONNECTION LIMIT 2",
            "role-connection-limit",
            "ALTER ROLE shop_relay CONNECTION LIMIT -1",
            0,
        ),
        (
            "ALTER DATABASE postgres CONNECTION LIMIT 3",
            "database-connection-limit",
            "ALTER DATABASE postgres CONNECTION LIMIT -1",
            0,
        ),
        ("SELECT 1", "postgres-too-many-connections", "SELECT 1", 7),
    ] {
        database.execute(limit).await;
        let sessions = sessions(&url, taken).await;
        let checked = check(&url);
        let found = severity(&checked, code);
        assert!(
            matches!(found.as_deref(), Some("warning" | "error")),
            "{code}: {checked}"
        );
        let relay = start(&database, &emulator, &url);
        relay.wait_for_log(code).await;
        drop(sessions);
        database.execute(relief).await;
        delivers(&database, &emulator).await;
        relay.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_waits_while_its_database_accepts_no_connections() {
    let (mut database, emulator, url) = server_with(&[]).await;
    let relay = start(&database, &emulator, &url);
    delivers(&database, &emulator).await;
    let elsewhere = harness::connect(&database.server().url("template1")).await;
    let close = "ALTER DATABASE postgres ALLOW_CONNECTIONS false";
    elsewhere.batch_execute(close).await.unwrap();
    let end = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity \
               WHERE usename = 'shop_relay'";
    elsewhere.batch_execute(end).await.unwrap();
    relay.wait_for_log("code=database-closed").await;
    insert_orders(&database, 20, 5).await;
    let open = "ALTER DATABASE postgres ALLOW_CONNECTIONS true";
    elsewhere.batch_execute(open).await.unwrap();
    delivers(&database, &emulator).await;
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_role_that_pg_hba_rejects_gets_its_own_error() {
    let server = ScratchPostgres::builder()
        .hba_line("host all shop_relay 127.0.0.1/32 reject")
        .start()
        .unwrap();
    let database = Database::on(server).await;
    let emulator = harness::emulator().await;
    let url = login_role(&database).await;
    let checked = check(&url);
    assert_eq!(
        severity(&checked, "postgres-hba").as_deref(),
        Some("error"),
        "{checked}"
    );
    let relay = start(&database, &emulator, &url);
    relay.wait_for_error("postgres-hba").await;
    assert_eq!(relay.wait().await.code(), Some(3));
}

#[tokio::test(flavor = "multi_thread")]
async fn timeouts_and_read_only_defaults_of_role_and_database_have_no_effect() {
    let (database, emulator, url) = server_with(&[]).await;
    for setting in [
        "default_transaction_read_only = on",
        "statement_timeout = '1ms'",
        "lock_timeout = '1ms'",
        "idle_in_transaction_session_timeout = '1ms'",
        "idle_session_timeout = '1ms'",
    ] {
        database
            .execute(&format!(
                "ALTER ROLE shop_relay SET {setting}; ALTER DATABASE postgres SET {setting}"
            ))
            .await;
    }
    let relay = start(&database, &emulator, &url);
    delivers(&database, &emulator).await;
    database.wait_until_audited().await;
    relay.stop().await;
    database.drop_slot().await;
    // Keep a transaction open in a session without timeouts. PostgreSQL cannot create the new slot before
    // this transaction ends, and so waits for longer than the role's `lock_timeout`.
    let without = "default_transaction_read_only=off statement_timeout=0 lock_timeout=0 \
                   idle_in_transaction_session_timeout=0 idle_session_timeout=0";
    let without = without
        .split(' ')
        .map(|set| format!("-c%20{}", set.replace('=', "%3D")));
    let without = without.collect::<Vec<_>>().join("%20");
    let writer = harness::connect(&format!("{}?options={without}", database.url)).await;
    writer
        .batch_execute(
            "BEGIN; \
             INSERT INTO outbox.events (aggregatetype, aggregateid, event_type) \
             VALUES ('order', 'o-late', 'Placed')",
        )
        .await
        .unwrap();
    let relay = start(&database, &emulator, &url);
    relay.wait_for_log("recovering").await;
    eventually("the new slot waits for the transaction", || async {
        let waiting = "SELECT count(*) FROM pg_stat_activity \
                       WHERE usename = 'shop_relay' AND wait_event_type = 'Lock'";
        (database.number(waiting).await == 1).then_some(())
    })
    .await;
    writer.batch_execute("COMMIT").await.unwrap();
    relay.wait_for_log("recovered").await;
    insert_orders(&database, 20, 5).await;
    database.wait_until_recorded().await;
    let log = relay.log();
    for code in [
        "postgres-timeout",
        "postgres-standby",
        "postgres-connection-lost",
    ] {
        assert!(!log.contains(code), "{log}");
    }
    let environment = [("DATABASE_URL", url.as_str())];
    let ran = postrider(&["slot", "show"], &environment).output().unwrap();
    assert!(
        ran.status.code() <= Some(1),
        "{}",
        String::from_utf8_lossy(&ran.stderr)
    );
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_strangers_session_named_like_a_writer_is_left_alone_and_delays_nothing() {
    let (database, emulator, url) = server_with(&[]).await;
    // Let the relay's role see that the stranger's session has an open transaction.
    database
        .execute(
            "GRANT pg_read_all_stats TO shop_relay; CREATE ROLE stranger LOGIN; \
             GRANT CREATE ON SCHEMA public TO stranger",
        )
        .await;
    let stranger = harness::connect(&format!(
        "{}?application_name=postrider%20dispatch%20postrider",
        url.replace("shop_relay@", "stranger@")
    ))
    .await;
    stranger
        .batch_execute("BEGIN; CREATE TABLE public.of_a_stranger ()")
        .await
        .unwrap();
    let began = std::time::Instant::now();
    let relay = start(&database, &emulator, &url);
    delivers(&database, &emulator).await;
    assert!(began.elapsed().as_secs() < 5, "{}", relay.log());
    // Force the relay to open another session.
    database
        .execute("SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE active")
        .await;
    delivers(&database, &emulator).await;
    let log = relay.log();
    let told = log.matches("under the name of a relay").count();
    assert_eq!(told, 1, "{log}");
    stranger.batch_execute("COMMIT").await.unwrap();
    relay.stop().await;
}
