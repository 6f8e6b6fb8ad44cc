//! Tests each preflight finding on a server that has the problem.

use scratch_postgres::{ScratchPostgres, StopMode};
use slot_manager::preflight::{Expectation, check};
use slot_manager::publication::CapturedTable;
use slot_manager::slots::{self, CreateOptions};
use slot_manager::{Finding, QualifiedName, Severity};
use tokio_postgres::Client;

use crate::support::{
    PATIENCE, Reader, builder, connect, eventually, major, new_database, run, shared_server,
    skipped, slot_name, superuser,
};

const TABLES: &str = "
    create schema outbox;
    create table outbox.events (id uuid primary key, payload jsonb);
    create table outbox.dispatch (event_id uuid);
    create table outbox.relay (slot text primary key);
    create table outbox.capture (identity text primary key);
    create publication postrider for table outbox.events with (publish = 'insert')";

fn expectation(slot: &str) -> Expectation {
    Expectation {
        slot: slot_name(slot),
        publication: "postrider".to_owned(),
        tables: vec![CapturedTable {
            name: QualifiedName::new("outbox", "events"),
            columns: vec!["id".to_owned(), "payload".to_owned()],
            optional_columns: Vec::new(),
        }],
        dispatch: Some(QualifiedName::new("outbox", "dispatch")),
        relay: QualifiedName::new("outbox", "relay"),
        capture: QualifiedName::new("outbox", "capture"),
    }
}

async fn findings(client: &Client, slot: &str) -> Vec<Finding> {
    check(client, &expectation(slot)).await.expect("check")
}

/// Returns the finding with this code. If there is none, the test fails and shows all findings.
fn with_code<'a>(findings: &'a [Finding], code: &str) -> &'a Finding {
    findings
        .iter()
        .find(|f| f.code == code)
        .unwrap_or_else(|| panic!("{code} in {findings:#?}"))
}

fn errors(findings: &[Finding]) -> Vec<&'static str> {
    findings
        .iter()
        .filter(|f| f.severity == Severity::Error)
        .map(|f| f.code)
        .collect()
}

async fn server_with(settings: &[(&str, &str)]) -> (ScratchPostgres, Client) {
    let builder = settings
        .iter()
        .fold(builder(), |b, (name, value)| b.setting(name, value));
    let server = builder.start().expect("start");
    let client = superuser(&server).await;
    run(&client, TABLES).await;
    (server, client)
}

#[tokio::test]
async fn a_prepared_database_has_no_warning_and_each_check_reports() {
    let (database, client) = new_database().await;
    run(&client, TABLES).await;
    let found = findings(&client, &database).await;
    assert!(
        found.iter().all(|f| f.severity <= Severity::Info),
        "{found:#?}"
    );
    for code in [
        "server-version",
        "primary",
        "wal-level",
        "replication-right",
        "statistics-right",
        "wal-senders",
        "replication-slots",
        "role-connection-limit",
        "database-connection-limit",
        "postgres-too-many-connections",
        "wal-sender-timeout",
        "direct-connection",
        "publication",
        "table-readable",
        "dispatch-table",
        "relay-table",
        "capture-table",
    ] {
        assert_eq!(with_code(&found, code).severity, Severity::Ok, "{code}");
    }
    assert_eq!(
        with_code(&found, "slot-wal-unlimited").severity,
        Severity::Info
    );
    assert_eq!(with_code(&found, "slot-missing").severity, Severity::Info);
    assert!(
        found
            .iter()
            .all(|f| (f.severity == Severity::Ok) == f.remedy.is_none())
    );
}

#[tokio::test]
async fn an_empty_database_lacks_publication_and_tables() {
    let (database, client) = new_database().await;
    let found = findings(&client, &database).await;
    let expected = [
        "schema-missing",
        "publication-missing",
        "schema-missing",
        "schema-missing",
        "schema-missing",
    ];
    assert_eq!(errors(&found), expected, "{found:#?}");
}

#[tokio::test]
async fn the_remedies_for_a_role_without_rights_grant_everything_it_needs() {
    let (database, client) = new_database().await;
    run(&client, TABLES).await;
    run(&client, &format!(r#"create role "{database} relay" login"#)).await;
    let url = shared_server().url(&database);
    let url = url.replace("postgres@", &format!("{database}%20relay@"));
    let relay = connect(&url).await;
    let found = findings(&relay, &database).await;
    let expected = [
        "replication-right",
        "privilege-missing",
        "privilege-missing",
        "privilege-missing",
        "privilege-missing",
    ];
    assert_eq!(errors(&found), expected, "{found:#?}");
    let recommended = with_code(&found, "statistics-right-missing");
    assert_eq!(recommended.severity, Severity::Info);
    let wrong = found.iter().filter(|f| f.severity == Severity::Error);
    for finding in wrong.chain([recommended]) {
        let remedy = finding.remedy.as_deref().expect("a remedy");
        let (sql, _hint) = remedy.split_once(" (").unwrap_or((remedy, ""));
        run(&client, sql).await;
    }
    let found = findings(&relay, &database).await;
    assert_eq!(errors(&found), [""; 0], "{found:#?}");
    with_code(&found, "statistics-right");

    // `ALTER ROLE ... SET role` changes the role of the statements, but not the role of a replication session.
    let roles = format!(
        r#"create role "{database} login" login replication in role "{database} relay";
           alter role "{database} login" set role = "{database} relay";
           alter role "{database} relay" with noreplication"#
    );
    run(&client, &roles).await;
    let url = shared_server().url(&database);
    let url = url.replace("postgres@", &format!("{database}%20login@"));
    let relay = connect(&url).await;
    let found = findings(&relay, &database).await;
    assert_eq!(errors(&found), [""; 0], "{found:#?}");
    let right = with_code(&found, "replication-right");
    assert_eq!(right.severity, Severity::Warning, "{right:?}");
    let limit = &with_code(&found, "role-connection-limit").what;
    assert!(limit.contains(&format!("role {database} login")), "{limit}");
}

#[tokio::test]
async fn row_level_security_that_applies_to_the_role_is_reported_with_its_remedy() {
    let (database, client) = new_database().await;
    run(&client, TABLES).await;
    for table in ["events", "dispatch", "relay"] {
        let sql = format!("alter table outbox.{table} enable row level security");
        run(&client, &sql).await;
    }
    // The role lacks grants as well, so keep only the findings about hidden rows.
    let hidden = |found: &[Finding]| -> Vec<Finding> {
        let about_rows = found.iter().filter(|finding| {
            finding.code == "privilege-missing" && finding.what.contains("row-level security")
        });
        about_rows.cloned().collect()
    };
    // Row-level security does not apply to a superuser.
    assert_eq!(hidden(&findings(&client, &database).await), []);
    run(&client, &format!(r#"create role "{database} rls" login"#)).await;
    let url = shared_server().url(&database);
    let relay = connect(&url.replace("postgres@", &format!("{database}%20rls@"))).await;
    let found = hidden(&findings(&relay, &database).await);
    assert_eq!(found.len(), 3, "{found:#?}");
    let remedy = found[0].remedy.as_deref();
    let (sql, _hint) = remedy.expect("a remedy").split_once(" (").unwrap();
    run(&client, sql).await;
    assert_eq!(hidden(&findings(&relay, &database).await), []);
}

#[tokio::test]
async fn harmful_settings_are_reported() {
    let (_server, client) = server_with(&[
        ("wal_level", "replica"),
        ("max_slot_wal_keep_size", "64MB"),
        ("wal_sender_timeout", "0"),
        ("max_replication_slots", "1"),
        ("max_wal_senders", "1"),
    ])
    .await;
    run(
        &client,
        "select pg_create_physical_replication_slot('taken')",
    )
    .await;
    let found = findings(&client, "postrider").await;
    assert_eq!(with_code(&found, "wal-level").severity, Severity::Error);
    assert_eq!(
        with_code(&found, "slot-wal-limit-small").severity,
        Severity::Warning
    );
    assert_eq!(
        with_code(&found, "wal-sender-timeout-off").severity,
        Severity::Info
    );
    // Two findings have this code. The warning says that the server has no free slot. The error says that the relay's
    // slot does not exist and cannot be created.
    let used_up = found
        .iter()
        .filter(|f| f.code == "replication-slots-used-up");
    let severities: Vec<Severity> = used_up.map(|f| f.severity).collect();
    assert_eq!(severities, [Severity::Warning, Severity::Error]);
    // The server has a single walsender, and it is free. The relay needs only one.
    assert_eq!(with_code(&found, "wal-senders").severity, Severity::Ok);
}

#[tokio::test]
async fn using_up_the_last_walsender_is_an_error_unless_it_reads_the_slot() {
    let (server, client) = server_with(&[("max_wal_senders", "1")]).await;
    let name = slot_name("held");
    slots::create(&client, &name, CreateOptions::default(), PATIENCE)
        .await
        .expect("create");
    assert_eq!(
        with_code(&findings(&client, "held").await, "slot").severity,
        Severity::Ok
    );
    let _reader = Reader::start(&server, "postgres", "held");
    let found = findings(&client, "another").await;
    assert_eq!(errors(&found), ["wal-senders-used-up"], "{found:#?}");
    let found = findings(&client, "held").await;
    assert!(errors(&found).is_empty(), "{found:#?}");
    assert!(
        with_code(&found, "slot-held")
            .what
            .contains("reader of held"),
        "{found:#?}"
    );
}

#[tokio::test]
async fn a_slot_of_the_wrong_kind_or_database_is_an_error() {
    let (database, client) = new_database().await;
    let (other, other_client) = new_database().await;
    run(&client, TABLES).await;
    let name = slot_name(&other);
    slots::create(&other_client, &name, CreateOptions::default(), PATIENCE)
        .await
        .expect("create");
    assert_eq!(errors(&findings(&client, &other).await), ["slot-foreign"]);
    let physical = format!("{database}_physical");
    run(
        &client,
        &format!("select pg_create_physical_replication_slot('{physical}')"),
    )
    .await;
    assert_eq!(
        errors(&findings(&client, &physical).await),
        ["slot-foreign"]
    );
}

#[tokio::test]
async fn a_publication_with_other_changes_or_without_the_table_is_reported() {
    let (database, client) = new_database().await;
    run(&client, TABLES).await;
    run(
        &client,
        "alter publication postrider set (publish = 'insert, update')",
    )
    .await;
    let found = findings(&client, &database).await;
    let finding = with_code(&found, "publication-publishes-other-changes");
    assert_eq!(finding.severity, Severity::Warning);
    run(
        &client,
        "alter publication postrider drop table outbox.events",
    )
    .await;
    assert_eq!(
        errors(&findings(&client, &database).await),
        ["publication-drift"]
    );
    run(&client, "alter table outbox.events rename payload to body").await;
    assert_eq!(
        errors(&findings(&client, &database).await),
        ["column-missing"]
    );
}

#[tokio::test]
async fn a_standby_is_refused() {
    let (mut primary, client) = server_with(&[]).await;
    drop(client);
    primary.stop(StopMode::Fast, PATIENCE).expect("stop");
    let standby = builder().standby_of(&primary).start().expect("standby");
    let found = findings(&superuser(&standby).await, "postrider").await;
    assert_eq!(errors(&found), ["postgres-standby"], "{found:#?}");
}

#[tokio::test]
async fn a_standby_slot_without_a_reader_stalls_delivery_from_17_on() {
    let (server, client) = server_with(&[]).await;
    if major(&client).await < 17 {
        return skipped(
            "synchronized_standby_slots is checked",
            "needs PostgreSQL 17",
        );
    }
    run(
        &client,
        "select pg_create_physical_replication_slot('replica')",
    )
    .await;
    server
        .set("synchronized_standby_slots", "replica")
        .expect("set");
    server.reload().expect("reload");
    let found = eventually("the setting is seen", async || {
        let found = findings(&client, "postrider").await;
        (!errors(&found).is_empty()).then_some(found)
    })
    .await;
    assert_eq!(
        errors(&found),
        ["synchronized-standby-slots-stalled"],
        "{found:#?}"
    );

    let name = slot_name("postrider");
    let options = CreateOptions { failover: false };
    slots::create(&client, &name, options, PATIENCE)
        .await
        .expect("create");
    let found = findings(&client, "postrider").await;
    assert!(errors(&found).is_empty(), "{found:#?}");
    slots::drop(&client, &name).await.expect("drop");

    let options = CreateOptions { failover: true };
    slots::create(&client, &name, options, PATIENCE)
        .await
        .expect("create");
    let found = findings(&client, "postrider").await;
    assert_eq!(with_code(&found, "slot-failover").severity, Severity::Ok);
    assert_eq!(errors(&found), ["synchronized-standby-slots-stalled"]);
}

#[tokio::test]
async fn an_idle_timeout_for_slots_is_a_warning_from_18_on() {
    let (_server, client) = new_database().await;
    if major(&client).await < 18 {
        return skipped(
            "idle_replication_slot_timeout is checked",
            "needs PostgreSQL 18",
        );
    }
    let (_server, client) = server_with(&[("idle_replication_slot_timeout", "1h")]).await;
    let found = findings(&client, "postrider").await;
    let finding = with_code(&found, "idle-slot-timeout-set");
    assert_eq!(finding.severity, Severity::Warning);
    assert!(finding.what.contains("3600 s"), "{}", finding.what);
}
