//! Tests in which a captured table is recreated, swapped with a copy of itself, or restored. The relay
//! loses no event, and repeats no event that has a record.

use super::World;
use super::table::Kind;
use crate::harness::Relay;

const PUBLISH: &str = "ALTER PUBLICATION postrider ADD TABLE TABLE_NAME";

/// Recreates the table, with the column `inserted_xid` that `init` had added.
pub(super) const RECREATE: &str = "\
    DROP TABLE public.numbered; \
    CREATE TABLE public.numbered (id bigserial PRIMARY KEY, aggregatetype text, aggregateid text, \
        event_type text, payload jsonb, \
        inserted_xid xid8 NOT NULL DEFAULT pg_current_xact_id())";

/// The state of the relay and the slot while the table is replaced.
#[derive(Clone, Copy, PartialEq)]
enum Meanwhile {
    RelayRuns,
    RelayIsDown,
    SlotIsLost,
}

async fn recreated(meanwhile: Meanwhile) {
    let (mut world, relay) = World::served(Kind::Numbered, 50).await;
    let relay = match meanwhile {
        Meanwhile::RelayRuns => Some(relay),
        Meanwhile::RelayIsDown | Meanwhile::SlotIsLost => {
            relay.stop().await;
            None
        }
    };
    world.execute(RECREATE).await;
    // Insert rows before the publication contains the new table.
    world.insert("a", 30).await;
    world.execute(PUBLISH).await;
    world.insert("b", 30).await;
    if meanwhile == Meanwhile::SlotIsLost {
        world.database.drop_slot().await;
    }
    let relay = relay.unwrap_or_else(|| world.relay());
    world.assert_published_once(relay).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_recreated_under_a_running_relay_loses_nothing() {
    recreated(Meanwhile::RelayRuns).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_recreated_while_the_relay_is_down_loses_nothing() {
    recreated(Meanwhile::RelayIsDown).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_recreated_table_whose_slot_is_also_lost_loses_nothing() {
    recreated(Meanwhile::SlotIsLost).await;
}

/// Waits until the relay has published and audited all rows, then stops it.
async fn settle(world: &mut World, relay: Relay) {
    world.note().await;
    world.wait_until_published(&relay).await;
    world.wait_until_compared(&relay).await;
    relay.stop().await;
}

/// The SQL `begin_again` makes the ids of new rows start at 1 again, below the highest id that the relay
/// has recorded. Checks that a recovery still finds all rows, in two cases: no relay has run since the ids
/// began again, or a relay has already audited rows with the new ids.
async fn numbers_that_begin_again_hide_no_row_from_a_recovery(begin_again: &str, publish: &str) {
    for is_seen in [false, true] {
        numbers_begin_again(begin_again, publish, is_seen).await;
    }
}

async fn numbers_begin_again(begin_again: &str, publish: &str, is_seen: bool) {
    let (mut world, relay) = World::served(Kind::Numbered, 200).await;
    relay.stop().await;
    // Start a second session, because its audit records the highest id.
    let relay = world.streaming().await;
    settle(&mut world, relay).await;
    world.execute(begin_again).await;
    world.execute(publish).await;
    world.insert("a", 30).await;
    if is_seen {
        let relay = world.relay();
        settle(&mut world, relay).await;
    }
    world.insert("b", 30).await;
    world.database.drop_slot().await;
    world.insert("c", 30).await;
    let relay = world.relay();
    world.assert_published_once(relay).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_recovery_finds_the_rows_of_a_table_recreated_before() {
    numbers_that_begin_again_hide_no_row_from_a_recovery(RECREATE, PUBLISH).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_recovery_finds_the_rows_of_a_table_truncated_before() {
    let truncate = "TRUNCATE TABLE_NAME RESTART IDENTITY";
    numbers_that_begin_again_hide_no_row_from_a_recovery(truncate, "").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_recovery_finds_the_rows_after_their_sequence_was_set_back() {
    let set = "DELETE FROM TABLE_NAME; SELECT setval('public.numbered_id_seq', 1, false)";
    numbers_that_begin_again_hide_no_row_from_a_recovery(set, "").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_recovery_finds_the_rows_after_their_sequence_was_restarted() {
    let restart = "DELETE FROM TABLE_NAME; ALTER SEQUENCE public.numbered_id_seq RESTART";
    numbers_that_begin_again_hide_no_row_from_a_recovery(restart, "").await;
}

/// Services may choose an id themselves, or take an id from the sequence long before they insert the
/// row, as object mappers do. The order of such rows is not guaranteed.
#[tokio::test(flavor = "multi_thread")]
async fn a_recovery_finds_a_row_whose_writer_chose_its_number() {
    let (mut world, relay) = World::served(Kind::Numbered, 200).await;
    relay.stop().await;
    let relay = world.streaming().await;
    settle(&mut world, relay).await;
    world
        .execute(
            "INSERT INTO TABLE_NAME (id, aggregatetype, aggregateid, event_type, payload) \
             VALUES (-5, 'order', 'chosen', 'New', '{\"n\": 5000}')",
        )
        .await;
    world.database.drop_slot().await;
    let relay = world.relay();
    world.assert_published_once(relay).await;
}

const SWAP: &str = "\
    BEGIN; LOCK TABLE TABLE_NAME; \
    CREATE TABLE SCHEMA.copied (LIKE TABLE_NAME INCLUDING ALL); \
    INSERT INTO SCHEMA.copied SELECT * FROM TABLE_NAME; \
    ALTER TABLE TABLE_NAME RENAME TO old_one; ALTER TABLE SCHEMA.copied RENAME TO NAME; \
    ALTER PUBLICATION postrider SET TABLE TABLE_NAME; COMMIT";

/// Copies the table, and swaps the table with the copy, as tools for online schema changes do.
async fn copied_and_swapped(kind: Kind, meanwhile: Meanwhile) {
    let (mut world, relay) = World::served(kind, 50).await;
    let relay = match meanwhile {
        Meanwhile::RelayRuns => Some(relay),
        Meanwhile::RelayIsDown | Meanwhile::SlotIsLost => {
            relay.stop().await;
            None
        }
    };
    world.insert("a", 30).await;
    let (schema, name) = world.table.split_once('.').unwrap();
    let swap = SWAP
        .replace("SCHEMA", schema)
        .replace("TO NAME", &format!("TO {name}"));
    world.note().await;
    world.execute(&swap).await;
    world.insert("b", 30).await;
    if meanwhile == Meanwhile::SlotIsLost {
        world.database.drop_slot().await;
    }
    let relay = relay.unwrap_or_else(|| world.relay());
    world.insert("c", 30).await;
    world.assert_published_once(relay).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn copying_and_swapping_a_table_under_a_running_relay_repeats_and_loses_nothing() {
    copied_and_swapped(Kind::Numbered, Meanwhile::RelayRuns).await;
    copied_and_swapped(Kind::Uuid, Meanwhile::RelayRuns).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn copying_and_swapping_a_table_while_the_relay_is_down_repeats_and_loses_nothing() {
    copied_and_swapped(Kind::Numbered, Meanwhile::RelayIsDown).await;
    copied_and_swapped(Kind::Events, Meanwhile::RelayIsDown).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn copying_and_swapping_a_table_whose_slot_is_lost_repeats_and_loses_nothing() {
    copied_and_swapped(Kind::Numbered, Meanwhile::SlotIsLost).await;
    copied_and_swapped(Kind::Events, Meanwhile::SlotIsLost).await;
}

/// Copies the rows to a file, removes them, and copies them back. The rows then appear in the stream a
/// second time. If the slot is lost (`loses_slot`), they are only in the table.
async fn restored(kind: Kind, loses_slot: bool) {
    let (mut world, relay) = World::served(kind, 50).await;
    relay.stop().await;
    // No relay runs, so these rows are unpublished when they are removed.
    world.insert("a", 30).await;
    world.note().await;
    let remove = match kind {
        Kind::Events => {
            "ALTER TABLE TABLE_NAME DISABLE TRIGGER insert_only; TRUNCATE TABLE_NAME; \
             ALTER TABLE TABLE_NAME ENABLE TRIGGER insert_only;"
        }
        Kind::Numbered | Kind::Timed | Kind::Uuid | Kind::Partitioned | Kind::Identity => {
            "TRUNCATE TABLE_NAME;"
        }
    };
    let folder = world.database.server().data_dir().display().to_string();
    let file = format!("{folder}/rows.copy");
    // Use a query, because `COPY` cannot read a partitioned table directly.
    let out = format!("COPY (SELECT * FROM TABLE_NAME) TO '{file}'; {remove}");
    world.execute(&out).await;
    if loses_slot {
        world.database.drop_slot().await;
    }
    let back = format!("COPY TABLE_NAME FROM '{file}'");
    world.execute(&back).await;
    world.insert("b", 30).await;
    let relay = world.relay();
    world.insert("c", 30).await;
    world.assert_published_once(relay).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_that_are_copied_out_and_back_are_published_once() {
    restored(Kind::Events, false).await;
    restored(Kind::Numbered, false).await;
    restored(Kind::Partitioned, false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_that_are_copied_out_and_back_after_a_lost_slot_are_published_once() {
    restored(Kind::Events, true).await;
    restored(Kind::Numbered, true).await;
    restored(Kind::Uuid, true).await;
}
