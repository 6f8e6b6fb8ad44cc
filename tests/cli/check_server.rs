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
