//! Incidents in which the slot is dropped, lost or unreserved, or a long transaction holds it back.

use std::time::Duration;

use scratch_postgres::ScratchPostgres;

use super::desk::Desk;
use super::sight::Expected;
use crate::harness::{Database, connect, eventually};

/// Starts a server on which a few megabytes of WAL are enough to make a slot `unreserved` or `lost`.
/// `limit` is the server's `max_slot_wal_keep_size`.
pub(super) async fn impatient(limit: &str, max_wal_size: &str) -> Database {
    let server = ScratchPostgres::builder()
        .initdb_arg("--wal-segsize=1")
        .setting("max_slot_wal_keep_size", limit)
        .setting("min_wal_size", "2MB")
        .setting("max_wal_size", max_wal_size)
        .start()
        .unwrap();
    Database::on(server).await
}

/// Writes WAL until the slot's `wal_status` is `status`. After each write, runs `checkpoint`, which
/// is `CHECKPOINT` or a statement without effect.
pub(super) async fn write_wal_until(database: &Database, status: &str, checkpoint: &str) {
    eventually(&format!("the slot is {status}"), || async {
        database
            .execute("SELECT pg_logical_emit_message(false, 'filler', repeat('x', 900000))")
            .await;
        database.execute(checkpoint).await;
        let slots =
            format!("SELECT count(*) FROM pg_replication_slots WHERE wal_status = '{status}'");
        (database.number(&slots).await == 1).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_slot_is_dropped_under_the_relay() {
    let desk = Desk::new().await;
    let slot = desk.database.slot();
    let drop = format!(
        "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots \
         WHERE slot_name = '{slot}'; \
         DO $$ BEGIN FOR i IN 1..1000 LOOP BEGIN \
             PERFORM pg_drop_replication_slot('{slot}'); RETURN; \
         EXCEPTION WHEN object_in_use THEN PERFORM pg_sleep(0.001); END; END LOOP; END $$"
    );
    let gone = format!("SELECT count(*) FROM pg_replication_slots WHERE slot_name = '{slot}'");
    eventually("the slot is gone", || async {
        desk.database.client.batch_execute(&drop).await.ok()?;
        (desk.database.number(&gone).await == 0).then_some(())
    })
    .await;
    desk.write_events().await;
    desk.sees_all_delivered_and_logs(&["slot-missing", "recovered"])
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_slot_is_lost_while_the_relay_is_down() {
    let mut desk = Desk::on(impatient("1MB", "4MB").await).await;
    desk.kill();
    desk.write_events().await;
    write_wal_until(&desk.database, "lost", "CHECKPOINT").await;
    let lost = Expected {
        status: ("lost", 2),
        slot: ("lost", 2),
        says: &[
            "lost for good",
            "start the relay",
            "postrider recover --dry-run",
            "40 events not recorded yet",
        ],
        ..Expected::DOWN
    };
    desk.sees(lost).await;
    desk.start();
    desk.sees_all_delivered_and_logs(&["slot-lost", "recovered"])
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_slot_is_unreserved() {
    let mut desk = Desk::on(impatient("3MB", "1GB").await).await;
    desk.kill();
    desk.write_events().await;
    write_wal_until(&desk.database, "unreserved", "SELECT 1").await;
    let unreserved = Expected {
        status: ("unreserved", 2),
        slot: ("unreserved", 2),
        says: &[
            "the next checkpoint",
            "max_slot_wal_keep_size",
            "40 events not recorded yet",
        ],
        ..Expected::DOWN
    };
    desk.sees(unreserved).await;
    desk.start();
    desk.sees_all_delivered().await;
}

/// The views name a transaction only when it is at least 30 seconds old, so this test takes longer
/// than the others. Most of the time the test only waits.
#[tokio::test(flavor = "multi_thread")]
async fn a_long_transaction_holds_wal_back() {
    let desk = Desk::new().await;
    let other = connect(&desk.database.url).await;
    let begin = "SET application_name = 'nightly-report'; BEGIN; CREATE TABLE public.report ()";
    other.batch_execute(begin).await.unwrap();
    desk.write_events().await;
    tokio::time::sleep(Duration::from_secs(30)).await;
    let held = Expected::HEALTHY.says(&["held by", "nightly-report", "pg_terminate_backend"]);
    desk.sees(held).await;
    other.batch_execute("ROLLBACK").await.unwrap();
    let sight = desk.sees_all_delivered().await;
    assert!(!sight.status.screen.contains("nightly-report"), "{sight}");
}
