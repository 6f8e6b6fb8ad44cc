//! Tests in which a role, a database or a table has settings that the relay does not expect. The relay
//! overrides these settings, or reports what to change. The relay loses and repeats no event.

use std::time::Duration;

use pubsub_emulator::{Action, Fault, RunningEmulator};

use crate::harness::{self, Database, Relay, eventually, insert_orders, postrider};
use crate::load::Load;
use crate::privileges::login_role;

const ON: &str = "ALTER TABLE outbox.events ENABLE ROW LEVEL SECURITY";
const OFF: &str = "ALTER TABLE outbox.events DISABLE ROW LEVEL SECURITY";

/// Starts a private database and an emulator. Also returns the URL for the relay's role.
async fn with_its_role() -> (Database, RunningEmulator, String) {
    let database = Database::private().await;
    let url = login_role(&database).await;
    (database, harness::emulator().await, url)
}

fn start(database: &Database, emulator: &RunningEmulator, url: &str) -> Relay {
    let host = emulator.addr().to_string();
    Relay::start_with(database, &host, &[("DATABASE_URL", url)])
}

/// The positions of the slot, and the recovery mark of `outbox.relay`. The text changes when the relay
/// changes the slot or begins a recovery.
async fn slot(database: &Database) -> String {
    database
        .text(
            "SELECT concat_ws(' ', s.restart_lsn, s.confirmed_flush_lsn, s.catalog_xmin, r.recovering) \
             FROM pg_replication_slots s JOIN outbox.relay r ON r.slot = s.slot_name",
        )
        .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_recovery_whose_rows_are_hidden_by_policies_stops_before_any_change() {
    let (database, emulator, url) = with_its_role().await;
    let run = || start(&database, &emulator, &url);
    let relay = run();
    insert_orders(&database, 50, 5).await;
    database.wait_until_recorded().await;
    database.wait_until_confirmed().await;
    relay.stop().await;
    database.execute(ON).await;
    insert_orders(&database, 50, 5).await;
    // Create a new slot after the rows, so that the rows are only in their table.
    database.drop_slot().await;
    database
        .execute("SELECT pg_create_logical_replication_slot('postrider', 'pgoutput')")
        .await;
    let before = slot(&database).await;
    let relay = run();
    relay.wait_for_error("privilege-missing").await;
    let log = relay.log();
    assert!(log.contains("BYPASSRLS"), "{log}");
    assert_eq!(relay.wait().await.code(), Some(3), "{log}");
    assert_eq!(slot(&database).await, before, "{log}");

    let environment = [
        ("DATABASE_URL", url.as_str()),
        ("PUBSUB_PROJECT_ID", "demo"),
    ];
    let ran = postrider(&["recover", "--dry-run"], &environment).output();
    let said = String::from_utf8(ran.unwrap().stderr).unwrap();
    assert!(said.contains("error[privilege-missing]"), "{said}");
    let ran = postrider(&["check"], &environment).output();
    let said = String::from_utf8(ran.unwrap().stdout).unwrap();
    assert!(said.contains("bypassrls"), "{said}");

    database.execute("ALTER ROLE shop_relay BYPASSRLS").await;
    let relay = run();
    database.wait_until_recorded().await;
    let report = harness::check(&database, &emulator).await;
    assert!(
        report.is_clean() && report.duplicates.is_empty(),
        "{report}\n{}",
        relay.log()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn under_row_level_security_events_flow_and_the_audit_reports_that_it_cannot_see_them() {
    let (database, emulator, url) = with_its_role().await;
    database.execute(ON).await;
    let relay = start(&database, &emulator, &url);
    insert_orders(&database, 20, 5).await;
    database.wait_until_recorded().await;
    eventually("the audit names the missing attribute", || async {
        let log = relay.log();
        let mut lines = log.lines();
        let says =
            |line: &str| line.contains("cannot compare the tables") && line.contains("BYPASSRLS");
        lines.any(says).then_some(())
    })
    .await;
    let audited = "SELECT count(*) FROM outbox.relay WHERE audited_at IS NOT NULL";
    assert_eq!(database.number(audited).await, 0);
    database.execute(OFF).await;
    eventually("the audit is completed", || async {
        (database.number(audited).await == 1).then_some(())
    })
    .await;
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn row_level_security_on_the_relays_own_tables_refuses_the_start() {
    let (database, emulator, url) = with_its_role().await;
    let run = || start(&database, &emulator, &url);
    let relay = run();
    insert_orders(&database, 20, 5).await;
    database.wait_until_recorded().await;
    relay.stop().await;
    for table in ["outbox.dispatch", "outbox.relay"] {
        let alter = |what: &str| format!("ALTER TABLE {table} {what} ROW LEVEL SECURITY");
        database.execute(&alter("ENABLE")).await;
        let relay = run();
        relay.wait_for_error("privilege-missing").await;
        assert_eq!(relay.wait().await.code(), Some(3), "{table}");
        database.execute(&alter("DISABLE")).await;
    }
    assert_eq!(emulator.journal().counts().stored_messages, 20);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stricter_isolation_level_makes_no_audit_repeat_events_in_flight() {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    let slow = Action::Delay(Duration::from_millis(50));
    emulator.faults().inject(Fault::new(slow));
    database
        .execute(
            "ALTER DATABASE postgres SET default_transaction_isolation = 'repeatable read'; \
             ALTER ROLE postgres SET default_transaction_isolation = 'serializable'",
        )
        .await;
    let relay = Relay::start(&database, &emulator);
    let load = Load::start(&database);
    let audited = "SELECT coalesce(max(audited_publication), '') FROM outbox.relay";
    for _ in 0..4 {
        load.wait_for_rows(50).await;
        let before = database.text(audited).await;
        // The value of `publish` does not change, but the statement rewrites the catalogue row
        // (`xmin`), so the auditor compares everything.
        database
            .execute("ALTER PUBLICATION postrider SET (publish = 'insert')")
            .await;
        eventually("everything is compared", || async {
            (database.text(audited).await != before).then_some(())
        })
        .await;
    }
    load.stop().await;
    database.wait_until_recorded().await;
    database.wait_until_confirmed().await;
    let report = harness::check_streamed(&database, &emulator).await;
    assert!(
        report.is_clean() && report.duplicates.is_empty(),
        "{report}\n{}",
        relay.log()
    );
}

/// Types of ids whose text form depends on the settings of the session, each with a value.
const ID_TYPES: [(&str, &str); 4] = [
    ("double precision", "0.1234567"),
    ("interval", "1 day 02:03:04"),
    ("timestamptz", "2026-01-02 03:04:05+00"),
    ("regclass", "outbox.events"),
];

#[tokio::test(flavor = "multi_thread")]
async fn settings_of_the_role_change_no_id_and_fill_no_log() {
    let (database, emulator, url) = with_its_role().await;
    database
        .execute(
            "ALTER ROLE shop_relay SET client_min_messages = 'debug5'; \
             ALTER ROLE shop_relay SET extra_float_digits = '-15'; \
             ALTER ROLE shop_relay SET intervalstyle = 'iso_8601'; \
             ALTER ROLE shop_relay SET quote_all_identifiers = 'on'; \
             ALTER ROLE shop_relay SET datestyle = 'German'; \
             ALTER ROLE shop_relay SET timezone = 'Asia/Tokyo'",
        )
        .await;
    let mut toml = String::new();
    let mut names = Vec::new();
    for (n, (id, value)) in ID_TYPES.iter().enumerate() {
        let table = format!("public.of_role_{n}");
        database
            .execute(&format!(
                "CREATE TABLE {table} (id {id}, aggregatetype text, aggregateid text, \
                     event_type text, payload text); GRANT SELECT ON {table} TO postrider_relay"
            ))
            .await;
        toml += &format!("[[tables]]\ntable = '{table}'\n");
        names.push((table, *value));
    }
    let list: Vec<&str> = names.iter().map(|(table, _)| table.as_str()).collect();
    let publish = format!("ALTER PUBLICATION postrider SET TABLE {}", list.join(", "));
    database.execute(&publish).await;
    let file = crate::mapping::settings(&toml);
    let config = file.path().display().to_string();
    let host = emulator.addr().to_string();
    let more = [
        ("DATABASE_URL", url.as_str()),
        ("POSTRIDER_CONFIG", &config),
    ];
    let relay = Relay::start_with(&database, &host, &more);
    relay.wait_for_log("streaming").await;
    for (table, value) in &names {
        database
            .execute(&format!(
                "INSERT INTO {table} VALUES ('{value}', 'order', '{table}', 'E', '1')"
            ))
            .await;
    }
    database
        .execute("SET timezone = 'UTC'; SET search_path = pg_catalog")
        .await;
    eventually(
        "each event is recorded under the id that SQL computes",
        || async {
            let mut found = 0;
            for (table, _) in &names {
                let recorded = format!(
                    "SELECT count(*) FROM {table} e JOIN outbox.dispatch d ON d.event_id \
                     = outbox.event_uuid('{table}', format('%s', e.id), null) \
                 AND d.source_id = '{table}:' || format('%s', e.id)"
                );
                found += database.number(&recorded).await;
            }
            (found == 4).then_some(())
        },
    )
    .await;
    let log = relay.log();
    assert!(!log.contains("warning from PostgreSQL"), "{log}");
    relay.stop().await;
}
