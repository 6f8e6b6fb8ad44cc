//! Tests of a first start while a standby server holds back the xmin horizon of the primary server. At first an open
//! query on the standby server holds the horizon back (`hot_standby_feedback`), later only the physical slot of the
//! standby server. Even then the relay must not mistake an old row for a new one, or a new row for an old one.

use scratch_postgres::{ScratchPostgres, StopMode};

use super::World;
use super::table::Kind;
use crate::harness::{self, eventually};

/// A physical standby server whose open query holds back the horizon.
struct Standby {
    server: ScratchPostgres,
    /// The session with the open query.
    _reader: tokio_postgres::Client,
}

/// Starts a primary server and a standby server that holds back the primary's horizon.
async fn with_standby() -> (ScratchPostgres, Standby) {
    let builder = ScratchPostgres::builder().setting("max_prepared_transactions", "10");
    let mut primary = builder.setting("wal_level", "logical").start().unwrap();
    let slot = "SELECT pg_create_physical_replication_slot('standby', true)";
    let client = harness::connect(&primary.socket_url("postgres")).await;
    client.batch_execute(slot).await.unwrap();
    drop(client);
    primary.stop(StopMode::Fast, harness::PATIENCE).unwrap();
    let standby = ScratchPostgres::builder()
        .standby_of(&primary)
        .setting("max_prepared_transactions", "10")
        .setting("primary_slot_name", "standby")
        .setting("hot_standby_feedback", "on")
        .setting("wal_receiver_status_interval", "1s")
        .setting("max_standby_streaming_delay", "-1");
    let server = standby.start().unwrap();
    primary.start_again().unwrap();
    let reader = harness::connect(&server.socket_url("postgres")).await;
    let open = "BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM pg_class";
    reader.batch_execute(open).await.unwrap();
    let client = harness::connect(&primary.socket_url("postgres")).await;
    eventually("the standby server holds back the horizon", || async {
        let held =
            "SELECT FROM pg_replication_slots WHERE slot_name = 'standby' AND xmin IS NOT NULL";
        (!client.query(held, &[]).await.unwrap().is_empty()).then_some(())
    })
    .await;
    let standby = Standby {
        server,
        _reader: reader,
    };
    (primary, standby)
}

/// Checks that the physical slot of the standby server holds back the horizon: the `xmin` of this slot is older than
/// every row of the table.
async fn assert_horizon_is_held(world: &World) {
    let held = "SELECT count(*) FROM pg_replication_slots s WHERE slot_name = 'standby' \
                AND age(s.xmin) > (SELECT max(age(e.xmin)) FROM TABLE_NAME e)";
    let held = held.replace("TABLE_NAME", &world.table);
    assert_eq!(world.database.number(&held).await, 1);
}

/// With `is_first_start`, the relay creates the slot and captures the table. Otherwise `init` has done both.
async fn new_rows_are_told_from_old_ones(kind: Kind, is_first_start: bool) {
    let (primary, mut standby) = with_standby().await;
    let emulator = harness::emulator().await;
    // The standby server already holds back the horizon, so even the old rows are newer than the horizon.
    let mut world = World::on(primary, kind, 1_000, emulator).await;
    if is_first_start {
        world = world.without_slot().await;
    } else {
        world.insert("early", 30).await;
    }
    let relay = world.streaming().await;
    world.insert("a", 30).await;
    world.note().await;
    world.wait_until_published(&relay).await;
    world.wait_until_compared(&relay).await;
    assert_horizon_is_held(&world).await;
    // Without the standby server, only its physical slot holds back the horizon.
    standby
        .server
        .stop(StopMode::Immediate, harness::PATIENCE)
        .unwrap();
    relay.stop().await;
    world.insert("b", 30).await;
    world.database.drop_slot().await;
    world.insert("c", 30).await;
    let relay = world.streaming().await;
    world.insert("d", 30).await;
    world.assert_published_once(relay).await;
    assert_horizon_is_held(&world).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn with_a_held_back_horizon_a_first_start_tells_new_rows_from_old_ones() {
    new_rows_are_told_from_old_ones(Kind::Events, true).await;
    new_rows_are_told_from_old_ones(Kind::Uuid, true).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn with_a_held_back_horizon_a_start_after_init_tells_new_rows_from_old_ones() {
    new_rows_are_told_from_old_ones(Kind::Numbered, false).await;
    new_rows_are_told_from_old_ones(Kind::Partitioned, false).await;
}
