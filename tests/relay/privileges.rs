//! Tests of a relay that runs as the role that the migrations create. The rights of that role are enough,
//! none of them is superfluous, and errors name a right that is missing (`named`).

mod named;

use pubsub_emulator::RunningEmulator;
use tokio_postgres::NoTls;
use tokio_postgres::error::SqlState;

use crate::harness::{self, Database, Relay, eventually, insert_orders, postrider};

/// Creates a login role with the rights of `postrider_relay`. Returns the URL that logs in as this
/// role.
pub(crate) async fn login_role(database: &Database) -> String {
    database
        .execute("CREATE ROLE shop_relay LOGIN REPLICATION IN ROLE postrider_relay")
        .await;
    database.url.replace("postgres@", "shop_relay@")
}

#[tokio::test(flavor = "multi_thread")]
async fn the_whole_relay_runs_with_the_rights_of_its_role() {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    let url = login_role(&database).await;
    // Some organisations let nobody call a new function by default.
    database
        .execute("REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA outbox FROM PUBLIC")
        .await;
    let host = emulator.addr().to_string();
    let run = || Relay::start_with(&database, &host, &[("DATABASE_URL", url.as_str())]);
    let relay = run();
    insert_orders(&database, 100, 5).await;
    database.wait_until_recorded().await;
    relay.kill_9();
    insert_orders(&database, 100, 5).await;
    let relay = run();
    database.wait_until_recorded().await;
    database.wait_until_confirmed().await;
    relay.stop().await;
    database.drop_slot().await;
    let relay = run();
    relay.wait_for_log("recovered").await;
    relay.stop().await;
    let report = harness::check(&database, &emulator).await;
    assert!(report.is_clean(), "{report}");
}

/// The rights of `shop_relay` on a table, as `GRANT` names them, separated by spaces.
async fn rights(database: &Database, table: &str) -> String {
    database
        .text(&format!(
            "SELECT coalesce(string_agg(right_, ' ' ORDER BY right_), '') FROM unnest('{{SELECT, \
             INSERT, UPDATE, DELETE, TRUNCATE, REFERENCES, TRIGGER}}'::text[]) right_ \
             WHERE has_table_privilege('shop_relay', '{table}', right_)"
        ))
        .await
}

/// Claims about the role's rights, each with a query that counts the violations.
const CLAIMS: [(&str, &str); 6] = [
    (
        "has no right to anything else in the schema",
        "SELECT count(*) FROM pg_class WHERE relnamespace = 'outbox'::regnamespace \
         AND relkind IN ('r', 'p', 'v', 'm', 'f') \
         AND relname NOT IN ('events', 'dispatch', 'relay', 'capture', 'replay', 'replay_event') \
         AND has_table_privilege('shop_relay', oid, 'SELECT, INSERT, UPDATE')",
    ),
    (
        "has no right to delete, truncate, reference or add triggers in the schema",
        "SELECT count(*) FROM pg_class WHERE relnamespace = 'outbox'::regnamespace \
         AND relkind IN ('r', 'p') \
         AND (has_table_privilege('shop_relay', oid, 'TRUNCATE, REFERENCES, TRIGGER') \
              OR relname <> 'replay_event' AND has_table_privilege('shop_relay', oid, 'DELETE'))",
    ),
    (
        "owns nothing",
        "SELECT (SELECT count(*) FROM pg_class c JOIN pg_roles r ON r.oid = c.relowner \
                 WHERE pg_has_role('shop_relay', r.oid, 'USAGE')) \
              + (SELECT count(*) FROM pg_proc p JOIN pg_roles r ON r.oid = p.proowner \
                 WHERE pg_has_role('shop_relay', r.oid, 'USAGE'))",
    ),
    (
        "creates nothing, in its schema or in the database",
        "SELECT has_schema_privilege('shop_relay', 'outbox', 'CREATE')::int::bigint \
              + has_database_privilege('shop_relay', current_database(), 'CREATE')::int",
    ),
    (
        "has no attribute except REPLICATION",
        "SELECT count(*) FROM pg_roles WHERE rolname IN ('shop_relay', 'postrider_relay') \
         AND (rolsuper OR rolcreaterole OR rolcreatedb OR rolbypassrls)",
    ),
    (
        "cannot emit events",
        "SELECT count(*) FROM pg_proc WHERE pronamespace = 'outbox'::regnamespace \
         AND proname = 'emit' AND has_function_privilege('shop_relay', oid, 'EXECUTE')",
    ),
];

#[tokio::test(flavor = "multi_thread")]
async fn the_role_can_only_read_the_outbox_and_write_its_own_records() {
    let database = Database::private().await;
    let url = login_role(&database).await;
    assert_eq!(rights(&database, "outbox.events").await, "SELECT");
    let own = [
        "outbox.dispatch",
        "outbox.relay",
        "outbox.capture",
        "outbox.replay",
    ];
    for own in own {
        assert_eq!(
            rights(&database, own).await,
            "INSERT SELECT UPDATE",
            "{own}"
        );
    }
    for (claim, sql) in CLAIMS {
        assert_eq!(database.number(sql).await, 0, "{claim}");
    }

    let (client, connection) = tokio_postgres::connect(&url, NoTls).await.unwrap();
    tokio::spawn(connection);
    for sql in [
        "INSERT INTO outbox.events (aggregatetype, event_type) VALUES ('a', 'b')",
        "UPDATE outbox.events SET payload = NULL",
        "DELETE FROM outbox.events",
        "TRUNCATE outbox.events",
        "DELETE FROM outbox.dispatch",
        "DELETE FROM outbox.relay",
        "ALTER TABLE outbox.events DISABLE TRIGGER ALL",
        "ALTER PUBLICATION postrider DROP TABLE outbox.events",
        "CREATE TABLE outbox.mine (id int)",
        "CREATE ROLE another",
        "ALTER SYSTEM SET wal_level = 'replica'",
        "COPY (SELECT 1) TO PROGRAM 'true'",
        "SELECT pg_read_file('PG_VERSION')",
    ] {
        let error = client.batch_execute(sql).await.expect_err(sql);
        let refused = [
            &SqlState::INSUFFICIENT_PRIVILEGE,
            // Allow this error too, because the trigger that keeps the outbox insert-only may refuse the
            // statement first.
            &SqlState::RESTRICT_VIOLATION,
        ];
        let code = error.code().unwrap_or_else(|| panic!("{sql}: {error:?}"));
        assert!(refused.contains(&code), "{sql}: {error:?}");
    }
}

/// Takes a right away from the relay's role with the SQL `revoke`, and starts a relay. Only a part of the
/// relay's work needs this right.
async fn run_without(database: &Database, emulator: &RunningEmulator, revoke: &str) -> Relay {
    let url = login_role(database).await;
    database.execute(revoke).await;
    let host = emulator.addr().to_string();
    Relay::start_with(database, &host, &[("DATABASE_URL", url.as_str())])
}

async fn wait_for_states(database: &Database, wanted: &str) {
    let states = "SELECT coalesce(string_agg(state || ' ' || n, ', ' ORDER BY state), '') FROM \
                  (SELECT state, count(*) AS n FROM outbox.dispatch GROUP BY state) s";
    eventually(wanted, || async {
        (database.text(states).await == wanted).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_select_on_the_outbox_events_flow_and_the_audit_names_the_right() {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    let revoke = "REVOKE SELECT ON outbox.events FROM postrider_relay";
    let relay = run_without(&database, &emulator, revoke).await;
    insert_orders(&database, 20, 5).await;
    database.wait_until_recorded().await;
    let audited = "SELECT count(*) FROM outbox.relay WHERE audited_at IS NOT NULL";
    eventually("the audit names the missing right", || async {
        let log = relay.log();
        let mut lines = log.lines();
        lines
            .any(|line| {
                line.contains("cannot compare the tables")
                    && line.contains("privilege-missing")
                    && line.contains("GRANT SELECT ON outbox.events TO shop_relay")
            })
            .then_some(())
    })
    .await;
    assert_eq!(database.number(audited).await, 0);
    database
        .execute("GRANT SELECT ON outbox.events TO postrider_relay")
        .await;
    eventually("the audit is completed", || async {
        (database.number(audited).await == 1).then_some(())
    })
    .await;
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_select_on_the_outbox_a_recovery_stops_and_names_the_right() {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    let relay = Relay::start(&database, &emulator);
    insert_orders(&database, 20, 5).await;
    database.wait_until_recorded().await;
    relay.stop().await;
    database.drop_slot().await;
    let revoke = "REVOKE SELECT ON outbox.events FROM postrider_relay";
    let relay = run_without(&database, &emulator, revoke).await;
    relay.wait_for_error("privilege-missing").await;
    let log = relay.log();
    let granted = "GRANT SELECT ON outbox.events TO shop_relay";
    assert!(log.contains(granted), "{log}");
    assert_eq!(relay.wait().await.code(), Some(3), "{log}");
}

#[tokio::test(flavor = "multi_thread")]
async fn without_update_on_dispatch_events_flow_and_a_release_names_the_right() {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    let revoke = "REVOKE UPDATE ON outbox.dispatch FROM postrider_relay";
    let relay = run_without(&database, &emulator, revoke).await;
    database
        .execute(
            "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, headers) \
             VALUES ('order', 'o-0', 'Headers', '[1]')",
        )
        .await;
    insert_orders(&database, 20, 2).await;
    wait_for_states(&database, "published 10, quarantined 11").await;
    // The relay's role has no right to release the event, so an operator with more rights does it.
    let environment = [("DATABASE_URL", database.url.as_str())];
    let asked = postrider(&["quarantine", "release", "--all"], &environment).output();
    assert!(asked.unwrap().status.success());
    eventually("the relay names the missing right", || async {
        let log = relay.log();
        let mut lines = log.lines();
        lines
            .any(|line| {
                line.contains("cannot process released events")
                    && line.contains("privilege-missing")
                    && line.contains("GRANT UPDATE ON outbox.dispatch TO shop_relay")
            })
            .then_some(())
    })
    .await;
    insert_orders(&database, 20, 2).await;
    database.wait_until_recorded().await;
    // Correct the event and grant the right again.
    database
        .execute(
            "ALTER TABLE outbox.events DISABLE TRIGGER ALL; \
             UPDATE outbox.events SET headers = NULL WHERE event_type = 'Headers'; \
             ALTER TABLE outbox.events ENABLE TRIGGER ALL; \
             GRANT UPDATE ON outbox.dispatch TO postrider_relay",
        )
        .await;
    wait_for_states(&database, "published 41").await;
    relay.stop().await;
}
