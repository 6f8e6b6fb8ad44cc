//! Tests of gaps. The relay finds and publishes rows that the publication left out, and needs only the
//! documented rights for this. If the relay is killed after it noticed a gap, the next relay publishes
//! the rows.

use super::World;
use super::table::Kind;
use crate::harness::{self, eventually};
use crate::privileges::login_role;

const OUT: &str = "ALTER PUBLICATION postrider DROP TABLE TABLE_NAME";
const IN: &str = "ALTER PUBLICATION postrider ADD TABLE TABLE_NAME";
/// Adds another table, so that the publication never becomes empty.
const ANOTHER: &str = "CREATE TABLE public.another (id int); \
                       ALTER PUBLICATION postrider ADD TABLE public.another";

/// Starts a relay under a login role that has only the rights of `postrider_relay`.
async fn served_by_its_role(kind: Kind) -> (World, harness::Relay) {
    let mut world = World::new(kind, 100).await;
    let url = login_role(&world.database).await;
    world.more.push(("DATABASE_URL", url));
    world.serve(40).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gap_is_closed_with_the_documented_rights() {
    for kind in [Kind::Events, Kind::Numbered, Kind::Uuid, Kind::Partitioned] {
        let (mut world, relay) = served_by_its_role(kind).await;
        world.execute(OUT).await;
        world.insert("gap", 40).await;
        world.execute(IN).await;
        world.insert("a", 20).await;
        world.assert_published_once(relay).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_slot_loses_nothing_with_the_documented_rights() {
    for kind in [Kind::Numbered, Kind::Partitioned] {
        let (mut world, relay) = served_by_its_role(kind).await;
        relay.stop().await;
        world.insert("a", 40).await;
        world.database.drop_slot().await;
        world.insert("b", 40).await;
        let relay = world.relay();
        world.assert_published_once(relay).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_attached_partition_is_read_with_the_documented_rights() {
    let (mut world, relay) = served_by_its_role(Kind::Partitioned).await;
    world.attach_filled_partition(30).await;
    // Restart the relay: its first audit runs soon after the start. Without a restart, the next
    // audit could be five minutes away.
    relay.stop().await;
    let relay = world.relay();
    world.assert_published_once(relay).await;
}

/// The moment at which the test kills the relay that noticed the gap.
#[derive(Clone, Copy, PartialEq)]
enum Killed {
    WhileThereIsTheGap,
    RightAfterIt,
}

async fn a_gap_that_was_seen_is_closed_after_a_crash(kind: Kind, killed: Killed) {
    let (mut world, relay) = World::served(kind, 40).await;
    world.execute(ANOTHER).await;
    world.execute(OUT).await;
    relay.wait_for_log("publication-drift").await;
    world.insert("gap", 40).await;
    if killed == Killed::RightAfterIt {
        world.execute(IN).await;
    }
    relay.kill_9();
    harness::wait_until_killed_relays_are_gone(&world.database, &world.emulator).await;
    if killed == Killed::WhileThereIsTheGap {
        world.execute(IN).await;
    }
    world.insert("a", 20).await;
    let relay = world.relay();
    world.assert_published(relay).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gap_is_closed_after_the_relay_is_killed_during_it() {
    for kind in [Kind::Events, Kind::Numbered, Kind::Partitioned] {
        a_gap_that_was_seen_is_closed_after_a_crash(kind, Killed::WhileThereIsTheGap).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gap_is_closed_after_the_relay_is_killed_right_after_it() {
    for kind in [Kind::Events, Kind::Uuid, Kind::Partitioned] {
        a_gap_that_was_seen_is_closed_after_a_crash(kind, Killed::RightAfterIt).await;
    }
}

/// The rows of the gap are not at the end of the table, because they reuse free space in old pages. The
/// relay must find them there.
#[tokio::test(flavor = "multi_thread")]
async fn rows_of_a_gap_in_reused_pages_are_found() {
    for kind in [Kind::Numbered, Kind::Uuid] {
        let (mut world, relay) = World::served(kind, 400).await;
        let make_room = "DELETE FROM TABLE_NAME WHERE (payload->>'n')::int % 2 = 0";
        world.execute(make_room).await;
        world.execute("VACUUM TABLE_NAME").await;
        world.execute(ANOTHER).await;
        world.execute(OUT).await;
        relay.wait_for_log("publication-drift").await;
        world.insert("gap", 100).await;
        world.execute(IN).await;
        world.assert_published_once(relay).await;
    }
}

/// After the slot is lost, the recovery also publishes the rows of the earlier gap.
#[tokio::test(flavor = "multi_thread")]
async fn a_gap_and_a_lost_slot_together_lose_nothing() {
    for kind in [Kind::Events, Kind::Numbered, Kind::Partitioned] {
        let (mut world, relay) = World::served(kind, 40).await;
        world.execute(ANOTHER).await;
        world.execute(OUT).await;
        relay.wait_for_log("publication-drift").await;
        world.insert("gap", 40).await;
        relay.stop().await;
        world.execute(IN).await;
        world.database.drop_slot().await;
        world.insert("a", 20).await;
        let relay = world.relay();
        world.assert_published_once(relay).await;
    }
}

/// The relay cannot compare the rows of a gap while an older transaction runs. The change of the
/// publication triggers an audit before this transaction ends. The relay must compare the rows again soon
/// after the transaction ends.
#[tokio::test(flavor = "multi_thread")]
async fn rows_missed_during_a_long_transaction_are_published_soon_after_it_ends() {
    let (mut world, relay) = World::served(Kind::Numbered, 40).await;
    world.execute(ANOTHER).await;
    let slow = harness::connect(&world.database.url).await;
    let write = "BEGIN; INSERT INTO public.another VALUES (1)";
    slow.batch_execute(write).await.unwrap();
    world.execute(OUT).await;
    world.insert("gap", 20).await;
    world.execute(IN).await;
    let changed = world.database.text("SELECT clock_timestamp()::text").await;
    world.insert("a", 20).await;
    // Wait until the auditor has run after the change, and has then been idle for more than 2.5 s, so
    // that the slow transaction ends while the auditor pauses.
    let pauses = format!(
        "SELECT count(*) FROM pg_stat_activity \
         WHERE application_name = 'postrider auditor' AND state_change > '{changed}' \
             AND clock_timestamp() - state_change > '2500 ms'"
    );
    eventually("the auditor pauses", || async {
        (world.database.number(&pauses).await == 1).then_some(())
    })
    .await;
    slow.batch_execute("COMMIT").await.unwrap();
    world.assert_published_once(relay).await;
}

/// A partition is detached, filled and attached again. The table then has the same partitions as before, so
/// the relay must notice that another transaction has attached one of them.
#[tokio::test(flavor = "multi_thread")]
async fn rows_of_a_partition_that_was_filled_while_it_was_detached_are_published_without_a_restart()
{
    let (mut world, relay) = World::served(Kind::Partitioned, 50).await;
    world.wait_until_compared(&relay).await;
    world
        .execute(
            "ALTER TABLE public.parts DETACH PARTITION public.parts_2; \
             INSERT INTO public.parts_2 (aggregatetype, aggregateid, event_type, payload, day) \
             SELECT 'order', 'detached-' || i % 5, 'New', jsonb_build_object('n', i), '2022-05-05' \
             FROM generate_series(1001, 1030) i; \
             ALTER TABLE public.parts ATTACH PARTITION public.parts_2 \
                 FOR VALUES FROM ('2022-01-01') TO ('2023-01-01')",
        )
        .await;
    world.assert_published_once(relay).await;
}

/// A transaction that is open during a gap commits long after the relay has published the other rows of the
/// gap. The relay must find both rows of this transaction, although one of them has a lower id than all
/// earlier rows.
#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_that_ends_long_after_a_gap_loses_no_row_even_with_a_low_id() {
    let (mut world, relay) = World::served(Kind::Numbered, 100).await;
    relay.stop().await;
    let relay = world.streaming().await;
    world.insert("a", 20).await;
    world.note().await;
    world.wait_until_published(&relay).await;
    world.wait_until_compared(&relay).await;
    world.execute(ANOTHER).await;
    world.execute(OUT).await;
    world.insert("gap", 5).await;
    let long = harness::connect(&world.database.url).await;
    let n = world.next;
    world.next += 2;
    let late = format!(
        "INSERT INTO public.numbered (id, aggregatetype, aggregateid, event_type, payload) \
             VALUES (-5, 'order', 'low', 'New', '{{\"n\": {n}}}'); \
         INSERT INTO public.numbered (aggregatetype, aggregateid, event_type, payload) \
             VALUES ('order', 'high', 'New', '{{\"n\": {}}}')",
        n + 1
    );
    long.batch_execute(&format!("BEGIN; {late}")).await.unwrap();
    world.execute(IN).await;
    world.note().await;
    world.wait_until_published(&relay).await;
    long.batch_execute("COMMIT").await.unwrap();
    world.assert_published_once(relay).await;
}
