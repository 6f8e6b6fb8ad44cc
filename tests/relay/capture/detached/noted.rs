//! Tests of partitions that leave the table before any audit has covered them. No audit ends, because an event waits
//! for its missing topic. Each test then drops the slot, so only a recovery can publish the rows of the partition.

use std::time::Duration;

use super::super::table::Kind;
use super::World;
use crate::harness;

/// Longer than the relay needs to notice a new partition.
const NOTICED: Duration = Duration::from_secs(8);

impl World {
    /// Inserts an event whose topic is missing.
    async fn insert_late(&self, day: &str) {
        let insert = format!(
            "INSERT INTO public.parts (aggregatetype, aggregateid, event_type, payload, day) \
             VALUES ('late', 'late', 'Late', '{{}}', '{day}')"
        );
        self.execute(&insert).await;
    }

    /// Inserts ten rows of one key, one transaction per row.
    async fn insert_on(&mut self, key: &str, day: &str) {
        for _ in 0..10 {
            let insert = format!(
                "INSERT INTO public.parts (aggregatetype, aggregateid, event_type, payload, day) \
                 VALUES ('order', '{key}', 'New', jsonb_build_object('n', {}), '{day}')",
                self.next
            );
            self.next += 1;
            self.execute(&insert).await;
        }
        self.note().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_of_a_partition_that_no_audit_has_covered_are_published_after_a_lost_slot() {
    for mode in ["full", "exceptions"] {
        let mut world = World::new(Kind::Partitioned, 5).await;
        world.more.push(("POSTRIDER_DISPATCH", mode.to_owned()));
        let (mut world, relay) = world.serve(20).await;
        world.insert_late("2020-01-02").await;
        let add = "CREATE TABLE public.added PARTITION OF public.parts \
                   FOR VALUES FROM ('2031-01-01') TO ('2032-01-01')";
        world.execute(add).await;
        world.insert_on("before", "2031-01-02").await;
        world.wait_until_published(&relay).await;
        tokio::time::sleep(NOTICED).await;
        relay.kill_9();
        world.insert_on("down", "2031-01-02").await;
        let detach = "ALTER TABLE public.parts DETACH PARTITION public.added";
        world.execute(detach).await;
        harness::wait_until_killed_relays_are_gone(&world.database, &world.emulator).await;
        world.database.drop_slot().await;
        let relay = world.relay();
        world.wait_until_published(&relay).await;
        relay.stop().await;
    }
}

/// A new partitioned table replaces the captured table. Before an audit ends, a plain table replaces the new table.
#[tokio::test(flavor = "multi_thread")]
async fn rows_of_a_partitioned_table_that_no_audit_has_covered_are_published_after_a_lost_slot() {
    let (mut world, relay) = World::served(Kind::Partitioned, 20).await;
    world.insert_late("2020-01-02").await;
    let replace = |name: &str, partitions: &str| {
        format!(
            "BEGIN; CREATE TABLE public.next (LIKE public.parts INCLUDING ALL) {partitions}; \
             ALTER PUBLICATION postrider ADD TABLE public.next; \
             ALTER TABLE public.parts RENAME TO {name}; ALTER TABLE public.next RENAME TO parts; COMMIT"
        )
    };
    let partitioned =
        "PARTITION BY RANGE (day); CREATE TABLE public.leaf PARTITION OF public.next DEFAULT";
    world.execute(&replace("first", partitioned)).await;
    world.insert_on("before", "2031-01-02").await;
    world.wait_until_published(&relay).await;
    tokio::time::sleep(NOTICED).await;
    relay.kill_9();
    world.insert_on("down", "2031-01-02").await;
    world.execute(&replace("second", "")).await;
    harness::wait_until_killed_relays_are_gone(&world.database, &world.emulator).await;
    world.database.drop_slot().await;
    let relay = world.relay();
    world.wait_until_published(&relay).await;
    relay.stop().await;
}
