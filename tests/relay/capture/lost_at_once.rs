//! Tests of a slot that PostgreSQL invalidates just after the first start on a table with old rows, because
//! `max_slot_wal_keep_size` is small.

use pubsub_emulator::{Action, Fault};
use scratch_postgres::ScratchPostgres;
use tonic::Code;

use super::World;
use super::table::Kind;
use crate::harness;
use crate::recovery::lost_slot::{impatient_server, invalidate_slot};

async fn first_start(kind: Kind) -> World {
    let server: ScratchPostgres = impatient_server();
    let world = World::on(server, kind, 2_000, harness::emulator().await).await;
    world.without_slot().await
}

#[tokio::test(flavor = "multi_thread")]
async fn no_old_row_is_published_when_the_first_slot_is_invalidated_after_a_stop() {
    for kind in [Kind::Events, Kind::Partitioned] {
        let mut world = first_start(kind).await;
        world.streaming().await.stop().await;
        world.insert("a", 30).await;
        invalidate_slot(&world.database).await;
        world.insert("b", 30).await;
        let relay = world.streaming().await;
        assert!(relay.log().contains("slot-lost"), "{}", relay.log());
        world.insert("c", 30).await;
        world.assert_published_once(relay).await;
    }
}

/// Pub/Sub is down from the first start on, so the relay confirms nothing before it loses the slot.
#[tokio::test(flavor = "multi_thread")]
async fn no_old_row_is_published_when_the_first_slot_is_invalidated_while_the_relay_runs() {
    for kind in [Kind::Numbered, Kind::Uuid] {
        let mut world = first_start(kind).await;
        let faults = world.emulator.faults();
        let down = faults.inject(Fault::new(Action::Fail(Code::Unavailable)));
        let relay = world.streaming().await;
        world.insert("a", 30).await;
        invalidate_slot(&world.database).await;
        relay.wait_for_log("slot-lost").await;
        world.insert("b", 30).await;
        faults.lift(down);
        relay.wait_for_log("recovered").await;
        world.insert("c", 30).await;
        world.note().await;
        // Start another relay, because `assert_published_once` accepts no error in the log, and
        // this log has the error of the lost slot.
        relay.stop().await;
        let relay = world.streaming().await;
        world.assert_published_once(relay).await;
    }
}
