//! Tests of captured tables with `dispatch = exceptions`, where published events get no record. The relay
//! may repeat rows, but it loses no row and publishes no old row.

use pubsub_emulator::{Action, Fault};
use tonic::Code;

use super::table::Kind;
use super::{ATTACH, World};
use crate::harness::{self, Relay, eventually};

impl World {
    async fn without_records(kind: Kind, old_rows: u32) -> Self {
        let mut world = Self::new(kind, old_rows).await;
        world
            .more
            .push(("POSTRIDER_DISPATCH", "exceptions".to_owned()));
        world
    }
}

/// Starts a relay with `dispatch = exceptions`, and waits until it has delivered 50 rows and has
/// compared the table.
async fn served(kind: Kind) -> (World, Relay) {
    World::without_records(kind, 500).await.serve(50).await
}

#[tokio::test(flavor = "multi_thread")]
async fn no_old_row_is_published_without_records_when_the_slot_is_lost() {
    for kind in [Kind::Events, Kind::Numbered, Kind::Uuid, Kind::Partitioned] {
        let mut world = World::without_records(kind, 2_000).await;
        world.insert("a", 30).await;
        world.database.drop_slot().await;
        world.insert("b", 30).await;
        let relay = world.relay();
        world.insert("c", 30).await;
        world.note().await;
        world.wait_until_published(&relay).await;
        relay.kill_9();
        world.database.drop_slot().await;
        world.insert("d", 30).await;
        let relay = world.relay();
        world.assert_published(relay).await;
    }
}

/// PostgreSQL does not stream the rows of an unlogged partition. Once the partition is logged again, the
/// catalogue no longer shows that it was unlogged. So the relay must remember each unlogged partition that
/// it has seen, even if the relay is killed in the meantime.
#[tokio::test(flavor = "multi_thread")]
async fn rows_of_a_partition_that_was_unlogged_for_a_while_are_published() {
    const LOGGED: &str = "ALTER TABLE public.parts_1 SET LOGGED";
    for is_killed in [false, true] {
        let (mut world, relay) = served(Kind::Partitioned).await;
        world
            .execute("ALTER TABLE public.parts_1 SET UNLOGGED")
            .await;
        relay
            .wait_for_log("parts_1 of public.parts is an unlogged table")
            .await;
        world.insert_into_first_partition("gap", 30).await;
        let relay = if is_killed {
            relay.kill_9();
            world.execute(LOGGED).await;
            world.relay()
        } else {
            world.execute(LOGGED).await;
            relay
        };
        world.insert("after", 30).await;
        world.assert_published(relay).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lagging_foreign_slot_repeats_no_old_row_without_records() {
    let mut world = World::new(Kind::Numbered, 0).await.without_slot().await;
    world
        .more
        .push(("POSTRIDER_DISPATCH", "exceptions".to_owned()));
    let slot = "SELECT pg_create_logical_replication_slot('lagging', 'pgoutput')";
    world.execute(slot).await;
    world
        .execute(&Kind::Numbered.insert_old("TABLE_NAME", 1_000))
        .await;
    world.streaming().await.stop().await;
    world.insert("a", 30).await;
    world.database.drop_slot().await;
    let relay = world.relay();
    world.assert_published(relay).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_of_a_gap_are_published_without_records_even_after_a_crash() {
    for is_killed in [false, true] {
        let (mut world, relay) = served(Kind::Numbered).await;
        let another = "CREATE TABLE public.another (id int); \
                       ALTER PUBLICATION postrider ADD TABLE public.another";
        world.execute(another).await;
        world
            .execute("ALTER PUBLICATION postrider DROP TABLE TABLE_NAME")
            .await;
        relay.wait_for_log("publication-drift").await;
        world.insert("gap", 40).await;
        let relay = if is_killed {
            relay.kill_9();
            harness::wait_until_killed_relays_are_gone(&world.database, &world.emulator).await;
            None
        } else {
            Some(relay)
        };
        world
            .execute("ALTER PUBLICATION postrider ADD TABLE TABLE_NAME")
            .await;
        let relay = relay.unwrap_or_else(|| world.relay());
        world.insert("a", 20).await;
        world.assert_published(relay).await;
    }
}

const RECREATE: &str = "\
    DROP TABLE public.numbered; \
    CREATE TABLE public.numbered (id bigserial PRIMARY KEY, aggregatetype text, aggregateid text, \
        event_type text, payload jsonb, \
        inserted_xid xid8 NOT NULL DEFAULT pg_current_xact_id())";

#[tokio::test(flavor = "multi_thread")]
async fn a_recreated_table_loses_nothing_without_records() {
    for is_running in [false, true] {
        let (mut world, relay) = served(Kind::Numbered).await;
        let relay = if is_running {
            Some(relay)
        } else {
            relay.stop().await;
            None
        };
        world.execute(RECREATE).await;
        world.insert("a", 30).await;
        world
            .execute("ALTER PUBLICATION postrider ADD TABLE TABLE_NAME")
            .await;
        world.insert("b", 30).await;
        let relay = relay.unwrap_or_else(|| world.relay());
        world.assert_published(relay).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn renaming_a_table_loses_nothing_without_records() {
    for loses_slot in [false, true] {
        let (mut world, relay) = served(Kind::Numbered).await;
        relay.stop().await;
        world.insert("a", 30).await;
        world
            .execute("ALTER TABLE TABLE_NAME RENAME TO newly_called")
            .await;
        world.now_called("public.newly_called");
        world.insert("b", 30).await;
        if loses_slot {
            world.database.drop_slot().await;
        }
        let relay = world.relay();
        world.assert_published(relay).await;
    }
}

/// The partition is filled first. It is attached only after the floor has risen above its rows.
#[tokio::test(flavor = "multi_thread")]
async fn rows_of_a_partition_filled_long_before_are_published_without_records() {
    let (mut world, relay) = served(Kind::Partitioned).await;
    world.fill_partition(30).await;
    relay.stop().await;
    world.insert("a", 30).await;
    let relay = world.relay();
    world.note().await;
    world.wait_until_published(&relay).await;
    world.wait_until_compared(&relay).await;
    world.execute(ATTACH).await;
    world.assert_published(relay).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn copying_rows_out_and_back_loses_nothing_without_records() {
    let (mut world, relay) = served(Kind::Numbered).await;
    relay.stop().await;
    world.insert("a", 30).await;
    world.note().await;
    let folder = world.database.server().data_dir().display().to_string();
    let file = format!("{folder}/rows.copy");
    let out = format!("COPY TABLE_NAME TO '{file}'; TRUNCATE TABLE_NAME");
    world.execute(&out).await;
    world.database.drop_slot().await;
    world
        .execute(&format!("COPY TABLE_NAME FROM '{file}'"))
        .await;
    world.insert("b", 30).await;
    let relay = world.relay();
    world.assert_published(relay).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_can_be_altered_while_a_recovery_without_records_waits() {
    let (mut world, relay) = served(Kind::Events).await;
    relay.stop().await;
    world.insert_at_once("a", 20_000).await;
    world.database.drop_slot().await;
    let faults = world.emulator.faults();
    let stalled = faults.inject(Fault::new(Action::Fail(Code::Unavailable)));
    let relay = world.relay();
    relay.wait_for_log("recovering").await;
    eventually("the recovery waits for Pub/Sub", || async {
        (world.emulator.journal().counts().attempts > 5).then_some(())
    })
    .await;
    let alter = "SET lock_timeout = '3s'; ALTER TABLE TABLE_NAME ADD COLUMN extra text";
    world.execute(alter).await;
    faults.lift(stalled);
    world.insert("b", 30).await;
    world.assert_published(relay).await;
}

/// The partition is filled just before it is attached, so its rows are above the floor.
#[tokio::test(flavor = "multi_thread")]
async fn rows_of_a_partition_filled_just_before_it_is_attached_are_published_without_records() {
    let (mut world, relay) = served(Kind::Partitioned).await;
    world.attach_filled_partition(7).await;
    world.insert("a", 5).await;
    world.assert_published(relay).await;
}

/// Waits until the capture record lists `partition` among the compared partitions.
async fn wait_until_noted(world: &World, partition: &str) {
    let noted = format!(
        "SELECT count(*) FROM outbox.capture \
         WHERE '{partition}'::regclass::oid::text = ANY (string_to_array(partitions, ','))"
    );
    eventually("the capture record lists the partition", || async {
        (world.database.number(&noted).await == 1).then_some(())
    })
    .await;
}

/// Unlike an attached table, a partition that `CREATE TABLE ... PARTITION OF` creates is empty at first. So the stream
/// contains all its rows, and the relay publishes none of them again from the table.
#[tokio::test(flavor = "multi_thread")]
async fn a_partition_that_is_created_empty_repeats_nothing_without_records() {
    let (mut world, relay) = served(Kind::Partitioned).await;
    let create = "CREATE TABLE public.more PARTITION OF public.parts \
                      FOR VALUES FROM ('2030-01-01') TO ('2031-01-01')";
    world.execute(create).await;
    let insert = "INSERT INTO public.parts (aggregatetype, aggregateid, event_type, payload, day) \
                  SELECT 'order', 'new-' || i % 5, 'New', jsonb_build_object('n', i), '2030-05-05' \
                  FROM generate_series(1001, 1007) i";
    world.execute(insert).await;
    world.insert("a", 5).await;
    world.note().await;
    world.wait_until_published(&relay).await;
    world.wait_until_compared(&relay).await;
    wait_until_noted(&world, "public.more").await;
    assert!(!relay.log().contains("publication-gap"), "{}", relay.log());
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gap_before_the_first_session_is_noticed_without_records() {
    let mut world = World::without_records(Kind::Numbered, 20).await;
    let another = "CREATE TABLE public.another (id int); \
                   ALTER PUBLICATION postrider ADD TABLE public.another";
    world.execute(another).await;
    let out = "ALTER PUBLICATION postrider DROP TABLE TABLE_NAME";
    world.execute(out).await;
    world.insert("gap", 10).await;
    let back = "ALTER PUBLICATION postrider ADD TABLE TABLE_NAME";
    world.execute(back).await;
    let relay = world.relay();
    world.insert("a", 10).await;
    world.assert_published(relay).await;
}

/// After a switch back to `dispatch = full`, the relay repeats no event that it published without a
/// record, although it compares the whole table twice: after a change of the publication, and after
/// a crash.
#[tokio::test(flavor = "multi_thread")]
async fn after_a_switch_back_to_full_records_no_event_without_a_record_is_repeated() {
    for kind in [Kind::Numbered, Kind::Partitioned] {
        let (mut world, relay) = served(kind).await;
        relay.stop().await;
        world.more.clear();
        let relay = world.streaming().await;
        world.insert("a", 20).await;
        let is_full = "SELECT count(*) FROM outbox.relay WHERE dispatch = 'full'";
        eventually("full records are back", || async {
            (world.database.number(is_full).await == 1).then_some(())
        })
        .await;
        world
            .execute("ALTER PUBLICATION postrider SET (publish = 'insert, update')")
            .await;
        relay.wait_for_log("comparing the tables").await;
        world.insert("b", 20).await;
        world.note().await;
        world.wait_until_published(&relay).await;
        relay.kill_9();
        harness::wait_until_killed_relays_are_gone(&world.database, &world.emulator).await;
        let relay = world.relay();
        world.insert("c", 20).await;
        world.note().await;
        world.wait_until_published(&relay).await;
        world.wait_until_compared(&relay).await;
        let report = world.report();
        let repeated = report.duplicates.iter();
        let repeated = repeated.filter(|copy| copy.stream.ordering_key.starts_with("before-"));
        assert_eq!(repeated.count(), 0, "{report}\n{}", relay.log());
        assert!(report.is_clean(), "{report}");
        relay.stop().await;
    }
}

/// The application creates a partition and inserts the first rows of the partition in one
/// transaction. The stream contains these rows, so the relay must not publish them from the table
/// again.
#[tokio::test(flavor = "multi_thread")]
async fn a_partition_created_together_with_its_rows_repeats_nothing_without_records() {
    let (mut world, relay) = served(Kind::Partitioned).await;
    let create = "BEGIN; \
                  CREATE TABLE public.more PARTITION OF public.parts \
                      FOR VALUES FROM ('2030-01-01') TO ('2031-01-01'); \
                  INSERT INTO public.parts (aggregatetype, aggregateid, event_type, payload, day) \
                  SELECT 'order', 'new-' || i % 5, 'New', jsonb_build_object('n', i), '2030-05-05' \
                  FROM generate_series(1001, 1007) i; \
                  COMMIT";
    world.execute(create).await;
    world.insert("a", 5).await;
    world.note().await;
    world.wait_until_published(&relay).await;
    wait_until_noted(&world, "public.more").await;
    assert!(!relay.log().contains("publication-gap"), "{}", relay.log());
    relay.stop().await;
}

/// One transaction fills the table and then attaches it as a partition.
#[tokio::test(flavor = "multi_thread")]
async fn a_partition_filled_and_attached_by_one_transaction_is_published_without_records() {
    let (mut world, relay) = served(Kind::Partitioned).await;
    world.execute("BEGIN").await;
    world.attach_filled_partition(7).await;
    world.execute("COMMIT").await;
    world.insert("a", 5).await;
    world.assert_published(relay).await;
}

/// The moved rows have no records, because the relay published them with `dispatch = exceptions`. Even so,
/// the relay must not publish them again.
#[tokio::test(flavor = "multi_thread")]
async fn after_a_switch_back_to_full_records_rows_moved_to_another_partition_are_not_repeated() {
    let (mut world, relay) = served(Kind::Partitioned).await;
    relay.stop().await;
    world.more.clear();
    let relay = world.streaming().await;
    world.insert("a", 5).await;
    let is_full = "SELECT count(*) FROM outbox.relay WHERE dispatch = 'full'";
    eventually("full records are back", || async {
        (world.database.number(is_full).await == 1).then_some(())
    })
    .await;
    relay.stop().await;
    let relay = world.streaming().await;
    let before = world.emulator.journal().counts().stored_messages;
    let moved = "UPDATE public.parts SET day = day + 366 \
                 WHERE day < '2022-06-01' AND aggregateid LIKE 'before-%'";
    world.execute(moved).await;
    world.insert("b", 5).await;
    world.note().await;
    world.wait_until_published(&relay).await;
    world.wait_until_compared(&relay).await;
    relay.stop().await;
    let after = world.emulator.journal().counts().stored_messages;
    assert_eq!(after, before + 5);
}
