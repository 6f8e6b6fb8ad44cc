//! Tests in which WAL files that a slot needs are removed from the server. No event is lost.

use pubsub_emulator::RunningEmulator;
use scratch_postgres::{Builder, ScratchPostgres, StopMode};

use crate::harness::{self, Database, Relay, insert_orders};

/// Starts `server`, delivers 50 events with a relay, and stops the relay cleanly.
async fn served_on(server: Builder) -> (Database, RunningEmulator) {
    let server = server.setting("wal_level", "logical").start().unwrap();
    let database = Database::on(server).await;
    let emulator = harness::emulator().await;
    let relay = Relay::start(&database, &emulator);
    insert_orders(&database, 50, 5).await;
    database.wait_until_recorded().await;
    database.wait_until_confirmed().await;
    relay.stop().await;
    (database, emulator)
}

/// Removes the WAL files that the slot needs but the server itself does not, and restarts the
/// server.
async fn remove_wal(database: &mut Database) {
    database
        .execute("SELECT pg_switch_wal(); CHECKPOINT; SELECT pg_switch_wal(); CHECKPOINT")
        .await;
    let of = |lsn: &str| format!("SELECT pg_walfile_name({lsn}) FROM pg_replication_slots");
    let first = database.text(&of("restart_lsn")).await;
    let redo = "(SELECT redo_lsn FROM pg_control_checkpoint())";
    let needed = database.text(&of(redo)).await;
    let patience = harness::PATIENCE;
    database.server().stop(StopMode::Fast, patience).unwrap();
    let folder = database.server().data_dir().join("pg_wal");
    let mut removed = 0;
    for file in std::fs::read_dir(folder).unwrap() {
        let file = file.unwrap();
        let name = file.file_name().into_string().unwrap();
        if name.len() == first.len() && (&first..&needed).contains(&&name) {
            std::fs::remove_file(file.path()).unwrap();
            removed += 1;
        }
    }
    assert!(removed > 0, "from {first} to {needed}");
    database.server().start_again().unwrap();
    database.reconnect().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_whose_wal_was_removed_come_from_the_table() {
    let server = ScratchPostgres::builder().initdb_arg("--wal-segsize=1");
    let (mut database, emulator) = served_on(server).await;
    insert_orders(&database, 300, 5).await;
    remove_wal(&mut database).await;
    let lost = "SELECT count(*) FROM pg_replication_slots WHERE wal_status = 'lost'";
    assert_eq!(database.number(lost).await, 0, "the server has not noticed");
    let relay = Relay::start(&database, &emulator);
    relay.wait_for_log("recovered").await;
    insert_orders(&database, 50, 5).await;
    database.wait_until_recorded().await;
    assert_eq!(emulator.journal().counts().stored_messages, 400);
    let log = relay.log();
    assert!(log.contains("slot-stuck") && log.contains("58P01"), "{log}");
}
