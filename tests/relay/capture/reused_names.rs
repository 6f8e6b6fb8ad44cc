//! Tests in which one captured table gets the name of another, while the WAL still contains rows of both. The event ids
//! of these rows must not change. Otherwise consumers could not recognise repeats, and rows of two tables could get one
//! event id.

use super::World;
use super::table::Kind;
use crate::harness::{Relay, eventually};

/// What happens to the table whose name `public.numbered` gets.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Fate {
    Dropped,
    RenamedAway,
}

pub(super) const EXCEPTIONS: (&str, &str) = ("POSTRIDER_DISPATCH", "exceptions");

impl World {
    /// Captures `public.numbered` and the tables `names`, which have numbered ids too.
    pub(super) async fn with_numbered(names: &[&str]) -> Self {
        let world = Self::new(Kind::Numbered, 0).await;
        let mut settings = world.kind.settings(&world.table);
        for name in names {
            let create = format!(
                "CREATE TABLE {name} (LIKE TABLE_NAME INCLUDING ALL); \
                 ALTER PUBLICATION postrider ADD TABLE {name}"
            );
            world.execute(&create).await;
            settings += &format!("[[tables]]\ntable = \"{name}\"\n");
        }
        std::fs::write(world.settings.path(), settings).unwrap();
        world
    }

    pub(super) fn set(mut self, (name, value): (&'static str, &str)) -> Self {
        self.more.push((name, value.to_owned()));
        self
    }

    /// Inserts rows with the ids `first` to `last` into each table, in one transaction, and expects their events.
    /// Each table has its own keys. `tables` contains the present name and the identity of each table.
    pub(super) async fn insert_equal_ids(
        &mut self,
        tables: &[(&str, &str)],
        first: u32,
        last: u32,
    ) {
        let mut insert = "BEGIN;".to_owned();
        for (name, identity) in tables {
            insert += &format!(
                "INSERT INTO {name} (id, aggregatetype, aggregateid, event_type, payload) \
                 SELECT i, 'order', '{identity}-' || i % 3, 'New', jsonb_build_object('n', i) \
                 FROM generate_series({first}, {last}) i;"
            );
        }
        self.execute(&(insert + "COMMIT")).await;
        for (name, identity) in tables {
            let sql = format!(
                "SELECT outbox.event_uuid('{identity}', id::text, inserted_xid)::text, aggregateid \
                 FROM {name} WHERE id BETWEEN {first} AND {last} ORDER BY id"
            );
            self.note_rows(&sql).await;
        }
    }

    /// Drops the table `to` or renames it, as `fate` says. Then renames the captured table to `to`, and gives the
    /// captured table's former name to a new table.
    pub(super) async fn rotate_to(&self, to: &str, fate: Fate) {
        let leave = match fate {
            Fate::Dropped => format!("DROP TABLE public.{to}"),
            Fate::RenamedAway => format!("ALTER TABLE public.{to} RENAME TO {to}_away"),
        };
        let rotate = format!(
            "BEGIN; CREATE TABLE public.next (LIKE TABLE_NAME INCLUDING ALL); \
             ALTER PUBLICATION postrider ADD TABLE public.next; {leave}; \
             ALTER TABLE TABLE_NAME RENAME TO {to}; ALTER TABLE public.next RENAME TO numbered; COMMIT"
        );
        self.execute(&rotate).await;
    }

    /// Waits until every expected event is published, and checks that no other event is. Unless repeats are allowed,
    /// also checks that each event is stored once.
    pub(super) async fn assert_exactly_published(&self, relay: &Relay) {
        self.wait_until_published(relay).await;
        let stored = super::stored(&self.emulator);
        let unexpected: Vec<&String> = stored
            .keys()
            .filter(|id| !self.noted.contains(*id))
            .collect();
        assert!(unexpected.is_empty(), "{unexpected:?}\n{}", relay.log());
        let allows_repeats = self.more.iter().any(|(name, _)| *name == EXCEPTIONS.0);
        let repeated = stored.values().any(|times| *times > 1);
        assert!(allows_repeats || !repeated, "{stored:?}\n{}", relay.log());
    }
}

/// Waits until the relay streams in a second session.
pub(super) async fn wait_for_second_session(relay: &Relay) {
    eventually("a new session has begun", || async {
        (relay.log().matches("streaming").count() > 1).then_some(())
    })
    .await;
}

const BOTH: [(&str, &str); 2] = [
    ("public.numbered", "public.numbered"),
    ("public.other", "public.other"),
];

/// The tables are rotated while the relay is down. Its next session reads the rows of both tables from the stream.
async fn rotated_while_down(mut world: World, fate: Fate) {
    let relay = world.streaming().await;
    world.insert_equal_ids(&BOTH, 1, 3).await;
    world.wait_until_published(&relay).await;
    relay.stop().await;
    world.insert_equal_ids(&BOTH, 101, 105).await;
    world.rotate_to("other", fate).await;
    let relay = world.streaming().await;
    world
        .insert_equal_ids(&[("public.numbered", "public.numbered#2")], 201, 203)
        .await;
    world.assert_exactly_published(&relay).await;
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn equal_ids_of_a_dropped_table_and_of_the_table_with_its_name_are_two_events() {
    let world = World::with_numbered(&["public.other"]).await;
    rotated_while_down(world, Fate::Dropped).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn equal_ids_of_a_table_renamed_away_and_of_the_table_with_its_name_are_two_events() {
    let world = World::with_numbered(&["public.other"]).await;
    rotated_while_down(world, Fate::RenamedAway).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_records_equal_ids_of_a_dropped_table_are_not_lost() {
    let world = World::with_numbered(&["public.other"]).await;
    rotated_while_down(world.set(EXCEPTIONS), Fate::Dropped).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_records_equal_ids_of_a_table_renamed_away_are_not_lost() {
    let world = World::with_numbered(&["public.other"]).await;
    rotated_while_down(world.set(EXCEPTIONS), Fate::RenamedAway).await;
}

/// An event of a missing topic holds back the confirmed position. So the session after the rotation reads events
/// again that are recorded.
async fn rotated_under_a_running_relay(fate: Fate) {
    let mut world = World::with_numbered(&["public.other"]).await;
    let relay = world.streaming().await;
    let waiting = "INSERT INTO TABLE_NAME (id, aggregatetype, aggregateid, event_type, payload) \
                   VALUES (1, 'missing', 'waits', 'New', '{}')";
    world.execute(waiting).await;
    for table in BOTH {
        world.insert_equal_ids(&[table], 101, 110).await;
    }
    world.wait_until_published(&relay).await;
    world.wait_until_recorded().await;
    world.rotate_to("other", fate).await;
    wait_for_second_session(&relay).await;
    // The stream brings these rows after the repeated ones.
    let renamed = [
        ("public.numbered", "public.numbered#2"),
        ("public.other", "public.numbered"),
    ];
    world.insert_equal_ids(&renamed, 201, 205).await;
    world.assert_exactly_published(&relay).await;
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn recorded_events_of_a_dropped_table_are_not_repeated_under_other_ids() {
    rotated_under_a_running_relay(Fate::Dropped).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn recorded_events_of_a_table_renamed_away_are_not_repeated_under_other_ids() {
    rotated_under_a_running_relay(Fate::RenamedAway).await;
}

/// The relay sees only the result of two rotations. In between, the tables had other names.
async fn rotated_twice(world: World) {
    let mut world = world;
    let relay = world.streaming().await;
    let third = ("public.third", "public.third");
    let all = [BOTH[0], BOTH[1], third];
    world.insert_equal_ids(&all, 1, 3).await;
    world.wait_until_published(&relay).await;
    relay.stop().await;
    world.insert_equal_ids(&all, 101, 105).await;
    world.rotate_to("third", Fate::Dropped).await;
    let rotated = [
        ("public.numbered", "public.other#2"),
        BOTH[1],
        ("public.third", "public.numbered"),
    ];
    world.insert_equal_ids(&rotated, 201, 205).await;
    world.rotate_to("other", Fate::Dropped).await;
    let relay = world.streaming().await;
    world
        .insert_equal_ids(&[("public.numbered", "public.numbered#2")], 301, 303)
        .await;
    world.assert_exactly_published(&relay).await;
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn equal_ids_of_three_tables_that_are_rotated_twice_are_three_events() {
    rotated_twice(World::with_numbered(&["public.other", "public.third"]).await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_records_equal_ids_of_three_tables_that_are_rotated_twice_are_not_lost() {
    let world = World::with_numbered(&["public.other", "public.third"]).await;
    rotated_twice(world.set(EXCEPTIONS)).await;
}

/// The capture record of the dropped table has the name of a table that is still captured.
#[tokio::test(flavor = "multi_thread")]
async fn records_of_a_dropped_table_whose_name_another_table_has_are_pruned() {
    records_of_a_dropped_table_are_pruned(&[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_prunes_the_records_of_a_dropped_table_whose_name_another_table_has() {
    records_of_a_dropped_table_are_pruned(&[("POSTRIDER_PRUNE_AFTER", "1s")]).await;
}

async fn records_of_a_dropped_table_are_pruned(by_relay: &[(&'static str, &str)]) {
    let mut world = World::with_numbered(&["public.other"]).await;
    for setting in by_relay {
        world = world.set(*setting);
    }
    let relay = world.streaming().await;
    world.insert_equal_ids(&BOTH, 1, 3).await;
    world.wait_until_published(&relay).await;
    world.wait_until_recorded().await;
    world.rotate_to("other", Fate::Dropped).await;
    let of_dropped = "SELECT count(*) FROM outbox.dispatch WHERE source_id LIKE 'public.other:%'";
    eventually("the records are pruned", || async {
        if by_relay.is_empty() {
            let pruned = world.run(&["prune", "--older-than", "1s", "--yes"], &[]);
            let stdout = String::from_utf8_lossy(&pruned.stdout).into_owned();
            assert!(!stdout.contains("not in the settings"), "{stdout}");
        }
        (world.database.number(of_dropped).await == 0).then_some(())
    })
    .await;
    relay.stop().await;
}

/// A restored database has other OIDs, so an adoption finds the tables by their names. Two capture records then have
/// the name `public.another`: the record of the dropped table, and the record of the table that took its name. The
/// adoption must use the second record, although the first one comes earlier in the order of the identities.
#[tokio::test(flavor = "multi_thread")]
async fn an_adoption_after_a_rotation_repeats_no_event_under_another_id() {
    let mut world = World::with_numbered(&["public.another"]).await;
    let relay = world.streaming().await;
    let before = [
        ("public.numbered", "public.numbered"),
        ("public.another", "public.another"),
    ];
    world.insert_equal_ids(&before, 1, 5).await;
    world.wait_until_published(&relay).await;
    world.wait_until_recorded().await;
    world.rotate_to("another", Fate::Dropped).await;
    wait_for_second_session(&relay).await;
    let renamed = [
        ("public.numbered", "public.numbered#2"),
        ("public.another", "public.numbered"),
    ];
    world.insert_equal_ids(&renamed, 101, 105).await;
    world.wait_until_published(&relay).await;
    world.wait_until_recorded().await;
    relay.stop().await;
    let other = "UPDATE outbox.relay SET system_identifier = '1' || system_identifier";
    world.execute(other).await;
    let adopted = world.run(&["recover", "--adopt", "--yes"], &[]);
    assert_eq!(adopted.status.code(), Some(0), "{adopted:?}");
    let relay = world.streaming().await;
    world.insert_equal_ids(&renamed, 201, 205).await;
    world.assert_exactly_published(&relay).await;
    relay.stop().await;
}
