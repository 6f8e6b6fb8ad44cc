//! Incidents in which PostgreSQL is down, its disk is full, or its publication or a right is changed.

use std::time::Duration;

use scratch_postgres::StopMode;

use super::desk::Desk;
use super::sight::Expected;
use crate::full_disk::SmallDisk;
use crate::harness::{Database, insert_orders};
use crate::privileges::login_role;

const OUT: &str = "ALTER PUBLICATION postrider DROP TABLE outbox.events";
const IN: &str = "ALTER PUBLICATION postrider ADD TABLE outbox.events";

#[tokio::test(flavor = "multi_thread")]
async fn postgresql_is_down() {
    let mut desk = Desk::on(Database::private().await).await;
    let server = desk.database.server();
    server
        .stop(StopMode::Fast, Duration::from_secs(30))
        .unwrap();
    let away = Expected {
        status: ("unknown", 3),
        slot: ("unknown", 3),
        port: Some("blocked-on-database"),
        ready: Some(503),
        code: Some("postgres-unreachable"),
        says: &["check that PostgreSQL is running"],
        log: &[],
        quarantined: None,
    };
    desk.sees(away).await;
    desk.database.server().start_again().unwrap();
    desk.database.reconnect().await;
    desk.write_events().await;
    desk.sees_all_delivered().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_disk_is_full() {
    let mut database = Database::private().await;
    let Some(disk) = SmallDisk::mount(database.server().data_dir()) else {
        eprintln!("SKIPPED: this user may not mount a small disk");
        return;
    };
    disk.hold_dispatch(&database).await;
    let desk = Desk::on(database).await;
    disk.fill();
    // Fill the pages that the table already has, so that a new page is needed.
    insert_orders(&desk.database, 400, 8).await;
    let full = Expected {
        code: Some("disk-full"),
        says: &["BLOCKED ON DATABASE for ", "not recorded yet", "make room"],
        log: &["cannot write outbox.dispatch"],
        ..Expected::BLOCKED_ON_DATABASE
    };
    desk.sees(full).await;
    disk.make_room();
    desk.sees_all_delivered_and_logs(&["outcomes are recorded again"])
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_is_taken_out_of_the_publication() {
    let desk = Desk::new().await;
    desk.database.execute(OUT).await;
    desk.write_events().await;
    let drifted = Expected::broken("publication-drift").says(&[
        "BROKEN for ",
        "40 events not recorded yet",
        "alter publication postrider add table outbox.events",
    ]);
    desk.sees(drifted).await;
    desk.database.execute(IN).await;
    desk.sees_all_delivered_and_logs(&["publication-gap"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_publication_is_dropped() {
    let desk = Desk::new().await;
    desk.database.execute("DROP PUBLICATION postrider").await;
    desk.write_events().await;
    // PostgreSQL 18 keeps streaming although the publication does not exist, so the relay's own
    // check reports the problem, under another code.
    let major = "SELECT current_setting('server_version_num')::bigint / 10000";
    let code = match desk.database.number(major).await {
        ..18 => "publication-missing",
        _ => "publication-drift",
    };
    let dropped = Expected::broken(code).says(&[
        "40 events not recorded yet",
        "create publication postrider",
        "BROKEN for ",
    ]);
    desk.sees(dropped).await;
    let create = "CREATE PUBLICATION postrider FOR TABLE outbox.events \
                  WITH (publish = 'insert', publish_via_partition_root = true)";
    desk.database.execute(create).await;
    desk.sees_all_delivered().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_right_to_record_is_revoked() {
    let database = Database::private().await;
    let url = login_role(&database).await;
    let emulator = crate::harness::emulator().await;
    let pubsub = emulator.addr().to_string();
    let mut desk = Desk::prepared(database, emulator, pubsub);
    desk.relay_url = url;
    desk.begin().await;
    let revoke = "REVOKE INSERT ON outbox.dispatch FROM postrider_relay";
    desk.database.execute(revoke).await;
    desk.write_events().await;
    assert_eq!(desk.ended("privilege-missing").await, Some(3));
    let revoked = Expected {
        port: None,
        ready: None,
        ..Expected::broken("privilege-missing").says(&[
            "BROKEN for ",
            "40 events not recorded yet",
            "GRANT",
        ])
    };
    desk.sees(revoked).await;
    desk.database
        .execute(&revoke.replace("REVOKE", "GRANT").replace("FROM", "TO"))
        .await;
    desk.start();
    desk.sees_all_delivered().await;
}
