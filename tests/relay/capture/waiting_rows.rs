//! Tests in which rows are moved to another partition while the event of their original insert has no
//! outcome yet. The moved rows wait for this outcome.

use std::time::Duration;

use pubsub_emulator::checks::Stream;
use pubsub_emulator::{Action, Fault};

use super::World;
use super::table::Kind;
use crate::harness::{Relay, eventually};

/// Inserts 10,001 rows in one transaction. The topic of one row is missing, so its event waits for the topic. The
/// other 10,000 rows are published, and are then moved to another partition. The relay handles a moved row only after
/// all events of the transaction that first inserted the row have an outcome. So the 10,000 moved rows must wait.
///
/// The messages of the moved rows are together twice as large as the memory budget. Checks that the relay's memory
/// grows only a little.
async fn rows_that_wait_for_their_original(world: &World, relay: &Relay) {
    const ROWS: u32 = 10_000;
    world
        .execute(&format!(
            "BEGIN; \
             INSERT INTO public.parts (aggregatetype, aggregateid, event_type, payload, day) \
                 VALUES ('missing', 'm', 'New', '{{}}', '2020-02-02'); \
             INSERT INTO public.parts (aggregatetype, aggregateid, event_type, payload, day) \
                 SELECT 'order', 'big-' || i % 100, 'New', \
                     jsonb_build_object('n', i, 'x', repeat(md5(i::text), 150)), '2020-02-02' \
                 FROM generate_series(1, {ROWS}) i; \
             COMMIT"
        ))
        .await;
    let recorded = "SELECT count(*) FROM outbox.dispatch d JOIN public.parts e ON e.id = d.event_id \
                    WHERE aggregateid LIKE 'big-%'";
    eventually("all rows but one are published", || async {
        (world.database.number(recorded).await == i64::from(ROWS)).then_some(())
    })
    .await;
    let before = relay.peak_rss_kib();
    world
        .execute("UPDATE public.parts SET day = '2021-02-02' WHERE aggregateid LIKE 'big-%'")
        .await;
    // Another key is still published, although its row comes after the moved rows.
    let other = "INSERT INTO public.parts (aggregatetype, aggregateid, event_type, payload, day) \
                 VALUES ('order', 'other', 'New', '{\"n\": 100000}', '2020-02-02') RETURNING id::text";
    let other = world.database.text(other).await;
    eventually("another key is published", || async {
        super::stored(&world.emulator)
            .contains_key(&other)
            .then_some(())
    })
    .await;
    let grown = relay.peak_rss_kib() - before;
    assert!(grown < 24 << 10, "grew by {grown} KiB");
}

/// Creates the topic for which an event waits, and checks that each event is stored once.
async fn assert_stored_once(world: &World, relay: Relay) {
    let topic = "projects/demo/topics/missing.events";
    world.emulator.create_topic(topic).await.unwrap();
    world.database.wait_until_confirmed().await;
    let copies = super::stored(&world.emulator);
    assert!(copies.values().all(|copies| *copies == 1));
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn moved_rows_that_wait_use_little_memory_and_are_published_once() {
    let (world, relay) = World::served(Kind::Partitioned, 20).await;
    rows_that_wait_for_their_original(&world, &relay).await;
    assert_stored_once(&world, relay).await;
}

/// The test inserts rows with the `inserted_xid` of an older transaction, like rows that are copied from a staging
/// table. The relay takes them for moved rows, so they wait until the events of the older transaction have an outcome.
/// One of these events waits for its topic. To save memory, the relay drops the messages of most waiting rows.
///
/// Once the topic exists, the relay must find out that the rows were never published, and publish them in order.
#[tokio::test(flavor = "multi_thread")]
async fn new_rows_taken_for_moved_rows_are_published_in_order_after_their_wait() {
    let mut world = World::new(Kind::Partitioned, 20).await;
    world.more.push(("POSTRIDER_IN_FLIGHT_MIB", "1".to_owned()));
    let (mut world, relay) = world.serve(20).await;
    let original = "INSERT INTO public.parts (aggregatetype, aggregateid, event_type, payload, day) \
                    VALUES ('missing', 'm', 'Other', '{}', '2020-02-02') \
                    RETURNING inserted_xid::text, id::text";
    let original = world
        .database
        .client
        .query_one(original, &[])
        .await
        .unwrap();
    let (first, original): (String, String) = (original.get(0), original.get(1));
    let (from, to) = (world.next, world.next + 59);
    world.next += 60;
    world
        .execute(&format!(
            "INSERT INTO public.parts \
                 (aggregatetype, aggregateid, event_type, payload, day, inserted_xid) \
             SELECT 'order', 'staged-' || i % 5, 'New', \
                 jsonb_build_object('n', i, 'x', repeat(md5(i::text), 200)), '2020-02-02', '{first}' \
             FROM generate_series({from}, {to}) i"
        ))
        .await;
    world.insert("a", 20).await;
    let last = "SELECT id::text FROM public.parts ORDER BY (payload->>'n')::bigint DESC NULLS LAST LIMIT 1";
    let last = world.database.text(last).await;
    eventually("other keys are published", || async {
        super::stored(&world.emulator)
            .contains_key(&last)
            .then_some(())
    })
    .await;
    let topic = "projects/demo/topics/missing.events";
    world.emulator.create_topic(topic).await.unwrap();
    let stream = Stream::new(topic, "m");
    world.expected.insert(stream, vec![original]);
    world.note().await;
    world.wait_until_published(&relay).await;
    let updated = "SELECT n_tup_upd FROM pg_stat_user_tables WHERE relname = 'dispatch'";
    eventually("some rows were recorded as released first", || async {
        (world.database.number(updated).await > 0).then_some(())
    })
    .await;
    world.database.wait_until_confirmed().await;
    let report = world.report();
    assert!(
        report.is_clean() && report.duplicates.is_empty(),
        "{report}"
    );
    relay.stop().await;
}

const MOVE: &str =
    "UPDATE public.parts SET day = day + 366 WHERE aggregateid = 'before-1' AND day < '2022-01-01'";

/// A recovery waits for a topic. In the meantime, a row that was published long before is moved. The moved
/// row must hold up no other key.
#[tokio::test(flavor = "multi_thread")]
async fn a_moved_row_with_a_record_stops_no_other_key_while_a_recovery_waits() {
    let (mut world, relay) = World::served(Kind::Partitioned, 40).await;
    relay.stop().await;
    world
        .execute(
            "INSERT INTO public.parts (aggregatetype, aggregateid, event_type, payload, day) \
             VALUES ('missing', 'm', 'Other', '{}', '2020-02-02')",
        )
        .await;
    world.database.drop_slot().await;
    let relay = world.relay();
    relay.wait_for_log("topic-missing").await;
    world.execute(MOVE).await;
    world.insert("a", 20).await;
    world.note().await;
    world.wait_until_published(&relay).await;
    assert_stored_once(&world, relay).await;
}

/// A row without a record is moved. While the request for it is in flight, the row is moved several more times, two of
/// them in one transaction.
#[tokio::test(flavor = "multi_thread")]
async fn a_row_without_a_record_that_moves_several_times_is_published_again_only_once() {
    const ROW: &str = "aggregateid = 'before-1' AND payload->>'n' = '1'";
    let (mut world, relay) = World::served(Kind::Partitioned, 20).await;
    let row = format!("SELECT id::text FROM public.parts WHERE {ROW}");
    let row = world.database.text(&row).await;
    world
        .execute(&format!(
            "DELETE FROM outbox.dispatch WHERE event_id = '{row}'"
        ))
        .await;
    let slow = Action::Delay(Duration::from_secs(2));
    world.emulator.faults().inject(Fault::new(slow));
    let to = |day: &str| format!("UPDATE public.parts SET day = '{day}' WHERE {ROW};");
    world.execute(&to("2022-02-02")).await;
    let twice = format!("BEGIN; {} {} COMMIT", to("2020-02-02"), to("2021-02-02"));
    world.execute(&twice).await;
    world.execute(&to("2023-02-02")).await;
    world.emulator.faults().lift_all();
    world.insert("a", 20).await;
    world.note().await;
    world.wait_until_published(&relay).await;
    world.database.wait_until_confirmed().await;
    let copies = super::stored(&world.emulator);
    assert_eq!(copies[&row], 2, "{}", relay.log());
    assert!(copies.iter().all(|(id, copies)| *id == row || *copies == 1));
    relay.stop().await;
}
