//! Follows docs/how-to/upgrade-postgresql.md. `pg_upgrade` keeps the slot of servers from PostgreSQL 17
//! on, and the relay continues with this slot.

use std::path::{Path, PathBuf};

use super::*;
use crate::harness::postrider;
use crate::server_stop::stop_with_unsent_wal;

/// The program folders of PostgreSQL 17 and 18, each with `pg_upgrade`. `None` if one is missing.
fn two_majors() -> Option<(PathBuf, PathBuf)> {
    let programs = |major: u32| {
        let named = std::env::var_os(format!("POSTRIDER_PG_BIN_{major}")).map(PathBuf::from);
        let debian = Path::new("/usr/lib/postgresql")
            .join(major.to_string())
            .join("bin");
        let mut folders = named.into_iter().chain([debian]);
        folders.find(|folder| folder.join("pg_upgrade").is_file())
    };
    let found = programs(17).zip(programs(18));
    if found.is_none() {
        eprintln!(
            "SKIPPED: no pg_upgrade of 17 and 18; name the folders of their programs in \
             POSTRIDER_PG_BIN_17 and POSTRIDER_PG_BIN_18"
        );
    }
    found
}

/// Starts an old server with the programs in `programs`, and a relay that has recorded 200 events and
/// still runs.
async fn served_on(programs: &Path) -> (Database, RunningEmulator, Relay) {
    let old = ScratchPostgres::builder()
        .programs(programs)
        .start()
        .unwrap();
    let database = Database::on(old).await;
    let emulator = harness::emulator().await;
    let relay = Relay::start(&database, &emulator);
    insert(&database, 1, 200).await;
    database.wait_until_recorded().await;
    (database, emulator, relay)
}

/// Upgrades the stopped server `old` to the version in `programs`.
fn upgraded(
    old: &ScratchPostgres,
    programs: &Path,
) -> Result<ScratchPostgres, scratch_postgres::Error> {
    ScratchPostgres::builder()
        .programs(programs)
        // Disable checksums, as on the old server, because `pg_upgrade` requires the same setting.
        .initdb_arg("--no-data-checksums")
        .upgrade_of(old)
        .start()
}

fn stop(database: &mut Database) {
    database
        .server()
        .stop(StopMode::Fast, harness::PATIENCE)
        .unwrap();
}

/// Runs a command on the database. Returns its exit status and standard output.
fn ran(database: &Database, host: &str, arguments: &[&str]) -> (Option<i32>, String) {
    let environment = [
        ("DATABASE_URL", database.url.as_str()),
        ("PUBSUB_PROJECT_ID", "demo"),
        ("PUBSUB_EMULATOR_HOST", host),
    ];
    let output = postrider(arguments, &environment).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    (output.status.code(), text)
}

async fn slot_position(database: &Database) -> String {
    let position = "SELECT restart_lsn::text || ' ' || confirmed_flush_lsn::text \
                    FROM pg_replication_slots WHERE slot_name = 'postrider'";
    database.text(position).await
}

#[tokio::test(flavor = "multi_thread")]
async fn after_pg_upgrade_the_relay_continues_with_the_copied_slot() {
    let Some((old_programs, new_programs)) = two_majors() else {
        return;
    };
    let (mut database, emulator, relay) = served_on(&old_programs).await;
    let host = emulator.addr().to_string();

    // Stop in the order of upgrade-postgresql.md: first the server, while the relay still confirms the last WAL,
    // then the relay.
    stop(&mut database);
    relay.stop().await;
    let new = upgraded(database.server(), &new_programs).unwrap();
    database.move_to(new).await;
    let position = slot_position(&database).await;

    // The relay publishes nothing until an operator confirms that the new server is not a copy.
    let refused = Relay::start(&database, &emulator);
    refused.wait_for_error("foreign-cluster").await;
    assert_eq!(refused.wait().await.code(), Some(3));
    let (status, text) = ran(&database, &host, &["check"]);
    assert_eq!(status, Some(2), "{text}");
    assert!(text.contains("foreign-cluster"), "{text}");
    let (status, text) = ran(&database, &host, &["slot", "show"]);
    assert_eq!(status, Some(2), "{text}");
    assert!(text.contains("FOREIGN CLUSTER"), "{text}");

    let (status, text) = ran(&database, &host, &["recover", "--adopt", "--yes"]);
    assert_eq!(status, Some(0), "{text}");
    assert!(text.contains("Kept slot"), "{text}");
    let (status, text) = ran(&database, &host, &["check"]);
    assert!(matches!(status, Some(0 | 1)), "{text}");
    assert!(!text.contains("foreign-cluster"), "{text}");
    let (status, text) = ran(&database, &host, &["slot", "show"]);
    assert!(matches!(status, Some(0 | 1)), "{text}");
    assert_eq!(
        slot_position(&database).await,
        position,
        "the slot is the old slot"
    );

    // Insert events before the relay starts, as services do.
    insert(&database, 201, 100).await;
    let relay = Relay::start(&database, &emulator);
    assert_nothing_is_lost_or_repeated(&database, &emulator, &relay).await;
    let report = harness::check_streamed(&database, &emulator).await;
    assert!(report.is_clean(), "{report}");
    assert!(!relay.log().contains("recovering"), "{}", relay.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn pg_upgrade_refuses_the_slot_of_a_relay_stopped_before_its_server() {
    let Some((old_programs, new_programs)) = two_majors() else {
        return;
    };
    let (mut database, emulator, relay) = served_on(&old_programs).await;
    relay.stop().await;
    stop(&mut database);
    let refused = upgraded(database.server(), &new_programs).unwrap_err();
    let refused = refused.to_string();
    assert!(
        refused.contains("logical replication slots that cannot be upgraded"),
        "{refused}"
    );

    // Stop again, now in the order of upgrade-postgresql.md: first the server, then the relay.
    database.server().start_again().unwrap();
    database.reconnect().await;
    let relay = Relay::start(&database, &emulator);
    relay.wait_for_log("streaming").await;
    stop(&mut database);
    relay.stop().await;
    upgraded(database.server(), &new_programs).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn events_written_before_an_upgraded_server_is_adopted_are_published_from_the_tables() {
    let Some((old_programs, new_programs)) = two_majors() else {
        return;
    };
    let (mut database, emulator, relay) = served_on(&old_programs).await;
    let host = emulator.addr().to_string();
    stop(&mut database);
    relay.stop().await;
    let new = upgraded(database.server(), &new_programs).unwrap();
    database.move_to(new).await;
    insert(&database, 201, 100).await;
    let (status, text) = ran(&database, &host, &["recover", "--adopt", "--yes"]);
    assert_eq!(status, Some(0), "{text}");
    assert!(text.contains("Marked slot"), "{text}");
    let relay = Relay::start(&database, &emulator);
    relay.wait_for_log("recovered").await;
    insert(&database, 301, 100).await;
    assert_nothing_is_lost_or_repeated(&database, &emulator, &relay).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn pg_upgrade_accepts_the_slot_if_the_server_had_unsent_wal_when_it_was_stopped() {
    let Some((old_programs, new_programs)) = two_majors() else {
        return;
    };
    let (mut database, _emulator, relay) = served_on(&old_programs).await;
    database.wait_until_confirmed().await;
    let work = "CREATE TABLE other AS SELECT generate_series(1, 200000)";
    stop_with_unsent_wal(&mut database, &relay, work).await;
    relay.stop().await;
    upgraded(database.server(), &new_programs).unwrap();
}
