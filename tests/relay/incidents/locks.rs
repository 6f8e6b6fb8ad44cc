//! Incidents in which another session holds a lock on a captured table or on one of the relay's tables.

use super::desk::Desk;
use super::sight::Expected;
use crate::harness::{Database, connect, eventually};

/// Opens a session that holds an exclusive lock on `table` until the session is dropped or its
/// transaction ends.
async fn lock(database: &Database, table: &str) -> tokio_postgres::Client {
    let migration = connect(&database.url).await;
    let lock = format!(
        "SET application_name = 'nightly-migration'; BEGIN; LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE"
    );
    migration.batch_execute(&lock).await.unwrap();
    migration
}

const fn waits(state: (&'static str, i32), says: &'static [&'static str]) -> Expected {
    Expected {
        status: state,
        slot: state,
        says,
        log: &["lock-wait", "waiting for a lock on", "nightly-migration"],
        ..Expected::BLOCKED_ON_DATABASE
    }
}

const BLOCKED: (&str, i32) = ("blocked-on-database", 1);

/// A recovery reads the captured table before anything else, so the lock stops the relay before its
/// session begins.
#[tokio::test(flavor = "multi_thread")]
async fn a_migration_holds_the_captured_table_when_the_relay_recovers() {
    let mut desk = Desk::new().await;
    desk.kill();
    desk.database.drop_slot().await;
    desk.write_events().await;
    let migration = lock(&desk.database, "outbox.events").await;
    desk.start();
    let sight = desk
        .sees(waits(
            BLOCKED,
            &[
                "lock-wait",
                "waiting for a lock on outbox.events",
                "application nightly-migration",
                "pg_terminate_backend",
            ],
        ))
        .await;
    let port = sight.port.as_ref().unwrap();
    assert_eq!(port["code"], "lock-wait", "{sight}");
    let what = port["what"].as_str().unwrap_or_default();
    assert!(what.contains("waits for a lock"), "{sight}");
    migration.batch_execute("ROLLBACK").await.unwrap();
    desk.sees_all_delivered().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_records_are_locked_when_the_relay_starts() {
    let mut desk = Desk::new().await;
    desk.kill();
    desk.write_events().await;
    let migration = lock(&desk.database, "outbox.dispatch").await;
    desk.start();
    let says = &[
        "lock-wait",
        "waiting for a lock on outbox.dispatch",
        "application nightly-migration",
        "missing, locked or not readable",
    ];
    desk.sees(waits(BLOCKED, says)).await;
    migration.batch_execute("ROLLBACK").await.unwrap();
    desk.sees_all_delivered().await;
}

/// A prepared transaction that nobody has finished holds the lock. No server process runs this
/// transaction, so the hint must say `rollback prepared` instead of naming a session to end.
#[tokio::test(flavor = "multi_thread")]
async fn a_prepared_transaction_holds_the_captured_table_when_the_relay_recovers() {
    let mut desk = Desk::on(Database::private().await).await;
    desk.kill();
    desk.database.drop_slot().await;
    desk.write_events().await;
    let prepare = "BEGIN; LOCK TABLE outbox.events IN ACCESS EXCLUSIVE MODE; \
                   PREPARE TRANSACTION 'half-done'";
    desk.database.execute(prepare).await;
    desk.start();
    let says = &[
        "waiting for a lock on outbox.events",
        "prepared transaction \"half-done\"",
        "rollback prepared 'half-done'",
    ];
    let waits = Expected {
        log: &["lock-wait", "half-done"],
        ..waits(BLOCKED, says)
    };
    desk.sees(waits).await;
    desk.database.execute("ROLLBACK PREPARED 'half-done'").await;
    desk.sees_all_delivered().await;
}

/// The commands cannot read the relay's condition while `outbox.relay` is locked. They must say so soon,
/// with the holder of the lock, instead of waiting for the lock.
#[tokio::test(flavor = "multi_thread")]
async fn the_row_of_the_relay_is_locked_when_the_relay_starts() {
    let mut desk = Desk::new().await;
    desk.kill();
    desk.write_events().await;
    let migration = lock(&desk.database, "outbox.relay").await;
    desk.start();
    let says = &[
        "lock-wait",
        "waiting for a lock on outbox.relay",
        "application nightly-migration",
        "pg_terminate_backend",
    ];
    desk.sees(waits(("unknown", 3), says)).await;
    migration.batch_execute("ROLLBACK").await.unwrap();
    desk.sees_all_delivered().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_capture_records_are_locked_when_the_relay_starts() {
    let mut desk = Desk::new().await;
    desk.kill();
    desk.write_events().await;
    let migration = lock(&desk.database, "outbox.capture").await;
    desk.start();
    let says = &[
        "lock-wait",
        "waiting for a lock on outbox.capture",
        "application nightly-migration",
    ];
    desk.sees(waits(BLOCKED, says)).await;
    migration.batch_execute("ROLLBACK").await.unwrap();
    desk.sees_all_delivered().await;
}

/// The lock is the same as the lock of `VACUUM FULL`. The relay still publishes, but cannot record outcomes.
#[tokio::test(flavor = "multi_thread")]
async fn the_records_are_locked_while_the_relay_streams() {
    let desk = Desk::new().await;
    let migration = lock(&desk.database, "outbox.dispatch").await;
    desk.write_events().await;
    let waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted";
    eventually("the relay waits for the lock", || async {
        (desk.database.number(waiting).await > 0).then_some(())
    })
    .await;
    let blocked = Expected {
        log: &["lock-wait", "outbox.dispatch"],
        ..waits(BLOCKED, &["outbox.dispatch", "nightly-migration"])
    };
    desk.sees(blocked).await;
    migration.batch_execute("ROLLBACK").await.unwrap();
    desk.sees_all_delivered().await;
}
