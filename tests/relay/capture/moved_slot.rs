//! Tests in which the slot is moved forward, or replaced by a copy of another slot, after `init` and
//! before the first start. No relay has recorded a position yet, so only the capture records show that
//! the slot has skipped rows.

use super::World;
use super::table::Kind;

/// Calls `skip`, which makes the slot skip the rows that are committed so far. Checks that the commands
/// report the changed slot, and that the relay publishes the skipped rows from the table.
async fn rows_that_the_slot_skips_come_from_the_table(
    dispatch: &str,
    skip: impl AsyncFnOnce(&World),
) {
    let mut world = World::new(Kind::Numbered, 50).await;
    world.more.push(("POSTRIDER_DISPATCH", dispatch.to_owned()));
    world.insert("skipped", 20).await;
    skip(&world).await;
    world.insert("streamed", 20).await;
    world.note().await;
    assert!(shown(&world, &["slot", "show"]).contains("RECREATED"));
    assert!(shown(&world, &["status"]).contains("RECREATED"));
    assert!(shown(&world, &["check", "--json"]).contains("slot-recreated"));
    let relay = world.relay();
    relay.wait_for_log("slot-recreated").await;
    world.wait_until_published(&relay).await;
    world.wait_until_compared(&relay).await;
    let log = relay.log();
    assert!(!log.contains("publication-gap"), "{log}");
    let report = world.report();
    assert!(report.is_clean(), "{report}\n{log}");
    world.assert_published(relay).await;
    assert!(shown(&world, &["slot", "show"]).contains("DOWN"));
}

fn shown(world: &World, arguments: &[&str]) -> String {
    let ran = world.run(arguments, &[("PUBSUB_PROJECT_ID", "demo")]);
    String::from_utf8(ran.stdout).unwrap()
}

async fn advanced_by_the_command(world: &World) {
    let ran = world.run(&["slot", "advance", "--yes"], &[]);
    assert!(ran.status.success(), "{ran:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_advance_before_the_first_start_loses_nothing() {
    rows_that_the_slot_skips_come_from_the_table("full", advanced_by_the_command).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_advance_before_the_first_start_loses_nothing_without_records() {
    rows_that_the_slot_skips_come_from_the_table("exceptions", advanced_by_the_command).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn replacing_the_slot_by_a_newer_copy_before_the_first_start_loses_nothing() {
    rows_that_the_slot_skips_come_from_the_table("exceptions", async |world| {
        let name = world.database.slot();
        let copy = format!(
            "SELECT pg_create_logical_replication_slot('newer', 'pgoutput'); \
             SELECT pg_drop_replication_slot('{name}'); \
             SELECT pg_copy_logical_replication_slot('newer', '{name}')"
        );
        for statement in copy.split("; ") {
            world.execute(statement).await;
        }
    })
    .await;
}
