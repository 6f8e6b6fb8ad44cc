//! Rare incidents: the slot is lost while the relay is frozen, a script ends the walsender again and
//! again, the synchronous standby server is missing, or a table of the relay is missing.

use std::time::{Duration, Instant};

use super::desk::Desk;
use super::sight::Expected;
use super::slot::{impatient, write_wal_until};
use crate::harness::{Database, connect, eventually};

#[tokio::test(flavor = "multi_thread")]
async fn the_slot_is_lost_while_the_relay_is_frozen() {
    let mut desk = Desk::on(impatient("1MB", "4MB").await).await;
    desk.freeze();
    desk.write_events().await;
    write_wal_until(&desk.database, "lost", "CHECKPOINT").await;
    let lost = Expected {
        status: ("lost", 2),
        slot: ("lost", 2),
        says: &["lost for good", "40 events not recorded yet"],
        ..Expected::DOWN
    };
    desk.sees(lost).await;
    desk.thaw();
    desk.sees_all_delivered_and_logs(&["slot-lost", "recovered"])
        .await;
}

/// A script that ends "old" sessions could end the walsender again and again. The relay then has almost
/// no time to deliver, so the views must show that it is blocked.
#[tokio::test(flavor = "multi_thread")]
async fn somebody_ends_the_walsender_again_and_again() {
    let desk = Desk::on(Database::private().await).await;
    let script = connect(&desk.database.url).await;
    let ending = tokio::spawn(async move {
        let end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
                   WHERE backend_type = 'walsender'";
        loop {
            script.batch_execute(end).await.unwrap();
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    let began = Instant::now();
    let relay = desk.relay.as_ref().unwrap();
    eventually("three sessions have begun", || async {
        let sessions = relay.log().matches("INFO streaming").count();
        (sessions >= 3).then_some(())
    })
    .await;
    let mut states = Vec::new();
    for _ in 0..40 {
        states.push(desk.state_of_slot());
    }
    ending.abort();
    let log = relay.log();
    let blocked = states
        .iter()
        .filter(|state| *state == "blocked-on-database");
    assert!(blocked.count() >= 10, "{states:?}\n{log}");
    let lines = log.matches("terminating connection").count() as u64;
    assert!(lines <= began.elapsed().as_secs() / 10 + 2, "{log}");
    desk.write_events().await;
    desk.sees_all_delivered().await;
}

/// Every commit waits for the missing standby server, including the commits of the services.
#[tokio::test(flavor = "multi_thread")]
async fn a_synchronous_standby_is_gone() {
    let desk = Desk::on(Database::private().await).await;
    let alter = "ALTER SYSTEM SET synchronous_standby_names = 'gone'";
    desk.database.execute(alter).await;
    desk.database
        .execute("SET synchronous_commit = local")
        .await;
    desk.database.execute("SELECT pg_reload_conf()").await;
    desk.write_events().await;
    let blocked = Expected {
        code: Some("postgres-timeout"),
        says: &[
            "waiting for a synchronous standby server",
            "synchronous_standby_names",
        ],
        log: &["waiting for a synchronous standby server"],
        ..Expected::BLOCKED_ON_DATABASE
    };
    desk.sees(blocked).await;
    let reset = "ALTER SYSTEM RESET synchronous_standby_names";
    desk.database.execute(reset).await;
    desk.database.execute("SELECT pg_reload_conf()").await;
    desk.sees_all_delivered().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_table_of_records_is_gone() {
    let mut desk = Desk::new().await;
    let rename = "ALTER TABLE outbox.dispatch RENAME TO dispatch_old";
    desk.database.execute(rename).await;
    desk.write_events().await;
    assert_eq!(desk.ended("schema-missing").await, Some(3));
    let gone = Expected {
        port: None,
        ready: None,
        ..Expected::broken("schema-missing").says(&[
            "BROKEN for ",
            "outbox.dispatch",
            "postrider init --apply",
        ])
    };
    desk.sees(gone).await;
    // A relay that starts without this table ends before it has opened a session. Even so, it must record the
    // error in the database, because the commands read the error there.
    desk.start();
    assert_eq!(desk.ended("schema-missing").await, Some(3));
    let condition = "UPDATE outbox.relay SET condition = NULL";
    desk.database.execute(condition).await;
    desk.start();
    assert_eq!(desk.ended("schema-missing").await, Some(3));
    desk.sees(gone).await;
    let restore = "ALTER TABLE outbox.dispatch_old RENAME TO dispatch";
    desk.database.execute(restore).await;
    desk.start();
    desk.sees_all_delivered().await;
}
