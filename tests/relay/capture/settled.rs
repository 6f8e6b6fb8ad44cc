//! Tests of former tables whose rows all have an outcome. The relay no longer compares these tables, but events in
//! quarantine can still be released. `prune` keeps the records that the relay needs if the rows come back.

use super::World;
use super::table::Kind;
use crate::harness::{Relay, eventually};
use crate::privileges::login_role;

const DETACH: &str = "ALTER TABLE public.parts DETACH PARTITION public.parts_2";
const ROTATE: &str = "\
    BEGIN; CREATE TABLE public.after (LIKE TABLE_NAME INCLUDING ALL); \
    ALTER PUBLICATION postrider ADD TABLE public.after; \
    ALTER TABLE TABLE_NAME RENAME TO before; ALTER TABLE public.after RENAME TO NAME; COMMIT";

impl World {
    /// Starts a relay, and inserts four rows whose events go into quarantine: a bad one, and three good ones of the
    /// same key. In a partitioned table, all four rows are in the partition of 2022.
    async fn quarantined(self) -> (Self, Relay) {
        let prepare =
            "ALTER TABLE TABLE_NAME ADD COLUMN headers jsonb; CREATE INDEX ON TABLE_NAME (id)";
        self.execute(prepare).await;
        let (mut world, relay) = self.serve(20).await;
        for headers in ["[1]", "{}", "{}", "{}"] {
            let (column, day) = match world.kind {
                Kind::Partitioned => (", day", ", '2022-03-03'"),
                _ => ("", ""),
            };
            let insert = format!(
                "INSERT INTO TABLE_NAME (aggregatetype, aggregateid, event_type, payload, headers{column}) \
                 VALUES ('order', 'blocked', 'New', jsonb_build_object('n', {}), '{headers}'{day})",
                world.next
            );
            world.next += 1;
            world.execute(&insert).await;
        }
        world.note().await;
        world.wait_for_quarantined(4).await;
        (world, relay)
    }

    pub(super) async fn wait_for_quarantined(&self, events: i64) {
        let count = "SELECT count(*) FROM outbox.dispatch WHERE state = 'quarantined'";
        eventually("the events are in quarantine", || async {
            (self.database.number(count).await == events).then_some(())
        })
        .await;
    }

    /// Detaches the partition of 2022, or replaces the table. Returns the name that the former table has now.
    async fn leave(&mut self) -> &'static str {
        let former = if self.kind == Kind::Partitioned {
            self.execute(DETACH).await;
            self.insert_into_first_partition("after", 5).await;
            "public.parts_2"
        } else {
            let name = self.table.rsplit('.').next().unwrap().to_owned();
            self.execute(&ROTATE.replace("TO NAME;", &format!("TO {name};")))
                .await;
            self.insert("after", 5).await;
            "public.before"
        };
        self.wait_until_settled(former).await;
        former
    }

    async fn wait_until_settled(&self, former: &str) {
        let settled = format!(
            "SELECT count(*) FROM outbox.capture \
             WHERE '{former}'::regclass::oid <> ALL ( \
                 table_oid || detached || string_to_array(partitions, ',')::oid[])"
        );
        eventually("the former table is settled", || async {
            (self.database.number(&settled).await == 1).then_some(())
        })
        .await;
    }

    /// The exit code and the output of a command.
    pub(super) fn said(&self, arguments: &[&str]) -> (Option<i32>, String) {
        let done = self.run(arguments, &[("GOOGLE_CLOUD_PROJECT", "demo")]);
        let said = String::from_utf8_lossy(&done.stdout).into_owned();
        let error = String::from_utf8_lossy(&done.stderr);
        (done.status.code(), format!("{said}{error}"))
    }

    /// Corrects the bad row in the former table, releases all events, and checks that each is published once.
    async fn assert_released(mut self, relay: Relay, former: &str) {
        let second = "SELECT event_id::text FROM outbox.dispatch WHERE state = 'quarantined' \
                      ORDER BY commit_lsn, ordinal OFFSET 1 LIMIT 1";
        let second = self.database.text(second).await;
        let (_, said) = self.said(&["event", &second]);
        assert!(said.contains(&format!("row        {former}")), "{said}");
        let (code, said) = self.said(&["audit"]);
        assert_eq!(code, Some(1), "{said}");
        assert!(
            said.contains(&format!("{former} (no longer captured")),
            "{said}"
        );
        assert!(said.contains("4  in quarantine"), "{said}");
        let correct = format!("UPDATE {former} SET headers = '{{}}' WHERE headers = '[1]'");
        self.execute(&correct).await;
        self.said(&["quarantine", "release", "--all"]);
        self.wait_for_quarantined(0).await;
        self.assert_published_once(relay).await;
        let (code, said) = self.said(&["audit"]);
        assert_eq!(code, Some(0), "{said}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn events_in_quarantine_are_released_from_a_table_that_was_rotated_or_detached() {
    for kind in [Kind::Uuid, Kind::Partitioned, Kind::Numbered] {
        let (mut world, relay) = World::new(kind, 5).await.quarantined().await;
        let former = world.leave().await;
        world.assert_released(relay, former).await;
    }
}

/// The rows of the new table have the same ids as the rows of the earlier table, and other event ids.
#[tokio::test(flavor = "multi_thread")]
async fn events_in_quarantine_are_released_although_the_new_table_has_the_same_ids() {
    let world = World::new(Kind::Timed, 0).await;
    world
        .execute("ALTER TABLE TABLE_NAME DROP COLUMN inserted_xid")
        .await;
    let (mut world, relay) = world.quarantined().await;
    let rotate = format!(
        "{}; CREATE SEQUENCE public.again; \
         ALTER TABLE TABLE_NAME ALTER COLUMN id SET DEFAULT nextval('public.again')",
        ROTATE
            .replace("TO NAME;", "TO timed;")
            .replace("; COMMIT", "")
    );
    world.execute(&format!("{rotate}; COMMIT")).await;
    world.event_id =
        "outbox.event_uuid('public.timed@' || 'public.timed'::regclass::oid, e.id::text)".into();
    world.insert("after", 30).await;
    world.wait_until_settled("public.before").await;
    world.assert_released(relay, "public.before").await;
}

async fn released_once_the_relay_may_read_the_partition(attach: &str) {
    let mut world = World::new(Kind::Partitioned, 5).await;
    let url = login_role(&world.database).await;
    world.more.push(("DATABASE_URL", url));
    let (mut world, relay) = world.quarantined().await;
    let former = world.leave().await;
    world.execute(attach).await;
    world.said(&["quarantine", "release", "--all"]);
    relay
        .wait_for_log("GRANT SELECT ON public.parts_2 TO shop_relay")
        .await;
    world.wait_for_quarantined(4).await;
    world
        .execute("GRANT SELECT ON public.parts_2 TO shop_relay")
        .await;
    world.assert_released(relay, former).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn events_in_quarantine_are_released_from_a_detached_partition_once_the_relay_may_read_it() {
    released_once_the_relay_may_read_the_partition("").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn events_in_quarantine_are_released_from_a_partition_of_a_table_that_is_not_captured() {
    let attach = "CREATE TABLE public.attic (LIKE public.parts) PARTITION BY RANGE (day); \
                  ALTER TABLE public.attic ATTACH PARTITION public.parts_2 DEFAULT";
    released_once_the_relay_may_read_the_partition(attach).await;
}

/// Waits until old records of published events may be deleted, and makes all records look old.
async fn make_records_old(world: &World) {
    let durable = "SELECT count(*) FROM pg_replication_slots \
                   WHERE restart_lsn > (SELECT max(commit_lsn) FROM outbox.dispatch)";
    eventually("the position is durable", || async {
        // A checkpoint writes the running transactions to the WAL, which lets `restart_lsn` advance.
        world.execute("CHECKPOINT").await;
        (world.database.number(durable).await == 1).then_some(())
    })
    .await;
    world
        .execute("UPDATE outbox.dispatch SET dispatched_at = now() - interval '8 days'")
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn prune_keeps_the_records_of_rows_that_come_back_from_a_former_table() {
    for (kind, back) in [
        (
            Kind::Uuid,
            "BEGIN; ALTER TABLE TABLE_NAME RENAME TO other; ALTER TABLE public.before RENAME TO plain; COMMIT",
        ),
        (
            Kind::Partitioned,
            "ALTER TABLE public.parts ATTACH PARTITION public.parts_2 \
                 FOR VALUES FROM ('2022-01-01') TO ('2023-01-01')",
        ),
    ] {
        let (mut world, relay) = World::served(kind, 30).await;
        world.execute("CREATE INDEX ON TABLE_NAME (id)").await;
        let former = world.leave().await;
        world.note().await;
        world.wait_until_published(&relay).await;
        world.wait_until_recorded().await;
        make_records_old(&world).await;
        let prune = ["prune", "--older-than", "7d", "--yes", "--json"];
        let pruned = world.run(&prune, &[]);
        assert!(pruned.status.success(), "{pruned:?}");
        let json: serde_json::Value = serde_json::from_slice(&pruned.stdout).unwrap();
        // `prune` deletes the new rows in the captured table, and then their records. So only the rows of the former
        // table keep records.
        let kept = format!("SELECT count(*) FROM {former} WHERE event_type = 'New'");
        let kept = world.database.number(&kept).await;
        assert!(kept > 0);
        assert_eq!(json["dispatch"]["of_rows"], kept, "{json:#}");
        world.execute(back).await;
        world.insert("later", 5).await;
        world.assert_published_once(relay).await;
    }
}

/// `prune` cannot look up rows in the former table, because the table has no index for this. The rows may come back. So
/// `prune` keeps all records from before the table was settled, and deletes only newer ones.
#[tokio::test(flavor = "multi_thread")]
async fn prune_keeps_older_records_if_a_former_table_cannot_be_searched() {
    let (mut world, relay) = World::served(Kind::Uuid, 30).await;
    world.leave().await;
    world
        .execute("ALTER TABLE public.before DROP CONSTRAINT plain_pkey")
        .await;
    world.insert("gone", 7).await;
    world.note().await;
    world.wait_until_published(&relay).await;
    world.wait_until_recorded().await;
    world
        .execute("DELETE FROM TABLE_NAME WHERE aggregateid LIKE 'gone%'")
        .await;
    make_records_old(&world).await;
    let (code, said) = world.said(&["prune", "--older-than", "7d", "--yes"]);
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("7  outbox.dispatch"), "{said}");
    assert!(said.contains("CREATE INDEX ON public.before"), "{said}");
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_audit_is_not_complete_while_an_event_without_a_row_is_in_quarantine() {
    let (world, relay) = World::new(Kind::Uuid, 5).await.quarantined().await;
    world
        .execute("DELETE FROM TABLE_NAME WHERE aggregateid = 'blocked'")
        .await;
    let (code, said) = world.said(&["audit"]);
    assert_eq!(code, Some(1), "{said}");
    assert!(
        said.contains("4  in quarantine") && !said.contains("Complete"),
        "{said}"
    );
    world.said(&["quarantine", "discard", "--all", "--yes"]);
    world.wait_for_quarantined(0).await;
    let (code, said) = world.said(&["audit"]);
    assert_eq!(code, Some(0), "{said}");
    relay.stop().await;
}

/// The test simulates an earlier version, which had no column `settled` and so forgot the former table. The migration
/// must add the former table to the new column, because the capture record still names the table in `id_suffixes`.
#[tokio::test(flavor = "multi_thread")]
async fn an_upgrade_finds_a_table_that_was_rotated_before() {
    let (mut world, relay) = World::new(Kind::Uuid, 5).await.quarantined().await;
    let former = world.leave().await;
    relay.stop().await;
    world
        .execute(
            "ALTER TABLE outbox.capture DROP COLUMN settled; \
             DELETE FROM outbox.migrations WHERE version = 24",
        )
        .await;
    let (code, said) = world.said(&["init", "--apply"]);
    assert_eq!(code, Some(0), "{said}");
    let relay = world.streaming().await;
    world.assert_released(relay, former).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_number_of_settled_tables_is_bounded_and_a_dropped_table_is_forgotten() {
    let (mut world, relay) = World::served(Kind::Uuid, 5).await;
    world
        .execute(
            "CREATE SCHEMA old; \
             DO $$ BEGIN FOR i IN 1..300 LOOP EXECUTE format('CREATE TABLE old.t%s (id int)', i); \
                 END LOOP; END $$; \
             UPDATE outbox.capture SET settled = ( \
                 SELECT jsonb_object_agg(oid, '0/1') FROM pg_class WHERE relnamespace = 'old'::regnamespace); \
             DROP TABLE old.t300",
        )
        .await;
    let former = world.leave().await;
    let kept = "SELECT count(*) FROM outbox.capture, jsonb_object_keys(settled)";
    assert_eq!(world.database.number(kept).await, 256);
    world
        .execute(&format!("DROP TABLE {former}; DROP SCHEMA old CASCADE"))
        .await;
    relay.stop().await;
    world.database.drop_slot().await;
    world.insert("last", 5).await;
    let relay = world.relay();
    world.assert_published_once(relay).await;
    let relay = world.streaming().await;
    eventually("no table is kept", || async {
        (world.database.number(kept).await == 0).then_some(())
    })
    .await;
    relay.stop().await;
}
