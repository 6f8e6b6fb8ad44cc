//! The relay finds and publishes rows that the publication left out. The relay needs only the
//! documented rights. If it is killed after it noticed a gap, the next relay publishes the rows.

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
    let sql = "CREATE TABLE public.more (LIKE public.parts INCLUDING ALL); \
               INSERT INTO public.more (aggregatetype, aggregateid, event_type, payload, day) \
               SELECT 'order', 'attached-' || i % 5, 'New', jsonb_build_object('n', i), '2031-05-05' \
               FROM generate_series(1001, 1030) i; \
               ALTER TABLE public.parts ATTACH PARTITION public.more \
                   FOR VALUES FROM ('2031-01-01') TO ('2032-01-01')";
    world.execute(sql).await;
    // Restart the relay, because its first audit runs soon after the start.
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

/// The rows of the gap reuse free space in old pages of the table. The relay must find them there.
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
/// publication triggers an audit, which ends before this transaction does. The relay must compare
/// the rows again soon after the transaction ends.
#[tokio::test(flavor = "multi_thread")]
async fn rows_missed_during_a_long_transaction_are_published_soon_after_it_ends() {
    let (mut world, relay) = World::served(Kind::Numbered, 40).await;
    world.execute(ANOTHER).await;
    let slow = harness::connect(&world.database.url).await;
    let write = "BEGIN; INSERT INTO public.another VALUES (1)";
    slow.batch_execute(write).await.unwrap();
    let audited = "SELECT coalesce(audited_publication, '') FROM outbox.relay";
    world.execute(OUT).await;
    let with_gap = world.database.text(audited).await;
    world.insert("gap", 20).await;
    world.execute(IN).await;
    world.insert("a", 20).await;
    eventually("the change of the publication is audited", || async {
        (world.database.text(audited).await != with_gap).then_some(())
    })
    .await;
    // The auditor runs once more, and is then idle for over 2.5 s.
    let pauses = "SELECT count(*) FROM pg_stat_activity \
                  WHERE application_name = 'postrider auditor' \
                    AND clock_timestamp() - state_change > '2500 ms'";
    eventually("the auditor pauses", || async {
        (world.database.number(pauses).await == 1).then_some(())
    })
    .await;
    slow.batch_execute("COMMIT").await.unwrap();
    world.assert_published_once(relay).await;
}
