//! `postrider check` finds databases and tables that are set up in an unusual way.

use crate::check::{check, emulator};
use crate::support::{Database, assert_contains, connect};

#[tokio::test]
async fn check_explains_a_database_in_another_encoding() {
    let (_emulator, host) = emulator().await;
    let database = Database::new().await;
    let ascii = format!("{}_ascii", database.name);
    database
        .execute(&format!(
            "create database {ascii} encoding 'SQL_ASCII' lc_collate 'C' lc_ctype 'C' template template0"
        ))
        .await;
    let url = database.url.replace(&database.name, &ascii);
    let database = Database {
        client: connect(&url).await,
        url,
        name: ascii,
    };
    database.run(&["init", "--apply"]).await.assert_status(0);
    let ran = check(&database, &host, &[]).await;
    let finding = ran.finding("server-encoding");
    assert_contains(&finding["what"].to_string(), "SQL_ASCII");
    assert_contains(&finding["remedy"].to_string(), "quarantine list");
}

#[tokio::test]
async fn check_warns_of_records_that_a_crash_would_delete() {
    let (_emulator, host) = emulator().await;
    let database = Database::initialised().await;
    let unlogged = "ALTER TABLE outbox.dispatch SET UNLOGGED";
    database.execute(unlogged).await;
    let ran = check(&database, &host, &[]).await;
    let finding = ran.finding("records-unlogged");
    assert_eq!(finding["severity"], "warning");
    database.execute(finding["remedy"].as_str().unwrap()).await;
    let ran = check(&database, &host, &[]).await;
    assert_eq!(ran.finding("dispatch-table")["severity"], "ok");
}

#[tokio::test]
async fn a_sample_that_cannot_be_read_is_reported_with_the_servers_reason() {
    let database = Database::initialised().await;
    let role = format!("sampler_{}", database.name);
    let policy = format!(
        "create role {role} login replication; grant postrider_relay to {role}; \
         alter table outbox.events enable row level security; \
         create policy all_rows on outbox.events using (true)"
    );
    database.execute(&policy).await;
    database.emit(1).await;
    let url = database.url_as(&role);
    let environment = [("DATABASE_URL", url.as_str())];
    let ran = database.run_with(&["check", "--json"], &environment).await;
    let finding = ran.finding("events-not-sampled");
    let what = finding["what"].as_str().unwrap();
    assert_contains(what, "no sample of outbox.events could be read");
    assert_contains(what, "row-level security policy for table");
}
