//! Tests those states of a slot that only a real server can produce.

use std::time::{Duration, Instant};

use slot_manager::health::{
    InvalidationCause, Observation, SlotObservation, Thresholds, Viewer, judge, time_to_loss,
};
use slot_manager::slots::{self, CreateOptions};
use slot_manager::{Health, Slot, SlotError, SlotName, cluster};
use tokio_postgres::Client;

use crate::support::{
    PATIENCE, Reader, builder, eventually, major, run, skipped, slot_name, superuser,
};

async fn read(client: &Client, name: &SlotName) -> Slot {
    slots::find(client, name)
        .await
        .expect("find")
        .expect("there")
}

async fn judged(client: &Client, slot: &Slot) -> Health {
    let origin = cluster::inspect(client).await.expect("inspect").origin();
    let observation = Observation {
        slot: Some(slot),
        viewer: Viewer::Outside,
        time_lag: None,
        origin,
        recorded: None,
    };
    judge(&observation, &Thresholds::default())
}

/// Writes a little over 1 MB of WAL.
async fn write_wal(client: &Client) {
    run(
        client,
        "insert into filler select repeat('x', 1000) from generate_series(1, 1000)",
    )
    .await;
}

#[tokio::test]
async fn a_slot_without_a_reader_runs_out_of_room_and_is_lost() {
    let server = builder()
        .initdb_arg("--wal-segsize=1")
        .setting("max_wal_size", "4MB")
        .setting("min_wal_size", "2MB")
        .setting("max_slot_wal_keep_size", "16MB")
        .start()
        .expect("start");
    let client = superuser(&server).await;
    run(&client, "create table filler (x text)").await;
    let name = slot_name("starves");
    slots::create(&client, &name, CreateOptions::default(), PATIENCE)
        .await
        .expect("create");

    let first = read(&client, &name).await;
    let began = Instant::now();
    assert_eq!(judged(&client, &first).await.name(), "inactive");
    write_wal(&client).await;
    let second = read(&client, &name).await;
    assert!(second.safe_wal_size < first.safe_wal_size);
    let earlier = SlotObservation {
        slot: &first,
        ago: began.elapsed(),
    };
    let left = time_to_loss(&second, earlier).expect("known");
    assert!(left < Duration::from_secs(3600));

    let short = eventually("less than a quarter of the limit is left", async || {
        write_wal(&client).await;
        let health = judged(&client, &read(&client, &name).await).await;
        (health.name() != "inactive").then_some(health)
    })
    .await;
    assert!(
        matches!(short, Health::Reserved(_) | Health::Extended(_)),
        "{short:?}"
    );
    let health = eventually("the slot exceeds its limit", async || {
        write_wal(&client).await;
        let health = judged(&client, &read(&client, &name).await).await;
        matches!(health, Health::Unreserved(_) | Health::Lost).then_some(health)
    })
    .await;
    assert!(
        health.severity() == slot_manager::Severity::Error,
        "{health:?}"
    );
    let lost = eventually("the slot is lost", async || {
        write_wal(&client).await;
        run(&client, "checkpoint").await;
        let slot = read(&client, &name).await;
        (judged(&client, &slot).await == Health::Lost).then_some(slot)
    })
    .await;
    assert_eq!(lost.restart_lsn, None);
    assert_eq!(lost.retained_bytes, None);
    let to = lost.server_lsn.expect("known");
    let error = slots::advance(&client, &name, to).await.expect_err("lost");
    assert!(matches!(error, SlotError::SlotLost { .. }), "{error}");
    slots::drop(&client, &name)
        .await
        .expect("a lost slot can be dropped");
}

#[tokio::test]
async fn a_slot_that_is_idle_for_too_long_is_invalidated_with_that_cause() {
    let server = builder().start().expect("start");
    let client = superuser(&server).await;
    if major(&client).await < 18 {
        return skipped(
            "idle_replication_slot_timeout invalidates",
            "needs PostgreSQL 18",
        );
    }
    server
        .set("idle_replication_slot_timeout", "1s")
        .expect("set");
    server.reload().expect("reload");
    let name = slot_name("idles");
    slots::create(&client, &name, CreateOptions::default(), PATIENCE)
        .await
        .expect("create");
    let health = eventually("the slot is invalidated", async || {
        run(&client, "checkpoint").await;
        let health = judged(&client, &read(&client, &name).await).await;
        (health.name() != "inactive").then_some(health)
    })
    .await;
    assert_eq!(
        health,
        Health::Invalidated {
            cause: InvalidationCause::IdleTimeout
        }
    );
}

#[tokio::test]
async fn a_slot_survives_a_crash_and_can_be_read_again() {
    let mut server = builder().start().expect("start");
    let client = superuser(&server).await;
    let name = slot_name("survives");
    slots::create(&client, &name, CreateOptions::default(), PATIENCE)
        .await
        .expect("create");
    let reader = Reader::start(&server, "postgres", "survives");
    assert_eq!(
        judged(&client, &read(&client, &name).await).await,
        Health::Active
    );
    server.kill_9().expect("crash");
    drop(reader);
    server.start_again().expect("recover");
    let client = superuser(&server).await;
    assert_eq!(
        judged(&client, &read(&client, &name).await).await.name(),
        "inactive"
    );
    let _reader = Reader::start(&server, "postgres", "survives");
    assert_eq!(
        judged(&client, &read(&client, &name).await).await,
        Health::Active
    );
}
