//! Tests that events are released from quarantine regardless of the type of their id, and that the relay
//! calls no cast which the owner of a type has defined.

use super::World;
use crate::harness::eventually;
use crate::mapping::{Subscriber, attributes};

/// For each table: its name, the type of its ids, and an id. The relay must find each row by its id. Two
/// properties make that difficult:
///
/// - The operator `=` of the first four types is in the schema `public`.
/// - The text of a `regclass`, a `regtype` or an enum value changes when its object is renamed.
const IDS: [(&str, &str, &str); 10] = [
    ("a", "ltree", "top.sub"),
    ("b", "hstore", "\"k\"=>\"v\""),
    ("c", "cube", "(1, 2)"),
    ("d", "citext", "Seven"),
    ("e", "isn.ean13", "978-0-393-04002-9"),
    ("f", "regclass", "pg_class"),
    ("g", "regtype", "integer"),
    ("h", "mood", "glad"),
    ("i", "int4range", "[1,5)"),
    ("j", "char(5)", "x"),
];

#[tokio::test(flavor = "multi_thread")]
async fn an_event_is_released_whatever_the_type_of_its_id() {
    let mut tables = "\
        CREATE EXTENSION ltree; CREATE EXTENSION hstore; CREATE EXTENSION cube; \
        CREATE EXTENSION citext; CREATE SCHEMA isn; CREATE EXTENSION isn SCHEMA isn; \
        CREATE TYPE mood AS ENUM ('glad'); CREATE TYPE doc AS (body text); \
        CREATE FUNCTION planted(doc) RETURNS text LANGUAGE plpgsql AS \
            $$BEGIN RAISE EXCEPTION 'planted'; END$$; \
        CREATE CAST (doc AS text) WITH FUNCTION planted(doc);"
        .to_owned();
    let mut toml = String::new();
    for (table, id, _) in IDS {
        tables += &format!(
            "CREATE TABLE {table} (id {id}, aggregatetype text, aggregateid text, \
                 event_type text, payload doc); GRANT SELECT ON {table} TO PUBLIC;"
        );
        toml += &format!(
            "[[tables]]\ntable = 'public.{table}'\ntopic = 'types'\n\
             envelope = 'cloudevents-binary'\n"
        );
    }
    let world = World::start(&tables, &IDS.map(|(table, ..)| table), &toml).await;
    let mut types = Subscriber::new(&world.emulator, "types").await;
    let relay = world.run();
    for (table, _, id) in IDS {
        let insert = format!(
            "INSERT INTO {table} SELECT '{id}', 'order', '{table}', NULL, \
                 row(string_agg(md5(i::text), ''))::doc FROM generate_series(1, 4000) i"
        );
        world.database.execute(&insert).await;
    }
    let quarantined = "SELECT count(*) FROM outbox.dispatch WHERE state = 'quarantined'";
    eventually("all events are in quarantine", || async {
        (world.database.number(quarantined).await == 10).then_some(())
    })
    .await;
    for (table, ..) in IDS {
        let correct = format!("UPDATE {table} SET event_type = 'E'");
        world.database.execute(&correct).await;
    }
    let (said, status) = world.command(&["quarantine", "release", "--all"]);
    assert_eq!(status, Some(0), "{said}");
    eventually("every released event has an outcome", || async {
        let open = "SELECT count(*) FROM outbox.dispatch WHERE state = 'released'";
        (world.database.number(open).await == 0).then_some(())
    })
    .await;
    let errors = "SELECT coalesce(string_agg(error, '; '), '') FROM outbox.dispatch";
    let errors = world.database.text(errors).await;
    assert_eq!(errors, "", "{}", relay.log());
    let mut released = Vec::new();
    for message in types.take(10).await {
        assert!(message.data.len() > 100_000);
        released.push(attributes(&message)["source_id"].to_owned());
    }
    assert!(released.contains(&"x    ".to_owned()), "{released:?}");
}
