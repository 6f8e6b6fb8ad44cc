//! Tests of ids, keys, versions and times (`occurred_at`) with types that are rarely used for these columns.

use super::World;

/// A type, and four of its values as text.
const TYPES: [(&str, [&str; 4]); 22] = [
    ("json", ["1", "2", "3", "4"]),
    ("jsonb", ["{\"a\": 1}", "[2]", "3", "null"]),
    ("point", ["(1,1)", "(2,1)", "(3,1)", "(4,1)"]),
    (
        "box",
        ["(1,1),(0,0)", "(2,1),(0,0)", "(3,1),(0,0)", "(1,3),(0,0)"],
    ),
    ("int[]", ["{1}", "{1,2}", "{}", "{NULL}"]),
    ("json[]", ["{1}", "{2}", "{3}", "{4}"]),
    ("colour", ["red", "green", "blue", "grey"]),
    ("pair", ["(1,a)", "(2,a)", "(3,\"b c\")", "(4,)"]),
    ("odd_pair", ["(1,1)", "(2,1)", "(3,1)", "(4,1)"]),
    ("numeric", ["1.0", "2.00", "3", "NaN"]),
    ("float8", ["0.1", "1e300", "-0", "Infinity"]),
    ("bit(4)", ["0001", "0010", "0011", "0100"]),
    ("varbit", ["1", "10", "11", "100"]),
    ("inet", ["10.0.0.1", "10.0.0.2/8", "::1", "10.0.0.3"]),
    ("money", ["1", "2", "3", "4"]),
    ("int4range", ["[1,2)", "[2,3)", "empty", "[4,)"]),
    ("boolean_domain", ["t", "f", "t", "f"]),
    (
        "timestamptz",
        [
            "2026-03-29 02:30:00+01",
            "infinity",
            "0044-03-15 12:00:00 BC",
            "294276-01-01",
        ],
    ),
    ("char(4)", ["a", "b", "c", "d"]),
    ("xid", ["1", "2", "3", "4"]),
    ("interval", ["1 day", "24 hours", "-1 mon", "1:02:03"]),
    // Keep `xml` at the end. The test leaves out the last type if the server was built without libxml.
    ("xml", ["<a/>", "<b>2</b>", "three", "<d e=\"4\"/>"]),
];

const NAMED: &str = "\
    CREATE TYPE colour AS ENUM ('red', 'green', 'blue', 'grey'); \
    CREATE TYPE pair AS (a int, b text); CREATE TYPE odd_pair AS (a int, b json); \
    CREATE DOMAIN boolean_domain AS bool; ";

#[tokio::test(flavor = "multi_thread")]
async fn ids_and_keys_of_any_type_are_streamed_audited_recovered_and_checked() {
    let mut tables = NAMED.to_owned();
    let mut toml = String::new();
    let mut names = Vec::new();
    for (n, (of, _)) in TYPES.iter().enumerate() {
        let is_id = *of != "boolean_domain";
        let id = if is_id {
            of
        } else {
            &"uuid DEFAULT gen_random_uuid()"
        };
        tables += &format!(
            "CREATE TABLE t{n} (id {id}, aggregatetype text, aggregateid {of}, event_type text, \
             payload jsonb, version {of}, occurred_at {of}); "
        );
        toml += &format!("[[tables]]\ntable = 'public.t{n}'\ntopic = 'types'\n");
        names.push(format!("t{n}"));
    }
    let captured: Vec<&str> = names.iter().map(String::as_str).collect();
    let world = World::start(&tables, &captured, &toml).await;
    let reads_xml = world.database.client.execute("SELECT xml '<a/>'", &[]);
    let types = match reads_xml.await {
        Ok(_) => &TYPES[..],
        Err(_) => &TYPES[..TYPES.len() - 1],
    };
    let insert = |which: [usize; 2]| -> String {
        let mut sql = String::new();
        for (n, (of, values)) in types.iter().enumerate() {
            for value in which.map(|i| values[i]) {
                let is_id = *of != "boolean_domain";
                let id = if is_id {
                    format!("'{value}'")
                } else {
                    "DEFAULT".to_owned()
                };
                let value = value.replace('\'', "''");
                sql += &format!(
                    "INSERT INTO t{n} VALUES ({id}, 'order', '{value}', 'A', '{{}}', '{value}', '{value}'); "
                );
            }
        }
        sql
    };
    let relay = world.run();
    relay.wait_for_log("streaming").await;
    world.database.execute(&insert([0, 1])).await;
    let each = 2 * types.len() as i64;
    world.wait_until_recorded(each).await;
    let (found, status) = world.command(&["check"]);
    assert!(matches!(status, Some(0 | 1)), "{found}");
    assert!(!found.contains("events-not-sampled"), "{found}");
    world.lose_the_slot(relay).await;
    world.database.execute(&insert([2, 3])).await;
    let (found, _) = world.command(&["recover", "--dry-run"]);
    assert_eq!(found.matches("2 rows").count(), types.len(), "{found}");
    let relay = world.run();
    world.wait_until_recorded(2 * each).await;
    world.database.wait_until_audited().await;
    let stored = world.emulator.journal().counts().stored_messages;
    assert_eq!(stored, 2 * each as u64, "{}", relay.log());
    each_row_is_known_by_its_text(&world, types).await;
    // Release all events. The relay must find their rows by their ids.
    relay.stop().await;
    world
        .database
        .execute("UPDATE outbox.dispatch SET state = 'released', message_id = NULL")
        .await;
    let relay = world.run();
    world.wait_until_recorded(2 * each).await;
    let stored = world.emulator.journal().counts().stored_messages;
    assert_eq!(stored, 4 * each as u64, "{}", relay.log());
}

/// Checks that each row is recorded under the text form that its id has in the stream, whether the
/// row came from the stream or from the table.
async fn each_row_is_known_by_its_text(world: &World, types: &[(&str, [&str; 4])]) {
    for (n, (of, _)) in types
        .iter()
        .enumerate()
        .filter(|(_, t)| t.0 != "boolean_domain")
    {
        let known = format!(
            "SELECT count(*) FROM t{n} e JOIN outbox.dispatch d \
             ON d.event_id = outbox.event_uuid('public.t{n}', format('%s', e.id)) \
             AND d.source_id = 'public.t{n}:' || format('%s', e.id)"
        );
        assert_eq!(world.database.number(&known).await, 4, "{of}");
    }
}
