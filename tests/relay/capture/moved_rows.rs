//! Tests in which rows are moved between partitions, and partitions are attached or detached. The relay
//! must lose no row. It must publish no moved row twice, unless the record of the row's event is gone.

use std::collections::HashMap;

use pubsub_emulator::{Action, Fault};
use tonic::Code;

use super::table::Kind;
use super::{ATTACH, World};
use crate::harness::{self, eventually};

/// The stream does not contain the rows of the attached partition, because they were inserted before the attach. An
/// audit publishes these rows. The test restarts the relay, because a relay audits its tables soon after its start.
#[tokio::test(flavor = "multi_thread")]
async fn rows_of_a_partition_attached_under_a_running_relay_are_published() {
    let (mut world, relay) = World::served(Kind::Partitioned, 50).await;
    world.attach_filled_partition(30).await;
    world.insert("a", 30).await;
    relay.stop().await;
    let relay = world.relay();
    world.assert_published_once(relay).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_of_a_partition_attached_while_the_relay_is_down_are_published() {
    let (mut world, relay) = World::served(Kind::Partitioned, 50).await;
    relay.stop().await;
    world.attach_filled_partition(30).await;
    world.insert("a", 30).await;
    let relay = world.relay();
    world.assert_published_once(relay).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_of_an_attached_partition_are_published_even_if_the_slot_is_lost() {
    let (mut world, relay) = World::served(Kind::Partitioned, 50).await;
    world.attach_filled_partition(30).await;
    relay.stop().await;
    world.database.drop_slot().await;
    world.insert("a", 30).await;
    let relay = world.relay();
    world.assert_published_once(relay).await;
}

/// When the partition is attached, its rows are already below the floor. The relay must publish them,
/// although an ordinary audit does not read rows below the floor.
#[tokio::test(flavor = "multi_thread")]
async fn rows_of_a_partition_filled_long_before_are_published() {
    let (mut world, relay) = World::served(Kind::Partitioned, 50).await;
    world.fill_partition(30).await;
    relay.stop().await;
    // Let the floor rise above the rows of the partition.
    world.insert("a", 30).await;
    let relay = world.relay();
    world.note().await;
    world.wait_until_published(&relay).await;
    world.wait_until_compared(&relay).await;
    relay.stop().await;
    world.execute(ATTACH).await;
    world.database.drop_slot().await;
    let relay = world.relay();
    world.assert_published_once(relay).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_of_a_partition_detached_before_streaming_are_published() {
    let (mut world, relay) = World::served(Kind::Partitioned, 50).await;
    relay.stop().await;
    world.insert("a", 40).await;
    world.note().await;
    world
        .execute("ALTER TABLE public.parts DETACH PARTITION public.parts_2")
        .await;
    let relay = world.relay();
    world.insert_into_first_partition("b", 30).await;
    world.assert_published_once(relay).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_partition_that_is_detached_and_attached_again_repeats_nothing() {
    let (mut world, relay) = World::served(Kind::Partitioned, 50).await;
    world
        .execute("ALTER TABLE public.parts DETACH PARTITION public.parts_2")
        .await;
    world.insert_into_first_partition("a", 30).await;
    world
        .execute(
            "ALTER TABLE public.parts ATTACH PARTITION public.parts_2 \
             FOR VALUES FROM ('2022-01-01') TO ('2023-01-01')",
        )
        .await;
    world.insert("b", 30).await;
    world.assert_published_once(relay).await;
}

/// Moves rows to a later partition with an `UPDATE`.
const BY_UPDATE: &str = "UPDATE public.parts SET day = day + 366 WHERE day < '2022-06-01'";
/// Moves rows to a later partition with a `DELETE` and an `INSERT`, as pg_partman does.
const BY_PARTMAN: &str = "\
    WITH gone AS (DELETE FROM public.parts WHERE day < '2022-06-01' RETURNING *) \
    INSERT INTO public.parts SELECT id, aggregatetype, aggregateid, event_type, payload, day + 366, \
        inserted_xid, seq FROM gone";

async fn moved(how: &str, with_restart: bool) {
    let (mut world, relay) = World::served(Kind::Partitioned, 60).await;
    let relay = if with_restart {
        relay.stop().await;
        world.streaming().await
    } else {
        relay
    };
    world.wait_until_compared(&relay).await;
    world.execute(how).await;
    world.insert("a", 30).await;
    world.assert_published_once(relay).await;
}

/// A moved row without a record looks like a row that waited in a staging table and was never published.
/// Publishing it twice is better than losing it.
#[tokio::test(flavor = "multi_thread")]
async fn a_moved_row_whose_record_was_pruned_is_published_again_under_its_event_id() {
    let (world, relay) = World::served(Kind::Partitioned, 60).await;
    world.wait_until_compared(&relay).await;
    // Only the move below makes the relay publish the pruned rows again. The pruning alone does not,
    // because the relay compares the whole table only after a change of the table.
    let prune = "DELETE FROM outbox.dispatch d USING public.parts e \
                 WHERE d.event_id = e.id AND e.day < '2022-06-01'";
    let pruned = world.database.client.execute(prune, &[]).await.unwrap();
    assert!(pruned > 0);
    world.execute(BY_UPDATE).await;
    let twice = || {
        let mut copies = HashMap::new();
        let attempts = world.emulator.journal().attempts();
        for attempt in attempts.iter().filter(|attempt| attempt.is_stored()) {
            for id in attempt.event_ids.iter().flatten() {
                *copies.entry(id.clone()).or_insert(0) += 1;
            }
        }
        copies.values().filter(|copies| **copies == 2).count() as u64
    };
    eventually("moved rows are published again", || async {
        (twice() == pruned).then_some(())
    })
    .await;
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_update_that_moves_rows_to_another_partition_repeats_nothing() {
    moved(BY_UPDATE, false).await;
    moved(BY_UPDATE, true).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn deleting_and_inserting_rows_into_another_partition_repeats_nothing() {
    moved(BY_PARTMAN, false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn old_rows_that_move_to_another_partition_are_not_published() {
    let mut world = World::new(Kind::Partitioned, 100).await;
    let relay = world.streaming().await;
    world.execute(BY_UPDATE).await;
    world.insert("a", 30).await;
    world.assert_published_once(relay).await;
}

/// The rows are inserted and moved while no relay runs. The next relay streams both changes, but
/// publishes each row once.
#[tokio::test(flavor = "multi_thread")]
async fn rows_that_move_before_they_are_streamed_are_published_once() {
    for how in [BY_UPDATE, BY_PARTMAN] {
        let (mut world, relay) = World::served(Kind::Partitioned, 50).await;
        relay.stop().await;
        world.insert("a", 40).await;
        world.execute(how).await;
        world.insert("b", 40).await;
        let relay = world.relay();
        world.assert_published_once(relay).await;
    }
}

/// A row that is inserted and moved by the same transaction was not published before, so the relay must
/// publish it.
#[tokio::test(flavor = "multi_thread")]
async fn a_row_that_its_own_transaction_moves_is_published() {
    let (mut world, relay) = World::served(Kind::Partitioned, 20).await;
    let rows: String = (0..8)
        .map(|n| world.row_sql(&format!("own-{n}")) + ";")
        .collect();
    let sql = format!("BEGIN; {rows} {BY_UPDATE}; COMMIT");
    world.execute(&sql).await;
    world.note().await;
    world.wait_until_published(&relay).await;
    let report = world.report();
    assert!(report.is_clean(), "{report}");
    relay.stop().await;
}

/// PostgreSQL never streams the rows of an unlogged partition, so the relay must read them from the
/// table.
#[tokio::test(flavor = "multi_thread")]
async fn rows_of_an_unlogged_partition_are_published_once_it_is_logged() {
    let (mut world, relay) = World::served(Kind::Partitioned, 50).await;
    world
        .execute("CREATE UNLOGGED TABLE public.more (LIKE public.parts INCLUDING ALL)")
        .await;
    world.execute(ATTACH).await;
    relay
        .wait_for_log("public.more of public.parts is an unlogged table")
        .await;
    let first = world.next;
    world.next += 30;
    let insert = format!(
        "INSERT INTO public.parts (aggregatetype, aggregateid, event_type, payload, day) \
         SELECT 'order', 'unlogged-' || i % 5, 'New', jsonb_build_object('n', i), '2030-05-05' \
         FROM generate_series({first}, {}) i",
        world.next - 1
    );
    world.execute(&insert).await;
    relay.stop().await;
    let refused = world.relay();
    refused.wait_for_error("publication-drift").await;
    assert_eq!(refused.wait().await.code(), Some(3));
    world.execute("ALTER TABLE public.more SET LOGGED").await;
    world.insert("a", 30).await;
    let relay = world.relay();
    world.assert_published_once(relay).await;
}

/// The relay has read the rows from the table, and the rows wait for Pub/Sub. Meanwhile they move
/// to another partition, so the stream also contains them as inserts.
#[tokio::test(flavor = "multi_thread")]
async fn rows_that_move_while_a_recovery_publishes_them_are_published_once() {
    let (mut world, relay) = World::served(Kind::Partitioned, 60).await;
    relay.stop().await;
    world.insert("a", 60).await;
    world.database.drop_slot().await;
    let faults = world.emulator.faults();
    let stalled = faults.inject(Fault::new(Action::Fail(Code::Unavailable)));
    let relay = world.relay();
    relay.wait_for_log("finished reading the table").await;
    world.execute(BY_UPDATE).await;
    world.insert("b", 20).await;
    eventually("requests fail", || async {
        (world.emulator.journal().counts().attempts > 20).then_some(())
    })
    .await;
    faults.lift(stalled);
    world.assert_published_once(relay).await;
}

/// Kills the relay during a recovery, runs the SQL `changes`, and starts a relay that continues the recovery. A
/// continued recovery identifies rows by `inserted_xid`. If only other properties of a row have changed, the
/// relay must neither lose nor repeat the row.
async fn changed_before_a_recovery_is_continued(kind: Kind, changes: &[&str]) {
    let (mut world, relay) = World::served(kind, 60).await;
    relay.stop().await;
    world.insert("a", 60).await;
    world.database.drop_slot().await;
    world.emulator.faults().refuse_connections(true);
    let relay = world.relay();
    relay.wait_for_log("finished reading the table").await;
    world.insert("a", 30).await;
    relay.kill_9();
    harness::wait_until_killed_relays_are_gone(&world.database, &world.emulator).await;
    for change in changes {
        world.execute(change).await;
    }
    world.insert("a", 30).await;
    let relay = world.relay();
    relay.wait_for_log("continuing a recovery").await;
    world.emulator.faults().refuse_connections(false);
    world.assert_published_once(relay).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_that_move_before_a_recovery_is_continued_are_published_once() {
    let moved_twice = [BY_UPDATE, "UPDATE public.parts SET event_type = event_type"];
    changed_before_a_recovery_is_continued(Kind::Partitioned, &moved_twice).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_of_a_table_that_is_rewritten_before_a_recovery_is_continued_are_published_once() {
    let rewritten = [
        "VACUUM FULL outbox.events",
        "ALTER TABLE outbox.events ALTER COLUMN event_type TYPE varchar(200)",
    ];
    changed_before_a_recovery_is_continued(Kind::Events, &rewritten).await;
}
