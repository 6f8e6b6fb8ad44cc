//! Tests in which a captured table is renamed, or is missing from the settings for a while. The relay
//! still publishes its rows, and their events keep their event ids.

use super::table::Kind;
use super::{World, write_settings};

/// Renames the table to `name` with the statement `rename`, while the relay is down or runs
/// (`is_running`). With `loses_slot`, also drops the slot. Checks that every row is published.
async fn renamed(kind: Kind, rename: &str, name: &str, is_running: bool, loses_slot: bool) {
    let (mut world, relay) = World::served(kind, 50).await;
    let relay = if is_running {
        Some(relay)
    } else {
        relay.stop().await;
        None
    };
    world.insert("a", 30).await;
    world.note().await;
    world.execute(rename).await;
    world.now_called(name);
    world.insert("b", 30).await;
    if let Some(relay) = relay {
        // Kill the relay, whether or not it has noticed that its table is gone.
        drop(relay);
    }
    world.insert("c", 30).await;
    if loses_slot {
        world.database.drop_slot().await;
    }
    let relay = world.relay();
    world.insert("d", 30).await;
    world.assert_published(relay).await;
}

const RENAME: &str = "ALTER TABLE TABLE_NAME RENAME TO newly_called";
const MOVE: &str = "CREATE SCHEMA elsewhere; ALTER TABLE TABLE_NAME SET SCHEMA elsewhere";

#[tokio::test(flavor = "multi_thread")]
async fn renaming_a_table_while_the_relay_is_down_loses_nothing() {
    for kind in [Kind::Numbered, Kind::Partitioned] {
        renamed(kind, RENAME, "public.newly_called", false, false).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn renaming_a_table_under_a_running_relay_loses_nothing() {
    renamed(Kind::Numbered, RENAME, "public.newly_called", true, false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_renamed_table_whose_slot_is_also_lost_loses_nothing() {
    renamed(Kind::Numbered, RENAME, "public.newly_called", false, true).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_that_moves_to_another_schema_loses_nothing() {
    renamed(Kind::Numbered, MOVE, "elsewhere.numbered", false, false).await;
    renamed(Kind::Uuid, MOVE, "elsewhere.plain", true, false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_that_moves_to_another_schema_repeats_nothing_after_a_lost_slot() {
    let (mut world, relay) = World::served(Kind::Numbered, 50).await;
    relay.stop().await;
    world.execute(MOVE).await;
    world.now_called("elsewhere.numbered");
    world.insert("a", 30).await;
    world.database.drop_slot().await;
    world.insert("b", 30).await;
    let relay = world.relay();
    relay.wait_for_log("recovered").await;
    world.assert_published_once(relay).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_renamed_table_keeps_the_identity_of_its_events() {
    let (mut world, relay) = World::served(Kind::Numbered, 50).await;
    relay.stop().await;
    for name in ["one", "two", "numbered"] {
        let rename = format!("ALTER TABLE TABLE_NAME RENAME TO {name}");
        world.execute(&rename).await;
        world.now_called(&format!("public.{name}"));
        world.insert(name, 20).await;
        let relay = world.relay();
        world.note().await;
        world.wait_until_published(&relay).await;
        world.wait_until_compared(&relay).await;
        relay.stop().await;
    }
    let identities = "SELECT string_agg(identity || ' ' || table_name, ', ') FROM outbox.capture";
    assert_eq!(
        world.database.text(identities).await,
        "public.numbered numbered"
    );
    let relay = world.relay();
    world.assert_published_once(relay).await;
}

/// Rolls a deployment back for a while: the settings do not contain the table, and a relay serves
/// `outbox.events` instead. With `leaves_publication`, the publication does not contain the table
/// either. With `loses_slot`, the slot is dropped before the table is in the settings again.
async fn out_of_the_settings(leaves_publication: bool, loses_slot: bool) {
    let (mut world, relay) = World::served(Kind::Numbered, 50).await;
    relay.stop().await;
    world.insert("a", 30).await;
    std::fs::write(world.settings.path(), "").unwrap();
    let publication = "ALTER PUBLICATION postrider ADD TABLE outbox.events";
    world.execute(publication).await;
    if leaves_publication {
        let sql = "ALTER PUBLICATION postrider DROP TABLE TABLE_NAME";
        world.execute(sql).await;
    }
    let relay = world.streaming().await;
    world.insert("b", 30).await;
    let other = "INSERT INTO outbox.events (aggregatetype, event_type) VALUES ('order', 'Other')";
    world.execute(other).await;
    let recorded =
        "SELECT count(*) FROM outbox.dispatch d JOIN outbox.events e ON e.id = d.event_id";
    crate::harness::eventually("the other table is served", || async {
        (world.database.number(recorded).await == 1).then_some(())
    })
    .await;
    world.wait_until_compared(&relay).await;
    relay.stop().await;
    world.insert("c", 30).await;
    if loses_slot {
        world.database.drop_slot().await;
    }
    if leaves_publication {
        let sql = "ALTER PUBLICATION postrider ADD TABLE TABLE_NAME";
        world.execute(sql).await;
    }
    write_settings(&world.settings, world.kind, "public.numbered");
    let relay = world.relay();
    world.insert("d", 30).await;
    world
        .note_rows("SELECT id::text, '' FROM outbox.events")
        .await;
    world.assert_published_once(relay).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_written_while_the_settings_lacked_the_table_are_delivered() {
    out_of_the_settings(false, false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_written_while_settings_and_publication_lacked_the_table_are_delivered() {
    out_of_the_settings(true, false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_written_while_the_settings_lacked_the_table_survive_a_lost_slot() {
    out_of_the_settings(false, true).await;
    out_of_the_settings(true, true).await;
}
