//! Incidents in which the relay is down or cannot log in, a second relay runs, or another program reads
//! the slot.

use std::process::{Command, Stdio};

use super::desk::Desk;
use super::sight::Expected;
use crate::harness::{self, Database, Relay, eventually, signal};
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

/// Until `wal_sender_timeout` has passed, the server shows the slot of the frozen relay as active. The
/// commands must already say that the relay is down.
#[tokio::test(flavor = "multi_thread")]
async fn the_relay_is_frozen() {
    let mut desk = Desk::new().await;
    desk.freeze();
    desk.write_events().await;
    let frozen = Expected::DOWN.says(&[
        "the relay that holds the slot",
        "has not answered for ",
        "nothing is delivered",
        "40 events not recorded yet",
        "look at the process",
    ]);
    desk.sees(frozen).await;
    let check = desk.check();
    assert!(check.contains("has not answered for "), "{check}");
    desk.thaw();
    desk.sees_all_delivered().await;
}

/// The relay loses its lease, and its own earlier session keeps the slot.
#[tokio::test(flavor = "multi_thread")]
async fn the_walsender_of_the_relay_hangs() {
    let desk = Desk::on(Database::private().await).await;
    let walsender = format!(
        "SELECT coalesce(active_pid, 0)::bigint FROM pg_replication_slots WHERE slot_name = '{}'",
        desk.database.slot()
    );
    // Shorten the timeout and end the session, because only a new session gets the short lease.
    for sql in [
        "ALTER SYSTEM SET wal_sender_timeout = '4s'",
        "SELECT pg_reload_conf()",
    ] {
        desk.database.execute(sql).await;
    }
    let before = desk.database.number(&walsender).await;
    let end = format!("SELECT pg_terminate_backend({before})");
    desk.database.execute(&end).await;
    let hung = eventually("a new session has the slot", || async {
        let now = desk.database.number(&walsender).await;
        (now != 0 && now != before).then_some(now)
    })
    .await;
    signal("STOP", hung);
    desk.write_events().await;
    let blocked = Expected {
        code: Some("slot-held"),
        says: &[
            "the previous session of this relay still holds the slot",
            "pg_terminate_backend",
        ],
        log: &["nothing is delivered for "],
        ..Expected::BLOCKED_ON_DATABASE
    };
    desk.sees(blocked).await;
    signal("CONT", hung);
    desk.sees_all_delivered().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_row_of_the_relay_is_deleted() {
    let mut desk = Desk::new().await;
    let delete = format!(
        "DELETE FROM outbox.relay WHERE slot = '{}'",
        desk.database.slot()
    );
    desk.database.execute(&delete).await;
    desk.write_events().await;
    desk.database.wait_until_recorded().await;
    let without_row = Expected {
        status: ("streaming", 1),
        slot: ("streaming", 1),
        says: &[
            "outbox.relay has no row for this slot",
            "somebody deleted it",
            "it writes the row",
        ],
        ..Expected::HEALTHY
    };
    desk.sees(without_row).await;
    desk.kill();
    let down = Expected {
        status: ("recreated", 2),
        slot: ("recreated", 2),
        says: &[
            "RECREATED: outbox.relay has no row for this slot",
            "it writes the row",
            "postrider recover --dry-run",
        ],
        ..Expected::DOWN
    };
    desk.sees(down).await;
    desk.start();
    desk.sees_all_delivered().await;
}

const FIRST_PASSWORD: &str = "ALTER ROLE shop_relay PASSWORD 'first'";
const SECOND_PASSWORD: &str = "ALTER ROLE shop_relay PASSWORD 'second'";

/// Returns a desk whose relay logs in with the password `first` and has delivered events. Also returns the
/// relay's URL without a password.
async fn with_a_password() -> (Desk, String) {
    let server = scratch_postgres::ScratchPostgres::builder()
        .hba_line("host all shop_relay 127.0.0.1/32 scram-sha-256")
        .start()
        .unwrap();
    let database = Database::on(server).await;
    let url = login_role(&database).await;
    database.execute(FIRST_PASSWORD).await;
    let emulator = harness::emulator().await;
    let pubsub = emulator.addr().to_string();
    let mut desk = Desk::prepared(database, emulator, pubsub);
    desk.relay_url = url.replace("shop_relay@", "shop_relay:first@");
    desk.begin().await;
    (desk, url)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_password_is_changed() {
    let (mut desk, url) = with_a_password().await;
    desk.database.execute(SECOND_PASSWORD).await;
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

/// The relay cannot open new SQL sessions, but it still delivers.
#[tokio::test(flavor = "multi_thread")]
async fn the_password_is_changed_while_the_relay_streams() {
    let (desk, _) = with_a_password().await;
    desk.database.execute(SECOND_PASSWORD).await;
    let end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
               WHERE application_name LIKE 'postrider supervisor%' \
                  OR application_name = 'postrider auditor'";
    desk.database.execute(end).await;
    let unchecked = Expected {
        status: ("streaming", 1),
        slot: ("streaming", 1),
        code: Some("postgres-authentication"),
        says: &[
            "STREAMING: events are published as they are committed; but for ",
            "could not check its publication and its slot",
            "check the user and password",
        ],
        ..Expected::HEALTHY
    };
    let sight = desk.sees(unchecked).await;
    let port = sight.port.as_ref().unwrap();
    assert_eq!(port["severity"], "warning", "{sight}");
    desk.write_events().await;
    desk.database.wait_until_recorded().await;
    desk.sees(unchecked).await;
    desk.database.execute(FIRST_PASSWORD).await;
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
    desk.start();
    let waits = Expected {
        port: Some("down"),
        ready: Some(503),
        log: &[
            "WARN",
            "slot-held",
            "it is not a relay",
            "pg_terminate_backend",
        ],
        ..down
    };
    let sight = desk.sees(waits).await;
    let port = sight.port.as_ref().unwrap();
    let what = port["what"].as_str().unwrap_or_default();
    assert!(what.contains("application pg_recvlogical"), "{sight}");
    assert_eq!(port["code"], "slot-held", "{sight}");
    assert!(!what.contains(" as "), "names a role: {sight}");
    reader.kill().unwrap();
    reader.wait().unwrap();
    desk.sees_all_delivered().await;
}
