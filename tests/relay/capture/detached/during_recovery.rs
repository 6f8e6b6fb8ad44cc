//! Tests a partition that is detached while a recovery reads its table.

use std::time::Duration;

use pubsub_emulator::{Action, Fault};

use super::super::stored;
use super::*;

const ATTACH_AGAIN: &str = "ALTER TABLE public.parts ATTACH PARTITION public.parts_2 \
     FOR VALUES FROM ('2022-01-01') TO ('2023-01-01')";

/// Starts a recovery of a table with `rows` unpublished rows, while Pub/Sub refuses connections. The relay cannot hold
/// all of these rows in memory, so the recovery has not read all of them yet.
async fn recovering(dispatch: &str, rows: u32) -> (World, Relay) {
    let mut world = World::new(Kind::Partitioned, 20).await;
    world.more.push(("POSTRIDER_DISPATCH", dispatch.to_owned()));
    world.more.push(("POSTRIDER_IN_FLIGHT_MIB", "1".to_owned()));
    let relay = world.streaming().await;
    insert(&mut world, "before", 40).await;
    world.note().await;
    world.wait_until_published(&relay).await;
    relay.stop().await;
    insert_many(&mut world, rows).await;
    world.database.drop_slot().await;
    world.emulator.faults().refuse_connections(true);
    let relay = world.relay();
    relay.wait_for_log("pubsub-unreachable").await;
    (world, relay)
}

/// The partition is detached while a recovery reads the table, and attached again before the recovery has
/// read the whole table. The table has the same partitions at the start and at the end, so the relay must
/// notice in another way that it has missed rows.
#[tokio::test(flavor = "multi_thread")]
async fn rows_of_a_partition_detached_and_reattached_during_a_recovery_are_published() {
    let (world, relay) = recovering("exceptions", 40_000).await;
    world.execute(DETACH).await;
    let slow = Action::Delay(Duration::from_millis(200));
    world.emulator.faults().inject(Fault::new(slow));
    world.emulator.faults().refuse_connections(false);
    eventually("some rows are published meanwhile", || async {
        (stored(&world.emulator).len() > 12_000).then_some(())
    })
    .await;
    world.emulator.faults().refuse_connections(true);
    assert!(!relay.log().contains("finished reading"), "{}", relay.log());
    world.execute(ATTACH_AGAIN).await;
    world.emulator.faults().lift_all();
    world.emulator.faults().refuse_connections(false);
    world.wait_until_published(&relay).await;
    world.wait_until_compared(&relay).await;
    let log = relay.log();
    assert!(log.contains("while the relay read it"), "{log}");
    relay.stop().await;
}

/// Commits new rows in one transaction. All rows of a key are in the same partition.
async fn insert_many(world: &mut World, rows: u32) {
    let (first, last) = (world.next, world.next + rows - 1);
    world.next += rows;
    let many = format!(
        "INSERT INTO public.parts (aggregatetype, aggregateid, event_type, payload, day) \
         SELECT 'order', 'a-' || i % 4, 'New', jsonb_build_object('n', i), \
             date '2020-01-01' + i % 4 * 366 FROM generate_series({first}, {last}) i"
    );
    world.execute(&many).await;
    world.note().await;
}

/// The partition is detached while a recovery reads the table, so the recovery finds only some of the
/// partition's rows there.
#[tokio::test(flavor = "multi_thread")]
async fn rows_of_a_partition_that_is_detached_during_a_recovery_are_published() {
    for mode in ["full", "exceptions"] {
        let (world, relay) = recovering(mode, 20_000).await;
        assert!(!relay.log().contains("finished reading"), "{}", relay.log());
        world.execute(DETACH).await;
        world.emulator.faults().refuse_connections(false);
        world.wait_until_published(&relay).await;
        world.wait_until_compared(&relay).await;
        relay.stop().await;
    }
}
