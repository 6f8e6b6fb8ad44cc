//! Tests of captured tables that the settings no longer name, or whose name another captured table has.

use std::time::Duration;

use pubsub_emulator::{Action, Fault};

use super::World;
use super::reused_names::{EXCEPTIONS, Fate, wait_for_second_session};
use crate::harness::{self, Relay, eventually, postrider};

/// `public.numbered` and `public.other` swap their names.
const SWAP: &str = "BEGIN; ALTER TABLE public.other RENAME TO between; \
                    ALTER TABLE public.numbered RENAME TO other; \
                    ALTER TABLE public.between RENAME TO numbered; COMMIT";

/// Drops `inserted_xid`. Without this column, rows of the two tables look the same if their ids are equal.
const WITHOUT_XID: &str = "ALTER TABLE public.numbered DROP COLUMN inserted_xid; \
                           ALTER TABLE public.other DROP COLUMN inserted_xid";

impl World {
    /// Starts the relay, and inserts four events of one key into `public.other`. The first is bad, so all go into
    /// quarantine.
    async fn quarantined_in_other(&mut self) -> Relay {
        for name in ["public.numbered", "public.other"] {
            let prepare =
                format!("ALTER TABLE {name} ADD COLUMN headers jsonb; CREATE INDEX ON {name} (id)");
            self.execute(&prepare).await;
        }
        let relay = self.streaming().await;
        let insert = "INSERT INTO public.other (id, aggregatetype, aggregateid, event_type, payload, headers) \
                      SELECT i, 'order', 'blocked', 'New', '{}', CASE i WHEN 1 THEN '[1]' ELSE '{}' END::jsonb \
                      FROM generate_series(1, 4) i";
        self.execute(insert).await;
        let ids = "SELECT outbox.event_uuid('public.other', id::text, inserted_xid)::text, aggregateid \
                   FROM public.other ORDER BY id";
        self.note_rows(ids).await;
        self.wait_for_quarantined(4).await;
        relay
    }
}

/// `public.other`, the table with the events, is renamed, and another captured table takes its name. The settings do
/// not name the renamed table, so the relay can find it only by its capture record.
async fn released_from_a_displaced_table(world: World) {
    let mut world = world;
    let relay = world.quarantined_in_other().await;
    world.rotate_to("other", Fate::RenamedAway).await;
    wait_for_second_session(&relay).await;
    let renamed = [
        ("public.numbered", "public.numbered#2"),
        ("public.other", "public.numbered"),
    ];
    world.insert_equal_ids(&renamed, 101, 105).await;
    let third = "SELECT event_id::text FROM outbox.dispatch WHERE state = 'quarantined' \
                 ORDER BY commit_lsn, ordinal OFFSET 2 LIMIT 1";
    let third = world.database.text(third).await;
    let (_, said) = world.said(&["event", &third]);
    assert!(said.contains("row        public.other_away"), "{said}");
    let (code, said) = world.said(&["audit"]);
    assert_eq!(code, Some(1), "{said}");
    assert!(
        said.contains("public.other_away (no longer captured"),
        "{said}"
    );
    world
        .execute("UPDATE public.other_away SET headers = '{}' WHERE id = 1")
        .await;
    world.said(&["quarantine", "release", "--all"]);
    world.wait_for_quarantined(0).await;
    world.assert_exactly_published(&relay).await;
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn events_in_quarantine_are_released_from_a_table_whose_name_another_captured_table_has() {
    released_from_a_displaced_table(World::with_numbered(&["public.other"]).await).await;
    let without_records = World::with_numbered(&["public.other"])
        .await
        .set(EXCEPTIONS);
    released_from_a_displaced_table(without_records).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn hints_name_a_captured_table_that_is_not_in_the_settings() {
    let mut world = World::with_numbered(&["public.other"]).await;
    let relay = world.quarantined_in_other().await;
    relay.stop().await;
    let settings = std::fs::read_to_string(world.settings.path()).unwrap();
    let without = settings.replace("[[tables]]\ntable = \"public.other\"\n", "");
    assert_ne!(settings, without);
    std::fs::write(world.settings.path(), without).unwrap();
    let relay = world.streaming().await;
    let third =
        "SELECT event_id::text FROM outbox.dispatch ORDER BY commit_lsn, ordinal OFFSET 2 LIMIT 1";
    let third = world.database.text(third).await;
    let remedy = "name public.other in the settings";
    let (_, said) = world.said(&["event", &third]);
    assert!(said.contains(remedy) && !said.contains("discard"), "{said}");
    let (_, said) = world.said(&["audit"]);
    assert!(said.contains(remedy), "{said}");
    world.said(&["quarantine", "release", "--all"]);
    relay.wait_for_log(remedy).await;
    relay.stop().await;
    std::fs::write(world.settings.path(), settings).unwrap();
    let relay = world.streaming().await;
    world
        .execute("UPDATE public.other SET headers = '{}' WHERE id = 1")
        .await;
    world.said(&["quarantine", "release", "--all"]);
    world.wait_for_quarantined(0).await;
    world.assert_exactly_published(&relay).await;
    relay.stop().await;
}

/// The tables swap their names while the auditor waits for a lock: it has looked up the tables, but has not read them
/// yet.
#[tokio::test(flavor = "multi_thread")]
async fn an_audit_publishes_no_row_of_a_table_that_takes_the_scanned_name() {
    let mut world = World::with_numbered(&["public.other"]).await;
    let relay = world.streaming().await;
    let tables = [
        ("public.numbered", "public.numbered"),
        ("public.other", "public.other"),
    ];
    world.insert_equal_ids(&tables[..1], 1, 10).await;
    world.insert_equal_ids(&tables[1..], 11, 20).await;
    world.wait_until_published(&relay).await;
    world.wait_until_recorded().await;
    world.wait_until_compared(&relay).await;
    let lock = harness::connect(&world.database.url).await;
    lock.batch_execute("BEGIN; LOCK outbox.dispatch")
        .await
        .unwrap();
    let compared = "comparing the tables with outbox.dispatch";
    let before = relay.log().matches(compared).count();
    let alter = "BEGIN; ALTER PUBLICATION postrider DROP TABLE TABLE_NAME; \
                 ALTER PUBLICATION postrider ADD TABLE TABLE_NAME; COMMIT";
    world.execute(alter).await;
    while relay.log().matches(compared).count() == before {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    world.execute(SWAP).await;
    lock.batch_execute("COMMIT").await.unwrap();
    wait_for_second_session(&relay).await;
    let swapped = [
        ("public.other", "public.numbered"),
        ("public.numbered", "public.other"),
    ];
    world.insert_equal_ids(&swapped, 21, 25).await;
    world.wait_until_published(&relay).await;
    world.wait_until_compared(&relay).await;
    world.assert_exactly_published(&relay).await;
    relay.stop().await;
}

/// Inserts large rows with the same 80 ids into both tables.
async fn insert_waiting_rows(world: &mut World) {
    for name in ["numbered", "other"] {
        let insert = format!(
            "INSERT INTO public.{name} (id, aggregatetype, aggregateid, event_type, payload) \
             SELECT i, 'order', '{name}-' || i % 3, 'New', \
                 jsonb_build_object('n', i, 'text', repeat(md5(i::text), 8000)) \
             FROM generate_series(1, 80) i"
        );
        world.execute(&insert).await;
        let ids = format!(
            "SELECT outbox.event_uuid('public.{name}', id::text)::text, aggregateid FROM public.{name} ORDER BY id"
        );
        world.note_rows(&ids).await;
    }
}

/// A recovery has found the rows of the table, and has read the values of some of them. Then the tables swap their
/// names.
async fn swapped_before_all_values_are_read(world: World) {
    let mut world = world
        .set(("POSTRIDER_IN_FLIGHT_MIB", "1"))
        .set(("POSTRIDER_PUBLISH_TIMEOUT_S", "1"));
    world.execute(WITHOUT_XID).await;
    let relay = world.streaming().await;
    relay.stop().await;
    insert_waiting_rows(&mut world).await;
    world.database.drop_slot().await;
    let faults = world.emulator.faults();
    let fault = faults.inject(Fault::new(Action::NeverAnswer).times(1_000));
    let relay = world.relay();
    eventually("the recovery publishes", || async {
        (faults.uses_left(fault) < Some(1_000)).then_some(())
    })
    .await;
    world.execute(SWAP).await;
    faults.lift(fault);
    world.assert_exactly_published(&relay).await;
    let report = world.report();
    assert!(report.is_clean(), "{report}\n{}", relay.log());
    let refused = ", public.numbered\" does not exist";
    assert!(relay.log().contains(refused), "{}", relay.log());
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_recovery_publishes_no_values_of_a_table_that_takes_the_name_after_the_scan() {
    swapped_before_all_values_are_read(World::with_numbered(&["public.other"]).await).await;
    let without_records = World::with_numbered(&["public.other"]).await;
    swapped_before_all_values_are_read(without_records.set(EXCEPTIONS)).await;
}

/// The tables swap their names after `prune` has deleted the first rows. All rows of `public.numbered` are published,
/// and all rows of `public.other` are in quarantine.
#[tokio::test(flavor = "multi_thread")]
async fn prune_deletes_no_row_of_a_table_that_takes_the_name() {
    let world = World::with_numbered(&["public.other"]).await;
    world.execute(WITHOUT_XID).await;
    let relay = world.streaming().await;
    let insert = "INSERT INTO TABLE_NAME (id, aggregatetype, aggregateid, event_type, payload) \
                  SELECT i, 'order', 'k', 'New', '{}' FROM generate_series(1, 400) i";
    world.execute(insert).await;
    let recorded =
        "SELECT count(*) FROM outbox.dispatch WHERE state IS DISTINCT FROM 'quarantined'";
    eventually("all rows are recorded", || async {
        (world.database.number(recorded).await == 400).then_some(())
    })
    .await;
    let others = insert
        .replace("TABLE_NAME", "public.other")
        .replace("'order'", "NULL");
    world.execute(&others).await;
    world.wait_for_quarantined(400).await;
    world.wait_until_compared(&relay).await;
    relay.stop().await;
    let config = world.settings.path().display().to_string();
    let environment = [
        ("DATABASE_URL", world.database.url.as_str()),
        ("POSTRIDER_CONFIG", config.as_str()),
        ("POSTRIDER_SLOT", world.database.slot()),
    ];
    let chunks = [
        "--older-than",
        "0s",
        "--chunk",
        "100",
        "--pause",
        "1s",
        "--yes",
    ];
    let arguments = [&["prune"][..], &chunks].concat();
    let prune = postrider(&arguments, &environment);
    let prune = tokio::task::spawn_blocking(move || {
        let mut prune = prune;
        prune.output().unwrap()
    });
    let left = "SELECT count(*) FROM public.numbered";
    eventually("the first rows are deleted", || async {
        (world.database.number(left).await < 400).then_some(())
    })
    .await;
    world.execute(SWAP).await;
    let pruned = prune.await.unwrap();
    assert_eq!(world.database.number(left).await, 400, "{pruned:?}");
    let said = String::from_utf8_lossy(&pruned.stderr);
    assert!(said.contains("error[slot-busy]"), "{said}");
}
