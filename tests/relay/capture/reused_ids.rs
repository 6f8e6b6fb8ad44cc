//! Tests in which a table with numbered ids and without the column `inserted_xid` is recreated. Its ids
//! then start at 1 again, but the new rows are new events. So their event ids must differ from those of
//! the earlier rows.

use std::collections::HashSet;

use super::World;
use super::table::Kind;
use crate::harness::{Relay, eventually};
use crate::privileges::login_role;

const PUBLISH: &str = "ALTER PUBLICATION postrider ADD TABLE TABLE_NAME";

/// Recreates `public.timed` as the service's own script does: without the columns that `init` adds.
fn recreate() -> String {
    format!("DROP TABLE public.timed; {}", Kind::Timed.create())
}

/// Recreates `public.timed` as a partitioned table.
const RECREATE_PARTITIONED: &str = "\
    DROP TABLE public.timed; \
    CREATE TABLE public.timed (id bigserial, aggregatetype text, aggregateid text, event_type text, \
        payload jsonb, occurred_at timestamptz NOT NULL DEFAULT clock_timestamp()) \
        PARTITION BY RANGE (id); \
    CREATE TABLE public.timed_1 PARTITION OF public.timed FOR VALUES FROM (0) TO (20); \
    CREATE TABLE public.timed_2 PARTITION OF public.timed FOR VALUES FROM (20) TO (99999)";

/// Copies the table and swaps the table with the copy.
const SWAP: &str = "\
    BEGIN; LOCK TABLE public.timed; \
    CREATE TABLE public.copied (LIKE public.timed INCLUDING ALL); \
    INSERT INTO public.copied SELECT * FROM public.timed; \
    ALTER SEQUENCE public.timed_id_seq OWNED BY public.copied.id; \
    DROP TABLE public.timed; ALTER TABLE public.copied RENAME TO timed; \
    ALTER PUBLICATION postrider SET TABLE public.timed; COMMIT";

/// The state of the relay and the slot while the table is replaced.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Meanwhile {
    RelayRuns,
    RelayIsDown,
    SlotIsLost,
}

const ALL: [Meanwhile; 3] = [
    Meanwhile::RelayRuns,
    Meanwhile::RelayIsDown,
    Meanwhile::SlotIsLost,
];

/// Starts a relay that captures `public.timed`, and waits until 50 rows with keys `before-…` have
/// records.
async fn served(has_column: bool) -> (World, Relay) {
    let mut world = World::new(Kind::Timed, 0).await;
    if !has_column {
        let drop = "ALTER TABLE TABLE_NAME DROP COLUMN inserted_xid";
        world.execute(drop).await;
        world = world.without_slot().await;
    }
    let relay = world.streaming().await;
    world.insert("before", 50).await;
    published(&world, &relay, 50).await;
    world.wait_until_compared(&relay).await;
    recorded(&world, 50).await;
    (world, relay)
}

/// The event ids that were published, and the number of stored messages.
fn stored(world: &World) -> (HashSet<String>, usize) {
    let stored = super::stored(&world.emulator);
    let messages = stored.values().sum::<u32>();
    (stored.into_keys().collect(), messages as usize)
}

/// Waits until `events` different events are published. Repeats do not count, because consumers
/// drop messages with a known event id.
async fn published(world: &World, relay: &Relay, events: usize) {
    eventually(&format!("{events} events are published"), || async {
        assert!(!relay.log().contains("error["), "{}", relay.log());
        (stored(world).0.len() >= events).then_some(())
    })
    .await;
}

async fn recorded(world: &World, events: i64) {
    let records = "SELECT count(DISTINCT event_id) FROM outbox.dispatch WHERE state = 'published'";
    eventually("the events have records", || async {
        (world.database.number(records).await >= events).then_some(())
    })
    .await;
}

/// Checks that `events` different events were published, each once, and that a restart and an audit
/// repeat none of them.
async fn assert_published_once(world: &World, relay: Relay, events: usize) {
    published(world, &relay, events).await;
    world.wait_until_compared(&relay).await;
    relay.stop().await;
    let relay = world.relay();
    world.wait_until_compared(&relay).await;
    let (ids, messages) = stored(world);
    assert_eq!((ids.len(), messages), (events, events), "{}", relay.log());
    relay.stop().await;
}

/// Recreates the table twice with `recreate`. Each time, inserts rows with the ids and keys of
/// earlier rows.
async fn recreated(has_column: bool, recreate: &str, meanwhile: Meanwhile) {
    replaced_twice(has_column, meanwhile, async |world| {
        world.execute(recreate).await;
        world.execute(PUBLISH).await;
        world.insert("before", 30).await;
    })
    .await;
}

/// Replaces the table twice with `replace`, which also inserts 30 rows. Checks that each row is published
/// once.
async fn replaced_twice(has_column: bool, meanwhile: Meanwhile, replace: impl AsyncFn(&mut World)) {
    let (mut world, relay) = served(has_column).await;
    let mut running = Some(relay);
    for n in 0..2 {
        if meanwhile != Meanwhile::RelayRuns
            && let Some(relay) = running.take()
        {
            relay.stop().await;
        }
        replace(&mut world).await;
        if meanwhile == Meanwhile::SlotIsLost {
            world.database.drop_slot().await;
        }
        let relay = running.take().unwrap_or_else(|| world.relay());
        published(&world, &relay, 50 + 30 * (n + 1)).await;
        world.wait_until_compared(&relay).await;
        running = Some(relay);
    }
    assert_published_once(&world, running.unwrap(), 110).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_of_a_recreated_table_without_columns_are_new_events() {
    for meanwhile in ALL {
        recreated(false, &recreate(), meanwhile).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_of_a_table_recreated_without_the_columns_of_init_are_new_events() {
    for meanwhile in ALL {
        recreated(true, &recreate(), meanwhile).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_of_a_table_recreated_with_partitions_are_new_events() {
    recreated(false, RECREATE_PARTITIONED, Meanwhile::RelayRuns).await;
    recreated(false, RECREATE_PARTITIONED, Meanwhile::SlotIsLost).await;
}

/// The table is recreated twice while the relay is down. The WAL then contains rows of three tables
/// with the same ids.
#[tokio::test(flavor = "multi_thread")]
async fn rows_of_every_earlier_table_in_the_log_are_published() {
    let (mut world, relay) = served(false).await;
    relay.stop().await;
    world.insert("a", 30).await;
    world.note().await;
    for _ in 0..2 {
        world.execute(&recreate()).await;
        world.execute(PUBLISH).await;
        world.insert("a", 30).await;
    }
    let relay = world.relay();
    published(&world, &relay, 140).await;
    // Every row of the first table was published under its old event id.
    assert_eq!(world.missing(), 0);
    assert_published_once(&world, relay, 140).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn copying_and_swapping_a_table_without_columns_repeats_and_loses_nothing() {
    for meanwhile in ALL {
        replaced_twice(false, meanwhile, async |world| {
            world.insert("a", 10).await;
            world.execute(SWAP).await;
            world.insert("b", 20).await;
        })
        .await;
    }
}

/// A copy of a recreated table keeps the event ids of the recreated table, so the relay must repeat
/// nothing.
#[tokio::test(flavor = "multi_thread")]
async fn a_recreated_table_that_is_copied_and_renamed_repeats_nothing() {
    let (mut world, relay) = served(false).await;
    world.execute(&recreate()).await;
    world.execute(PUBLISH).await;
    world.insert("before", 30).await;
    published(&world, &relay, 80).await;
    world.wait_until_compared(&relay).await;
    relay.stop().await;
    world.execute(SWAP).await;
    world
        .execute("ALTER TABLE public.timed RENAME TO called")
        .await;
    world.now_called("public.called");
    world.insert("b", 20).await;
    let relay = world.relay();
    assert_published_once(&world, relay, 100).await;
}

/// Rows without `inserted_xid` keep their event ids when `init` adds the column, so the relay must repeat
/// nothing.
#[tokio::test(flavor = "multi_thread")]
async fn a_recreated_table_that_gets_the_columns_later_repeats_nothing() {
    let (mut world, relay) = served(false).await;
    relay.stop().await;
    world.execute(&recreate()).await;
    world.execute(PUBLISH).await;
    world.insert("before", 30).await;
    let relay = world.relay();
    published(&world, &relay, 80).await;
    world.wait_until_compared(&relay).await;
    relay.stop().await;
    let done = world.run(&["init", "--apply"], &[]);
    assert!(done.status.success(), "{done:?}");
    world.execute("VACUUM FULL TABLE_NAME").await;
    world.insert("b", 20).await;
    let relay = world.relay();
    assert_published_once(&world, relay, 100).await;
}

/// With `dispatch = exceptions`, published events have no record, so the relay may publish a row more than once. The
/// test therefore counts only event ids. Each row of a recreated table must get a new event id.
#[tokio::test(flavor = "multi_thread")]
async fn rows_of_a_recreated_table_are_new_events_without_records() {
    for loses_slot in [false, true] {
        let world = World::new(Kind::Timed, 0).await;
        let drop = "ALTER TABLE TABLE_NAME DROP COLUMN inserted_xid";
        world.execute(drop).await;
        let mut world = world.without_slot().await;
        world
            .more
            .push(("POSTRIDER_DISPATCH", "exceptions".to_owned()));
        let relay = world.streaming().await;
        world.insert("before", 50).await;
        published(&world, &relay, 50).await;
        world.wait_until_compared(&relay).await;
        relay.stop().await;
        for n in 0..2 {
            world.execute(&recreate()).await;
            world.execute(PUBLISH).await;
            world.insert("before", 30).await;
            if loses_slot {
                world.database.drop_slot().await;
            }
            let relay = world.relay();
            published(&world, &relay, 80 + 30 * n).await;
            world.wait_until_compared(&relay).await;
            relay.stop().await;
        }
        assert_eq!(stored(&world).0.len(), 110);
    }
}

/// Recreates the table, and restores a backup of its rows up to the id `highest`. The ids of later
/// rows grow in steps of `step`.
async fn restore(world: &World, highest: u32, step: u32) {
    world
        .execute(&format!(
            "CREATE TABLE public.backup AS SELECT * FROM public.timed WHERE id <= {highest}; {}; {PUBLISH}; \
             INSERT INTO public.timed SELECT * FROM public.backup; \
             ALTER SEQUENCE public.timed_id_seq INCREMENT BY {step}; \
             SELECT setval('public.timed_id_seq', {highest})",
            recreate()
        ))
        .await;
}

/// Some of the new rows have ids that the relay has recorded for lost rows, and others have higher ids.
/// All of them are new events.
#[tokio::test(flavor = "multi_thread")]
async fn many_rows_that_are_written_after_a_backup_was_restored_are_published() {
    let (mut world, relay) = served(false).await;
    world.insert_at_once("before", 1_050).await;
    published(&world, &relay, 1_100).await;
    world.wait_until_compared(&relay).await;
    recorded(&world, 1_100).await;
    relay.stop().await;
    restore(&world, 1_000, 1).await;
    world.insert_at_once("before", 600).await;
    let relay = world.relay();
    assert_published_once(&world, relay, 1_100 + 1_600).await;
}

/// The ids of the lost rows are far above the ids in the backup, and the relay sees the restored
/// backup before new rows are written.
#[tokio::test(flavor = "multi_thread")]
async fn rows_with_distant_ids_that_are_written_after_a_backup_was_restored_are_published() {
    let (mut world, relay) = served(false).await;
    let sparse = "ALTER SEQUENCE public.timed_id_seq INCREMENT BY 5000";
    world.execute(sparse).await;
    world.insert("before", 10).await;
    published(&world, &relay, 60).await;
    world.wait_until_compared(&relay).await;
    recorded(&world, 60).await;
    relay.stop().await;
    restore(&world, 50, 5_000).await;
    let relay = world.relay();
    world.wait_until_compared(&relay).await;
    world.insert("before", 20).await;
    assert_published_once(&world, relay, 60 + 50 + 20).await;
}

/// The table is replaced by a copy of itself, which the relay has no right to read. So the relay cannot find out that
/// the rows are copies. It must stop with an error, and must not take the rows for new events.
#[tokio::test(flavor = "multi_thread")]
async fn a_failed_statement_does_not_decide_that_the_rows_of_a_copy_are_new() {
    let (mut world, relay) = served(false).await;
    relay.stop().await;
    let url = login_role(&world.database).await;
    world.more.push(("DATABASE_URL", url));
    world.execute(SWAP).await;
    world.insert("b", 20).await;
    let refused = world.relay();
    refused.wait_for_error("privilege-missing").await;
    assert_eq!(refused.wait().await.code(), Some(3));
    let grant = "GRANT SELECT ON public.timed TO shop_relay";
    world.execute(grant).await;
    let relay = world.relay();
    assert_published_once(&world, relay, 70).await;
}

/// A restored backup lacks the latest rows, so new rows get the ids of the missing rows.
#[tokio::test(flavor = "multi_thread")]
async fn rows_that_are_written_after_a_backup_was_restored_are_published() {
    let (mut world, relay) = served(false).await;
    relay.stop().await;
    restore(&world, 30, 1).await;
    world.insert("before", 20).await;
    let relay = world.relay();
    // The relay also publishes the restored rows again, because losing events is worse than
    // repeating them.
    assert_published_once(&world, relay, 50 + 30 + 20).await;
}

/// On another server, the recorded OIDs belong to other tables. Nevertheless, the rows of a recreated
/// table must keep their event ids there.
#[tokio::test(flavor = "multi_thread")]
async fn a_recreated_table_that_moves_to_another_server_repeats_and_loses_nothing() {
    let (mut world, relay) = served(false).await;
    relay.stop().await;
    for events in [80, 110] {
        world.execute(&recreate()).await;
        world.execute(PUBLISH).await;
        world.insert("before", 30).await;
        let relay = world.relay();
        published(&world, &relay, events).await;
        world.wait_until_compared(&relay).await;
        relay.stop().await;
        let other = "UPDATE outbox.relay SET system_identifier = '1' || system_identifier";
        world.execute(other).await;
        let adopted = world.run(&["recover", "--adopt", "--yes"], &[]);
        assert!(adopted.status.success(), "{adopted:?}");
    }
    let suffix = "SELECT id_suffixes ->> table_oid::text = '@1.' || table_oid FROM outbox.capture";
    let suffix = world.database.client.query_one(suffix, &[]).await.unwrap();
    assert!(suffix.get::<_, bool>(0));
    let relay = world.relay();
    assert_published_once(&world, relay, 110).await;
}

/// The earlier tables still exist under other names, with undelivered rows. Rows of all three tables have
/// the same ids.
#[tokio::test(flavor = "multi_thread")]
async fn rows_of_renamed_and_replaced_tables_are_published_after_a_lost_slot() {
    let (mut world, relay) = served(false).await;
    relay.stop().await;
    for (name, rows, events) in [("first", 30, 90), ("second", 60, 160)] {
        world.insert("before", 10).await;
        let replace = format!(
            "ALTER TABLE public.timed RENAME TO {name}; {}; \
             ALTER PUBLICATION postrider SET TABLE public.timed",
            Kind::Timed.create()
        );
        world.execute(&replace).await;
        world.insert("before", rows).await;
        world.database.drop_slot().await;
        let relay = world.relay();
        published(&world, &relay, events).await;
        world.wait_until_compared(&relay).await;
        relay.stop().await;
    }
    let relay = world.relay();
    assert_published_once(&world, relay, 160).await;
}
