//! Tests in which the relay gets another role, for example because its password is rotated by creating a new
//! role. A transaction of the earlier role may then still be open.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::harness::{self, Database, Relay, eventually, insert_orders};
use crate::lost_answers::{AT_COMMIT, HELD_UP, LOCK, TRIGGER};

/// The ids of the events that a transaction has recorded.
async fn recorded_by(database: &Database, xid: &str) -> BTreeSet<String> {
    let sql = format!("SELECT event_id::text FROM outbox.dispatch WHERE xmin::text = '{xid}'");
    let rows = database.client.query(&sql, &[]).await.unwrap();
    rows.iter().map(|row| row.get(0)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_with_a_new_role_waits_for_the_last_records_of_the_earlier_role() {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    let host = emulator.addr().to_string();
    let mut urls = Vec::new();
    for role in ["first_relay", "second_relay"] {
        let create = format!("CREATE ROLE {role} LOGIN REPLICATION IN ROLE postrider_relay");
        database.execute(&create).await;
        urls.push(database.url.replace("postgres@", &format!("{role}@")));
    }
    let first = Relay::start_with(&database, &host, &[("DATABASE_URL", &urls[0])]);
    first.wait_for_log("streaming").await;
    database.execute(&format!("{TRIGGER}{AT_COMMIT}")).await;
    database
        .execute(&format!("SELECT pg_advisory_lock({LOCK})"))
        .await;
    insert_orders(&database, 50, 5).await;
    let xid: String = eventually("the writer waits in the trigger", || async {
        let row = database.client.query_opt(HELD_UP, &[]).await.unwrap()?;
        Some(row.get(1))
    })
    .await;
    first.kill_9();

    let second = Relay::start_with(&database, &host, &[("DATABASE_URL", &urls[1])]);
    second.wait_for_log("connected to PostgreSQL").await;
    // Check that the second relay waits for the open transaction of the first. Sleep for less than the publish
    // timeout, because the second relay waits no longer than that.
    tokio::time::sleep(Duration::from_secs(4)).await;
    let log = second.log();
    assert!(!log.contains("streaming"), "{log}");
    database
        .execute(&format!("SELECT pg_advisory_unlock({LOCK})"))
        .await;
    database.wait_until_recorded().await;
    database.wait_until_confirmed().await;
    let recorded = recorded_by(&database, &xid).await;
    assert!(!recorded.is_empty(), "{}", second.log());
    let report = harness::check_streamed(&database, &emulator).await;
    assert!(report.is_clean(), "{report}");
    let repeated = report
        .duplicates
        .iter()
        .map(|found| found.event_id.to_string());
    let twice: Vec<String> = repeated.filter(|id| recorded.contains(id)).collect();
    assert!(twice.is_empty(), "{twice:?}\n{}", second.log());
}
