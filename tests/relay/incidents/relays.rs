//! The relay is down or cannot log in, a second relay runs, or another program reads the slot.

use std::process::{Command, Stdio};

use super::desk::Desk;
use super::sight::Expected;
use crate::harness::{self, Database, Relay};
use crate::http::{free_addr, get};
use crate::privileges::login_role;

#[tokio::test(flavor = "multi_thread")]
async fn the_relay_is_down() {
    let mut desk = Desk::new().await;
    desk.kill();
    desk.write_events().await;
    let down = Expected::DOWN.says(&[
        "nothing is delivered",
        "start the relay",
        "40 events not recorded yet, the oldest",
        "last postrider",
    ]);
    desk.sees(down).await;
    desk.start();
    desk.sees_all_delivered().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_password_is_changed() {
    let server = scratch_postgres::ScratchPostgres::builder()
        .hba_line("host all shop_relay 127.0.0.1/32 scram-sha-256")
        .start()
        .unwrap();
    let database = Database::on(server).await;
    let url = login_role(&database).await;
    let change = "ALTER ROLE shop_relay PASSWORD 'first'";
    database.execute(change).await;
    let emulator = harness::emulator().await;
    let pubsub = emulator.addr().to_string();
    let mut desk = Desk::prepared(database, emulator, pubsub);
    desk.relay_url = url.replace("shop_relay@", "shop_relay:first@");
    desk.begin().await;
    desk.database
        .execute(&change.replace("first", "second"))
        .await;
    desk.kill();
    desk.write_events().await;
    desk.start();
    assert_eq!(desk.ended("postgres-authentication").await, Some(3));
    let down = Expected::DOWN.log(&["password authentication failed", "DATABASE_URL"]);
    desk.sees(down).await;
    desk.relay_url = url.replace("shop_relay@", "shop_relay:second@");
    desk.start();
    desk.sees_all_delivered().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_relay_has_the_same_slot() {
    let mut desk = Desk::new().await;
    let addr = free_addr();
    let settings = [("POSTRIDER_HTTP_ADDR", addr.as_str())];
    let second = Relay::start_with(&desk.database, &desk.pubsub, &settings);
    second
        .wait_for_log("standby for 0 s: the slot is held by")
        .await;
    desk.write_events().await;
    desk.sees_all_delivered().await;
    let (code, ready) = get(&addr, "/readyz").await.unwrap();
    assert!(
        code == 200 && ready.starts_with("standby: the slot is held by"),
        "{ready}"
    );
    desk.kill();
    desk.write_events().await;
    desk.database.wait_until_recorded().await;
    let healthy = Expected {
        port: None,
        ready: None,
        ..Expected::HEALTHY
    };
    desk.sees(healthy).await;
    let (_, ready) = get(&addr, "/readyz").await.unwrap();
    assert_eq!(ready, "streaming\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_relay_has_another_slot() {
    let desk = Desk::new().await;
    let settings = [("POSTRIDER_SLOT", "other")];
    let second = Relay::start_with(&desk.database, &desk.pubsub, &settings);
    second.wait_for_error("table-captured").await;
    let log = second.log();
    assert_eq!(second.wait().await.code(), Some(3), "{log}");
    assert!(log.contains("through slot \"postrider"), "{log}");
    desk.write_events().await;
    desk.sees_all_delivered().await;
    let slots = "SELECT count(*) FROM pg_replication_slots WHERE slot_name = 'other'";
    assert_eq!(desk.database.number(slots).await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn another_program_reads_the_slot() {
    let emulator = harness::emulator().await;
    let pubsub = emulator.addr().to_string();
    let mut desk = Desk::prepared(Database::private().await, emulator, pubsub);
    desk.begin().await;
    desk.kill();
    harness::wait_until_killed_relays_are_gone(&desk.database, &desk.emulator).await;
    let program = desk.database.server().programs().join("pg_recvlogical");
    if !program.exists() {
        eprintln!("SKIPPED: this PostgreSQL has no pg_recvlogical");
        return;
    }
    let mut reader = Command::new(program)
        .args([
            "--start",
            "--file",
            "/dev/null",
            "--slot",
            desk.database.slot(),
        ])
        .args(["-o", "proto_version=1", "-o", "publication_names=postrider"])
        .args(["--status-interval=0", "--dbname", &desk.database.url])
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    desk.write_events().await;
    let down = Expected::DOWN.says(&[
        "pg_recvlogical",
        "it is not a relay",
        "nothing is delivered",
        "pg_terminate_backend",
    ]);
    desk.sees(down).await;
    reader.kill().unwrap();
    reader.wait().unwrap();
    desk.start();
    desk.sees_all_delivered().await;
}
