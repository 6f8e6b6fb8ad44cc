//! Names that would be SQL if somebody forgot to quote them.

use std::io::Write;

use tempfile::NamedTempFile;

use crate::harness::{self, Database, Relay, eventually, postrider};

/// Ends a string, an identifier and a statement, and begins a comment.
const EVIL: &str = r#"a'b"c; DROP TABLE public.innocent; -- $$ \ , "#;

/// As in SQL.
fn quoted(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

fn literal(text: &str) -> String {
    format!("'{}'", text.replace('\'', "''"))
}

/// A settings file for a table, columns and a publication with such names.
fn settings_file(table: &str) -> NamedTempFile {
    let mut settings = toml::Table::new();
    settings.insert("publication".into(), EVIL.into());
    let mut one = toml::Table::new();
    one.insert("table".into(), table.into());
    one.insert("topic".into(), "evil.events".into());
    let columns = [
        ("id", "I;"),
        ("aggregatetype", "T\""),
        ("aggregateid", "A '"),
        ("event_type", "E--"),
        ("payload", "P$$"),
    ];
    let columns = columns.map(|(role, name)| (role.to_owned(), toml::Value::from(name)));
    one.insert("columns".into(), toml::Table::from_iter(columns).into());
    settings.insert("tables".into(), vec![toml::Value::from(one)].into());
    let mut file = NamedTempFile::new().unwrap();
    file.write_all(settings.to_string().as_bytes()).unwrap();
    file
}

#[tokio::test(flavor = "multi_thread")]
async fn names_with_quotes_semicolons_and_comments_are_names_everywhere() {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    emulator
        .create_topic("projects/demo/topics/evil.events")
        .await
        .unwrap();
    let table = format!("{}.{}", quoted(EVIL), quoted(&format!("{EVIL} Events")));
    let role = quoted(EVIL);
    database
        .execute(&format!(
            "CREATE TABLE public.innocent (); CREATE SCHEMA {schema}; \
             CREATE TABLE {table} (\"I;\" uuid PRIMARY KEY DEFAULT gen_random_uuid(), \
                 \"T\"\"\" text, \"A '\" text, \"E--\" text, \"P$$\" text); \
             CREATE ROLE {role} LOGIN REPLICATION; \
             GRANT USAGE ON SCHEMA {schema} TO postrider_relay",
            schema = quoted(EVIL)
        ))
        .await;
    let file = settings_file(&table);
    let config = file.path().display().to_string();
    let host = emulator.addr().to_string();
    let run = |arguments: &[&str], url: &str| {
        let environment = [
            ("DATABASE_URL", url),
            ("POSTRIDER_CONFIG", &config),
            ("POSTRIDER_SLOT", "evil"),
            ("PUBSUB_EMULATOR_HOST", &host),
            ("PUBSUB_PROJECT_ID", "demo"),
        ];
        let done = postrider(arguments, &environment).output().unwrap();
        let text = [done.stdout, done.stderr].concat();
        (done.status, String::from_utf8_lossy(&text).into_owned())
    };
    let (status, text) = run(&["init", "--apply", "--relay-user", EVIL], &database.url);
    assert!(status.success(), "{text}");

    let user = EVIL
        .bytes()
        .map(|b| format!("%{b:02X}"))
        .collect::<String>();
    let url = database.url.replace("postgres@", &format!("{user}@"));
    let relay = Relay::start_with(
        &database,
        &host,
        &[
            ("DATABASE_URL", &url),
            ("POSTRIDER_CONFIG", &config),
            ("POSTRIDER_SLOT", "evil"),
        ],
    );
    database
        .execute(&format!(
            "INSERT INTO {table} (\"T\"\"\", \"A '\", \"E--\", \"P$$\") \
             SELECT {evil}, {evil}, {evil}, {evil} FROM generate_series(1, 20)",
            evil = literal(EVIL)
        ))
        .await;
    let recorded = format!(
        "SELECT count(*) FROM outbox.dispatch d JOIN {table} e ON d.event_id = e.\"I;\" \
         WHERE d.ordering_key = {}",
        literal(EVIL)
    );
    eventually(
        &format!("every event is recorded\n{}", relay.log()),
        || async { (database.number(&recorded).await == 20).then_some(()) },
    )
    .await;

    for arguments in [&["check"][..], &["slot", "show"], &["slot", "list"]] {
        let (status, text) = run(arguments, &url);
        // Warnings are fine; a statement that fails is not.
        assert!(status.code() < Some(2), "{arguments:?} {status}:\n{text}");
    }
    relay.stop().await;
    assert_eq!(
        database
            .number("SELECT count(*) FROM pg_class WHERE relname = 'innocent'")
            .await,
        1,
        "a name was run as SQL"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slot_name_that_postgresql_would_not_take_never_reaches_it() {
    for name in [
        "Evil",
        "e\"vil",
        "e'vil",
        "e vil",
        "e;vil",
        "é",
        "",
        &"e".repeat(64),
    ] {
        let environment = [
            ("DATABASE_URL", "postgres://x@127.0.0.1:1/x"),
            ("PUBSUB_PROJECT_ID", "demo"),
        ];
        let done = postrider(&["run", "--slot", name], &environment)
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&done.stderr).into_owned();
        assert_eq!(done.status.code(), Some(2), "{name:?}: {text}");
        assert!(text.contains("error[setting-invalid]"), "{name:?}: {text}");
    }
}
