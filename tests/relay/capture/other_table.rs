//! Tests a change of the settings from the captured table to another table of the same partition tree,
//! while rows of the captured table are undelivered.

use super::World;
use super::table::Kind;
use crate::harness::{self, Database, Relay, eventually, insert_orders};

const EXCEPTIONS: (&str, &str) = ("POSTRIDER_DISPATCH", "exceptions");

/// Attaches the captured table to a new partitioned table, and captures the partitioned table from now on.
async fn captured_through_a_root(world: &mut World) {
    let table = world.table.clone();
    let name = table.rsplit('.').next().unwrap();
    world
        .execute(&format!(
            "BEGIN; ALTER TABLE {table} RENAME TO {name}_old; \
             CREATE TABLE public.root (LIKE public.{name}_old INCLUDING DEFAULTS) \
                 PARTITION BY LIST (event_type); \
             ALTER TABLE public.root ATTACH PARTITION public.{name}_old DEFAULT; \
             ALTER PUBLICATION postrider SET TABLE public.root; COMMIT"
        ))
        .await;
    world.now_called("public.root");
}

async fn a_table_becomes_a_partition(
    kind: Kind,
    is_lost: bool,
    more: Option<(&'static str, &str)>,
) {
    let mut world = World::new(kind, 20).await;
    world
        .more
        .extend(more.map(|(name, value)| (name, value.to_owned())));
    let (mut world, relay) = world.serve(40).await;
    relay.stop().await;
    world.insert("a", 20).await;
    captured_through_a_root(&mut world).await;
    world.insert("a", 20).await;
    if is_lost {
        world.database.drop_slot().await;
    }
    world.insert("a", 20).await;
    if more.is_none() {
        let told = world.run(
            &["recover", "--dry-run"],
            &[("GOOGLE_CLOUD_PROJECT", "demo")],
        );
        let told = String::from_utf8_lossy(&told.stdout);
        let reason = if is_lost {
            "slot-missing"
        } else {
            "other-table"
        };
        assert!(told.contains(reason) && told.contains("60 rows"), "{told}");
    }
    let relay = world.relay();
    world.insert("a", 20).await;
    match more {
        None => world.assert_published_once(relay).await,
        Some(_) => world.assert_published(relay).await,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_of_a_table_that_becomes_a_partition_of_the_new_captured_table_are_published() {
    for kind in [Kind::Numbered, Kind::Uuid] {
        a_table_becomes_a_partition(kind, false, None).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_of_a_table_that_becomes_a_partition_are_published_after_a_lost_slot() {
    for kind in [Kind::Numbered, Kind::Uuid] {
        a_table_becomes_a_partition(kind, true, None).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_of_a_table_that_becomes_a_partition_are_published_without_records() {
    for is_lost in [false, true] {
        a_table_becomes_a_partition(Kind::Numbered, is_lost, Some(EXCEPTIONS)).await;
    }
}

/// Commits new rows. All rows of a key are in the same partition. Otherwise they could be published out of order: when
/// only one partition stays captured, the relay publishes the rows of the other partitions first.
async fn insert_by_partition(world: &mut World, rows: u32) {
    let (first, last) = (world.next, world.next + rows - 1);
    world.next += rows;
    let insert = format!(
        "INSERT INTO public.parts (aggregatetype, aggregateid, event_type, payload, day) \
         SELECT 'order', 'a-' || i % 4, 'New', jsonb_build_object('n', i), \
             date '2020-01-01' + i % 4 * 366 FROM generate_series({first}, {last}) i"
    );
    world.execute(&insert).await;
}

/// Runs `change`, and captures only one partition from then on. Checks that the relay also publishes the
/// undelivered rows of the other partitions.
async fn only_a_partition_is_captured(change: &str, is_lost: bool) {
    let (mut world, relay) = World::served(Kind::Partitioned, 40).await;
    relay.stop().await;
    insert_by_partition(&mut world, 40).await;
    world.note().await;
    world.execute(change).await;
    world
        .execute("ALTER PUBLICATION postrider SET TABLE public.parts_0")
        .await;
    world.now_called("public.parts_0");
    if is_lost {
        world.database.drop_slot().await;
    }
    world
        .execute(
            "INSERT INTO TABLE_NAME (aggregatetype, aggregateid, event_type, payload, day) \
             SELECT 'order', 'a-0', 'New', jsonb_build_object('n', i), '2020-03-03' \
             FROM generate_series(1001, 1020) i",
        )
        .await;
    let relay = world.relay();
    world.assert_published_once(relay).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn undelivered_rows_are_published_even_if_only_one_partition_stays_captured() {
    for change in [
        "SELECT 1",
        "ALTER TABLE public.parts DETACH PARTITION public.parts_0",
    ] {
        for is_lost in [false, true] {
            only_a_partition_is_captured(change, is_lost).await;
        }
    }
}

/// `init --apply` runs with the new settings before the relay does. The relay must still know the earlier
/// table afterwards.
#[tokio::test(flavor = "multi_thread")]
async fn even_after_init_rows_of_the_earlier_table_come_before_rows_of_the_new_table() {
    let (mut world, relay) = World::served(Kind::Uuid, 40).await;
    relay.stop().await;
    world.insert("a", 20).await;
    captured_through_a_root(&mut world).await;
    let config = world.settings.path().display().to_string();
    let environment = [
        ("DATABASE_URL", world.database.url.as_str()),
        ("POSTRIDER_CONFIG", &config),
    ];
    let done = harness::postrider(&["init", "--apply"], &environment);
    let done = { done }.output().unwrap();
    assert!(done.status.success(), "{done:?}");
    world.insert("a", 20).await;
    let relay = world.relay();
    world.assert_published_once(relay).await;
}

/// Captures only one partition for a while. New rows arrive in all partitions in the meantime.
async fn insert_while_a_partition_is_captured(world: &mut World, is_lost: bool) {
    world.now_called("public.parts_0");
    world
        .execute("ALTER PUBLICATION postrider SET TABLE public.parts_0")
        .await;
    if is_lost {
        world.database.drop_slot().await;
    }
    let relay = world.relay();
    relay.wait_for_log("recovered").await;
    insert_by_partition(world, 40).await;
    if world
        .more
        .contains(&(EXCEPTIONS.0, EXCEPTIONS.1.to_owned()))
    {
        let floor = "SELECT count(*) FROM outbox.capture \
                     WHERE floor::text::bigint > (SELECT max(inserted_xid::text::bigint) FROM public.parts) AND detached = '{}'";
        eventually("the floor is above all rows", || async {
            (world.database.number(floor).await == 1).then_some(())
        })
        .await;
    }
    world.wait_until_compared(&relay).await;
    relay.stop().await;
}

/// For a while, the settings and the publication contain only one partition. Afterwards they contain the partitioned
/// table again.
async fn back_to_the_partitioned_table(dispatch: &'static str, is_lost: bool) {
    let mut world = World::new(Kind::Partitioned, 20).await;
    world.more.push(("POSTRIDER_DISPATCH", dispatch.to_owned()));
    let relay = world.streaming().await;
    insert_by_partition(&mut world, 40).await;
    world.note().await;
    world.wait_until_published(&relay).await;
    world.wait_until_compared(&relay).await;
    relay.stop().await;
    insert_by_partition(&mut world, 20).await;
    insert_while_a_partition_is_captured(&mut world, is_lost).await;
    if is_lost {
        world.database.drop_slot().await;
    }
    world.now_called("public.parts");
    world
        .execute("ALTER PUBLICATION postrider SET TABLE public.parts")
        .await;
    insert_by_partition(&mut world, 20).await;
    world.note().await;
    let relay = world.relay();
    insert_by_partition(&mut world, 20).await;
    if dispatch == "full" {
        world.assert_published_once(relay).await;
    } else {
        world.assert_published(relay).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn capturing_only_one_partition_for_a_while_loses_no_row_of_the_others() {
    for (dispatch, is_lost) in [("exceptions", false), ("exceptions", true), ("full", false)] {
        back_to_the_partitioned_table(dispatch, is_lost).await;
    }
}

/// For a while, the settings contain only one partition. Afterwards they contain only another partition.
#[tokio::test(flavor = "multi_thread")]
async fn capturing_one_partition_and_then_another_loses_no_row_of_the_latter() {
    let mut world = World::new(Kind::Partitioned, 20).await;
    world
        .more
        .push(("POSTRIDER_DISPATCH", "exceptions".to_owned()));
    let relay = world.streaming().await;
    insert_by_partition(&mut world, 40).await;
    world.note().await;
    world.wait_until_published(&relay).await;
    world.wait_until_compared(&relay).await;
    relay.stop().await;
    insert_while_a_partition_is_captured(&mut world, false).await;
    // The capture record must forget a dropped partition, because PostgreSQL may give its OID to another
    // table.
    let remembered = "SELECT count(*) FROM outbox.capture, jsonb_object_keys(uncaptured) o \
                      WHERE NOT EXISTS (SELECT FROM pg_class WHERE oid = o::oid)";
    world.execute("DROP TABLE public.parts_3").await;
    assert_eq!(world.database.number(remembered).await, 1);
    world.now_called("public.parts_1");
    world
        .execute("ALTER PUBLICATION postrider SET TABLE public.parts_1")
        .await;
    world.note().await;
    let relay = world.relay();
    world.wait_until_published(&relay).await;
    eventually("the record forgets the dropped partition", || async {
        (world.database.number(remembered).await == 0).then_some(())
    })
    .await;
    relay.stop().await;
}

/// A relay whose settings name another table streams from the slot for a moment, and ignores a row of the
/// first table. It stops before it has audited its own table. The ignored row has a low `seq`, so only a
/// comparison of the whole first table finds it.
#[tokio::test(flavor = "multi_thread")]
async fn rows_skipped_by_a_relay_with_another_table_are_found_even_if_it_stops_early() {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    let host = emulator.addr().to_string();
    let other = "CREATE TABLE public.other (LIKE outbox.events INCLUDING ALL); \
                 ALTER PUBLICATION postrider ADD TABLE public.other";
    database.execute(other).await;
    let relay = Relay::start(&database, &emulator);
    insert_orders(&database, 20, 5).await;
    database.wait_until_recorded().await;
    eventually("later audits skip the first rows", || async {
        let skips = "SELECT count(*) FROM outbox.capture WHERE floor_seq >= 10";
        (database.number(skips).await == 1).then_some(())
    })
    .await;
    relay.stop().await;
    // The first audit of the other relay does not end while this transaction is open.
    let open = harness::connect(&database.url).await;
    let begin = "BEGIN; SELECT pg_current_xact_id()";
    open.batch_execute(begin).await.unwrap();
    let other = Relay::start_with(&database, &host, &[("POSTRIDER_TABLE", "public.other")]);
    other.wait_for_log("streaming").await;
    database
        .execute(
            "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, payload, seq) \
             VALUES ('order', 'of-the-gap', 'E', '{}', 5)",
        )
        .await;
    database.wait_until_confirmed().await;
    other.stop().await;
    open.batch_execute("ROLLBACK").await.unwrap();
    let relay = Relay::start(&database, &emulator);
    database.wait_until_recorded().await;
    let report = harness::check(&database, &emulator).await;
    assert!(report.is_clean(), "{report}\n{}", relay.log());
    relay.stop().await;
}
