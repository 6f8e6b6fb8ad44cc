//! Tests that a table belongs to one slot. The relay of another slot must refuse to start, unless the
//! relay of the first slot is gone and an operator runs `recover --adopt`.

use super::World;
use super::table::Kind;

const SECOND: (&str, &str) = ("POSTRIDER_SLOT", "second");

async fn slots(world: &World) -> String {
    let sql =
        "SELECT string_agg(slot_name::text, ' ' ORDER BY slot_name) FROM pg_replication_slots";
    world.database.text(sql).await
}

fn stderr(output: &std::process::Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

async fn a_second_relay_is_refused(kind: Kind, first_runs: bool) {
    let (mut world, first) = World::served(kind, 40).await;
    let first = if first_runs {
        Some(first)
    } else {
        first.stop().await;
        None
    };
    world.insert("a", 20).await;
    let host = world.emulator.addr().to_string();
    let more = [
        SECOND,
        ("PUBSUB_EMULATOR_HOST", host.as_str()),
        ("PUBSUB_PROJECT_ID", "demo"),
        ("POSTRIDER_HTTP_ADDR", "off"),
    ];
    let refused = world.run(&["run"], &more);
    let said = stderr(&refused);
    assert_eq!(refused.status.code(), Some(3), "{said}");
    assert!(said.contains("error[table-captured]"), "{said}");
    assert!(
        said.contains("\"postrider\""),
        "the first slot is named: {said}"
    );
    for command in [&["slot", "create"][..], &["recover", "--yes"]] {
        let refused = world.run(command, &more);
        assert!(!refused.status.success(), "{command:?}: {refused:?}");
    }
    for command in [&["status"][..], &["slot", "show"]] {
        let shown = world.run(command, &more);
        let said = String::from_utf8_lossy(&shown.stdout).into_owned();
        let is_named = said.contains("\"postrider\"") && said.contains("recover --adopt");
        assert!(is_named && !said.contains("start the relay"), "{said}");
    }
    let _ = world.run(&["init", "--apply"], &more);
    assert_eq!(slots(&world).await, "postrider", "no slot is created");
    let first = first.unwrap_or_else(|| world.relay());
    world.insert("b", 20).await;
    world.assert_published_once(first).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_relay_on_the_same_table_is_refused_while_the_first_runs() {
    a_second_relay_is_refused(Kind::Events, true).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_relay_on_the_same_table_is_refused_while_the_first_is_down() {
    a_second_relay_is_refused(Kind::Numbered, false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn another_slot_adopts_the_tables_when_the_first_relay_is_gone() {
    for drops_first in [false, true] {
        let (mut world, first) = World::served(Kind::Numbered, 40).await;
        world.insert("a", 20).await;
        let refused = world.run(&["recover", "--adopt", "--yes"], &[SECOND]);
        let said = stderr(&refused);
        assert!(!refused.status.success(), "the first relay runs: {said}");
        assert!(said.contains("slot-held"), "{said}");
        first.stop().await;
        world.insert("b", 20).await;
        if drops_first {
            world.database.drop_slot().await;
        }
        let adopted = world.run(&["recover", "--adopt", "--yes"], &[SECOND]);
        assert!(adopted.status.success(), "{}", stderr(&adopted));
        world.insert("c", 20).await;
        world.more.push(("POSTRIDER_SLOT", "second".to_owned()));
        let second = world.relay();
        second.wait_for_log("recovered").await;
        world.insert("d", 20).await;
        world.note().await;
        world.wait_until_published(&second).await;
        let more = [
            ("POSTRIDER_SLOT", "postrider"),
            ("PUBSUB_PROJECT_ID", "demo"),
            ("POSTRIDER_HTTP_ADDR", "off"),
        ];
        let refused = world.run(&["run"], &more);
        assert_eq!(refused.status.code(), Some(3), "{}", stderr(&refused));
        assert!(
            stderr(&refused).contains("table-captured"),
            "{}",
            stderr(&refused)
        );
        second.stop().await;
        let report = world.report();
        assert!(
            report.is_clean() && report.duplicates.is_empty(),
            "{report}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_renamed_before_it_is_adopted_is_the_same_table() {
    let (mut world, first) = World::served(Kind::Numbered, 40).await;
    first.stop().await;
    world
        .execute("ALTER TABLE TABLE_NAME RENAME TO newly_called")
        .await;
    world.now_called("public.newly_called");
    world.insert("a", 20).await;
    let adopted = world.run(&["recover", "--adopt", "--yes"], &[SECOND]);
    assert!(adopted.status.success(), "{}", stderr(&adopted));
    world.more.push(("POSTRIDER_SLOT", "second".to_owned()));
    let second = world.relay();
    second.wait_for_log("recovered").await;
    world.insert("b", 20).await;
    world.note().await;
    world.wait_until_published(&second).await;
    second.stop().await;
    let report = world.report();
    assert!(
        report.is_clean() && report.duplicates.is_empty(),
        "{report}"
    );
}

/// Runs the commands with the settings of a second relay, which has its own slot and captures only
/// `table`. Checks that each command is refused, and that the error names the first slot.
async fn assert_refused_beside_the_first(world: &World, table: &str) {
    let sql = format!(
        "CREATE PUBLICATION second FOR TABLE {table} \
         WITH (publish = 'insert', publish_via_partition_root = true)"
    );
    world.execute(&sql).await;
    let settings = tempfile::NamedTempFile::new().unwrap();
    super::write_settings(&settings, world.kind, table);
    let config = settings.path().display().to_string();
    let host = world.emulator.addr().to_string();
    let more = [
        SECOND,
        ("POSTRIDER_CONFIG", config.as_str()),
        ("POSTRIDER_PUBLICATION", "second"),
        ("PUBSUB_EMULATOR_HOST", host.as_str()),
        ("PUBSUB_PROJECT_ID", "demo"),
        ("POSTRIDER_HTTP_ADDR", "off"),
    ];
    let commands: [&[&str]; 5] = [
        &["slot", "create"],
        &["init", "--apply"],
        &["check"],
        &["run"],
        &["recover", "--yes"],
    ];
    for command in commands {
        let refused = world.run(command, &more);
        let said = format!(
            "{command:?}: {}{}",
            String::from_utf8_lossy(&refused.stdout),
            stderr(&refused)
        );
        assert!(!refused.status.success(), "{said}");
        assert!(said.contains("table-captured"), "{said}");
        assert!(said.contains("\"postrider\""), "{said}");
    }
    assert_eq!(slots(world).await, "postrider", "no slot is created");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_relay_on_a_partition_of_a_captured_table_is_refused() {
    let (mut world, first) = World::served(Kind::Partitioned, 40).await;
    assert_refused_beside_the_first(&world, "public.parts_0").await;
    world.insert("a", 20).await;
    world.assert_published_once(first).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_relay_on_the_root_of_a_captured_partition_is_refused() {
    let mut world = World::new(Kind::Partitioned, 20).await.without_slot().await;
    world
        .execute("ALTER PUBLICATION postrider SET TABLE public.parts_0")
        .await;
    world.now_called("public.parts_0");
    let first = world.streaming().await;
    assert_refused_beside_the_first(&world, "public.parts").await;
    world.insert_into_first_partition("a", 20).await;
    world.assert_published_once(first).await;
}

/// A table that another slot captures is attached to a captured table as a partition. The relay
/// refuses to start until `recover --adopt` takes over the attached table.
#[tokio::test(flavor = "multi_thread")]
async fn a_relay_adopts_the_attached_table_of_a_relay_that_is_gone() {
    let (mut world, first) = World::served(Kind::Partitioned, 40).await;
    first.stop().await;
    world
        .execute(
            "CREATE TABLE public.more (LIKE public.parts INCLUDING ALL); \
             INSERT INTO outbox.capture (identity, schema_name, table_name, table_oid, slot, floor, \
                     has_inserted_xid, instance) \
                 SELECT 'public.more', 'public', 'more', 'public.more'::regclass, 'gone', floor, \
                     true, instance \
                 FROM outbox.capture; \
             ALTER TABLE public.parts ATTACH PARTITION public.more \
                 FOR VALUES FROM ('2030-01-01') TO ('2031-01-01')",
        )
        .await;
    world.insert("a", 20).await;
    let more = [
        ("PUBSUB_PROJECT_ID", "demo"),
        ("POSTRIDER_HTTP_ADDR", "off"),
    ];
    let refused = world.run(&["run"], &more);
    let said = stderr(&refused);
    assert_eq!(refused.status.code(), Some(3), "{said}");
    assert!(
        said.contains("table-captured") && said.contains("\"gone\""),
        "{said}"
    );
    let adopted = world.run(&["recover", "--adopt", "--yes"], &[]);
    assert!(adopted.status.success(), "{}", stderr(&adopted));
    let relay = world.relay();
    world.assert_published_once(relay).await;
}
