//! Tests of the event ids, which subscribers use to deduplicate.

use std::collections::HashSet;

use super::World;
use crate::mapping::{Subscriber, attributes};

const TABLES: &str = "\
    CREATE TABLE a (id bigserial PRIMARY KEY, aggregatetype text, aggregateid text, \
        event_type text, payload jsonb); \
    CREATE TABLE b (LIKE a INCLUDING ALL); \
    ALTER TABLE b ALTER COLUMN id SET DEFAULT nextval('a_id_seq') - 100; \
    CREATE TABLE c (id text PRIMARY KEY, aggregatetype text, aggregateid text, \
        event_type text, payload jsonb)";

const SETTINGS: &str = "\
    [[tables]]\ntable = 'public.a'\ntopic = 'numbers'\n\
    [[tables]]\ntable = 'public.b'\ntopic = 'numbers'\n\
    [[tables]]\ntable = 'public.c'\ntopic = 'numbers'\n";

fn insert(ids: &[i64]) -> String {
    let insert = |table: &str, id: &i64| {
        format!("INSERT INTO {table} VALUES ('{id}', 'order', 'o-1', 'Happened', '{{}}'); ")
    };
    ids.iter()
        .map(|id| insert("a", id) + &insert("b", id) + &insert("c", id))
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_id_has_a_stable_and_distinct_event_id_in_each_table() {
    let world = World::start(TABLES, &["a", "b", "c"], SETTINGS).await;
    let mut numbers = Subscriber::new(&world.emulator, "numbers").await;
    let relay = world.run();
    relay.wait_for_log("streaming").await;
    world.database.execute(&insert(&[1, 2])).await;
    world.wait_until_recorded(6).await;
    world.lose_the_slot(relay).await;
    world.database.execute(&insert(&[3, 4])).await;
    let relay = world.run();
    world.wait_until_recorded(12).await;
    let messages = numbers.take(12).await;
    let mut event_ids = HashSet::new();
    for message in &messages {
        let attributes = attributes(message);
        assert!(["1", "2", "3", "4"].contains(&attributes["source_id"]));
        event_ids.insert(attributes["event_id"].to_owned());
    }
    assert_eq!(event_ids.len(), 12, "{event_ids:?}\n{}", relay.log());
    for table in ["a", "b", "c"] {
        for id in 1..=4 {
            let known_as = format!("SELECT outbox.event_uuid('public.{table}', '{id}')::text");
            let known_as = world.database.text(&known_as).await;
            assert!(event_ids.contains(&known_as), "{table} {id}");
        }
    }
    let recorded = world
        .database
        .text("SELECT string_agg(event_id::text, ',') FROM outbox.dispatch")
        .await;
    assert!(recorded.split(',').all(|id| event_ids.contains(id)));
}
