//! Tests with names and ids that contain text which would run as SQL if the program forgot to quote it.

use std::io::Write;
use std::process::ExitStatus;

use pubsub_emulator::{Action, Fault, RunningEmulator};
use tempfile::NamedTempFile;

use crate::harness::{self, Database, Relay, eventually, postrider};

/// A name that ends an SQL string, an identifier and a statement, and begins a comment.
const EVIL: &str = r#"a'b"c; DROP TABLE public.innocent; -- $$ \ , "#;

/// Each id breaks SQL in a different way if it is not quoted correctly. Some ids do so only on servers where
/// a backslash escapes the next character. There, a condition with the third id would match every row.
const EVIL_IDS: [&str; 5] = [
    r"a\' or '1'='1",
    "x'; --",
    r"b\' or true --",
    r"c\",
    r#"d"; DROP TABLE public.innocent; -- $$"#,
];

fn quoted(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

fn literal(text: &str) -> String {
    format!("'{}'", text.replace('\'', "''"))
}

/// A settings file in which the table, its columns and the publication have names that contain SQL.
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

/// A database in which the names of the schema, the table, the columns, the role and the
/// publication contain SQL.
struct World {
    database: Database,
    emulator: RunningEmulator,
    host: String,
    /// The captured table, quoted for SQL.
    table: String,
    settings: NamedTempFile,
    /// The URL for the relay's own role.
    url: String,
}

impl World {
    /// Prepares the database with `postrider init --apply`. `id` is the type and the constraints of
    /// the table's first column.
    async fn start(id: &str) -> Self {
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
                 CREATE TABLE {table} (\"I;\" {id}, \
                     \"T\"\"\" text, \"A '\" text, \"E--\" text, \"P$$\" text); \
                 CREATE ROLE {role} LOGIN REPLICATION; \
                 GRANT USAGE ON SCHEMA {schema} TO postrider_relay",
                schema = quoted(EVIL)
            ))
            .await;
        let user = EVIL
            .bytes()
            .map(|b| format!("%{b:02X}"))
            .collect::<String>();
        let world = Self {
            url: database.url.replace("postgres@", &format!("{user}@")),
            host: emulator.addr().to_string(),
            settings: settings_file(&table),
            database,
            emulator,
            table,
        };
        let init = ["init", "--apply", "--relay-user", EVIL];
        let (status, text) = world.run(&init, &world.database.url);
        assert!(status.success(), "{text}");
        world
    }

    /// Runs a command and returns its exit status, and its stdout followed by its stderr.
    fn run(&self, arguments: &[&str], url: &str) -> (ExitStatus, String) {
        let config = self.settings.path().display().to_string();
        let environment = [
            ("DATABASE_URL", url),
            ("POSTRIDER_CONFIG", config.as_str()),
            ("POSTRIDER_SLOT", "evil"),
            ("PUBSUB_EMULATOR_HOST", self.host.as_str()),
            ("PUBSUB_PROJECT_ID", "demo"),
        ];
        let done = postrider(arguments, &environment).output().unwrap();
        let text = [done.stdout, done.stderr].concat();
        (done.status, String::from_utf8_lossy(&text).into_owned())
    }

    /// Starts a relay under its own role.
    fn relay(&self) -> Relay {
        let config = self.settings.path().display().to_string();
        let environment = [
            ("DATABASE_URL", self.url.as_str()),
            ("POSTRIDER_CONFIG", config.as_str()),
            ("POSTRIDER_SLOT", "evil"),
        ];
        Relay::start_with(&self.database, &self.host, &environment)
    }

    /// Inserts a row for each id, all with the same key, in one transaction.
    async fn insert(&self, ids: &[String]) {
        let evil = literal(EVIL);
        let rows: Vec<String> = ids
            .iter()
            .map(|id| format!("({}, {evil}, {evil}, {evil}, {evil})", literal(id)))
            .collect();
        self.database
            .execute(&format!(
                "INSERT INTO {} (\"I;\", \"T\"\"\", \"A '\", \"E--\", \"P$$\") VALUES {}",
                self.table,
                rows.join(", ")
            ))
            .await;
    }

    /// Waits until exactly `count` rows of the table have a dispatch row in `state`. The ids of the
    /// table must be texts.
    async fn wait_for_state(&self, state: &str, count: usize) {
        let sql = format!(
            "SELECT count(*) FROM outbox.dispatch d JOIN {} e \
                 ON d.event_id = outbox.event_uuid({}, e.\"I;\", e.inserted_xid) \
             WHERE d.state = '{state}' AND d.ordering_key = {}",
            self.table,
            literal(&format!("{EVIL}.{EVIL} Events")),
            literal(EVIL)
        );
        eventually(&format!("{count} events are {state}"), || async {
            (self.database.number(&sql).await == count as i64).then_some(())
        })
        .await;
    }

    /// Lets `write` insert rows while the publication does not contain the table, and waits until the
    /// relay logs the gap.
    async fn the_audit_fills_a_gap(&self, relay: &Relay, write: impl AsyncFnOnce()) {
        self.database.wait_until_audited().await;
        let alter = |how| {
            let (publication, table) = (quoted(EVIL), &self.table);
            format!("ALTER PUBLICATION {publication} {how} TABLE {table}")
        };
        self.database.execute(&alter("DROP")).await;
        write().await;
        self.database.execute(&alter("ADD")).await;
        relay.wait_for_log("publication-gap").await;
    }

    /// The `event_id` under which subscribers know a row whose id is not a uuid.
    async fn event_id(&self, id: &str) -> String {
        let table = literal(&format!("{EVIL}.{EVIL} Events"));
        let sql = format!(
            "SELECT outbox.event_uuid({table}, e.\"I;\", e.inserted_xid)::text FROM {} e \
             WHERE e.\"I;\" = {}",
            self.table,
            literal(id)
        );
        self.database.text(&sql).await
    }

    /// The event ids of all stored messages, in the order in which the emulator stored them.
    fn published(&self) -> Vec<String> {
        let attempts = self.emulator.journal().attempts();
        let stored = attempts.iter().filter(|attempt| attempt.is_stored());
        stored
            .flat_map(|attempt| attempt.event_ids.iter().flatten())
            .map(|id| id.to_string())
            .collect()
    }

    async fn assert_nothing_was_run_as_sql(&self) {
        let innocent = "SELECT count(*) FROM pg_class WHERE relname = 'innocent'";
        assert_eq!(
            self.database.number(innocent).await,
            1,
            "a name was run as SQL"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn names_with_quotes_semicolons_and_comments_are_quoted_everywhere() {
    let world = World::start("uuid PRIMARY KEY DEFAULT gen_random_uuid()").await;
    let World {
        database, table, ..
    } = &world;
    let relay = world.relay();
    let insert = format!(
        "INSERT INTO {table} (\"T\"\"\", \"A '\", \"E--\", \"P$$\") \
         SELECT {evil}, {evil}, {evil}, {evil} FROM generate_series(1, 20)",
        evil = literal(EVIL)
    );
    database.execute(&insert).await;
    let recorded = format!(
        "SELECT count(*) FROM outbox.dispatch d JOIN {table} e ON d.event_id = e.\"I;\" \
         WHERE d.ordering_key = {}",
        literal(EVIL)
    );
    let is_recorded = async |count| {
        eventually(
            &format!("{count} events are recorded\n{}", relay.log()),
            || async { (database.number(&recorded).await == count).then_some(()) },
        )
        .await;
    };
    is_recorded(20).await;
    world
        .the_audit_fills_a_gap(&relay, async || database.execute(&insert).await)
        .await;
    is_recorded(40).await;
    assert_eq!(world.published().len(), 40, "each once");
    assert_every_audit_ended(&relay);

    for arguments in [&["check"][..], &["slot", "show"], &["slot", "list"]] {
        let (status, text) = world.run(arguments, &world.url);
        // Allow warnings, but no failed statement.
        assert!(status.code() < Some(2), "{arguments:?} {status}:\n{text}");
    }
    relay.stop().await;
    world.assert_nothing_was_run_as_sql().await;
}

fn assert_every_audit_ended(relay: &Relay) {
    let log = relay.log();
    assert!(!log.contains("cannot compare the tables"), "{log}");
}

/// Publishes events with the ids in `EVIL_IDS` from the stream, from the table after a lost slot, from
/// quarantine, and from a gap of the publication. Checks that each event is published once and in
/// order, and that no other event is published.
async fn evil_ids_are_streamed_recovered_and_released(world: &World) {
    let [streamed, recovered, released, audited] =
        ["one", "two", "three", "four"].map(|part| EVIL_IDS.map(|id| format!("{part} {id}")));
    let each = EVIL_IDS.len();
    let relay = world.relay();
    relay.wait_for_log("streaming").await;
    world.insert(&streamed).await;
    world.wait_for_state("published", each).await;
    relay.stop().await;

    eventually("the slot is free and dropped", || async {
        let drop = "SELECT pg_drop_replication_slot('evil')";
        world.database.client.batch_execute(drop).await.ok()
    })
    .await;
    world.insert(&recovered).await;
    let (status, text) = world.run(&["recover", "--dry-run"], &world.url);
    assert!(status.success(), "{text}");
    let shows = |id: &String| text.contains(id.as_str());
    assert!(recovered.iter().all(shows), "{text}");
    assert!(!streamed.iter().any(shows), "{text}");
    let relay = world.relay();
    relay.wait_for_log("recovered").await;
    world.wait_for_state("published", 2 * each).await;

    // Read the event ids before the commit, so that the emulator refuses the events from their
    // first attempt on.
    world.database.execute("BEGIN").await;
    world.insert(&released).await;
    for id in &released {
        let event_id = world.event_id(id).await;
        let poison = Fault::new(Action::Poison { event_id });
        world.emulator.faults().inject(poison);
    }
    world.database.execute("COMMIT").await;
    world.wait_for_state("quarantined", each).await;
    world.emulator.faults().lift_all();
    let first = format!("{EVIL}.{EVIL} Events:{}", released[0]);
    for arguments in [
        &["quarantine", "list"][..],
        &["quarantine", "show", first.as_str()],
        &["quarantine", "release", first.as_str()],
    ] {
        let (status, text) = world.run(arguments, &world.url);
        assert!(status.success(), "{arguments:?} {status}:\n{text}");
    }
    world.wait_for_state("published", 3 * each).await;

    world
        .the_audit_fills_a_gap(&relay, async || world.insert(&audited).await)
        .await;
    world.wait_for_state("published", 4 * each).await;
    let mut expected = Vec::new();
    for id in [streamed, recovered, released, audited].concat() {
        expected.push(world.event_id(&id).await);
    }
    assert_eq!(world.published(), expected, "{}", relay.log());
    assert_every_audit_ended(&relay);
    relay.stop().await;
    world.assert_nothing_was_run_as_sql().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn ids_and_names_that_look_like_sql_are_recovered_and_released_unchanged() {
    let world = World::start("text PRIMARY KEY").await;
    evil_ids_are_streamed_recovered_and_released(&world).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn ids_and_names_keep_their_meaning_where_backslashes_escape() {
    let world = World::start("text PRIMARY KEY").await;
    let World { database, .. } = &world;
    // Connect again, because the setting applies only to sessions that begin from now on.
    database
        .execute("ALTER DATABASE postgres SET standard_conforming_strings = off")
        .await;
    let later = harness::connect(&database.url).await;
    let row = later
        .query_one("SHOW standard_conforming_strings", &[])
        .await
        .unwrap();
    assert_eq!(row.get::<_, &str>(0), "off");
    evil_ids_are_streamed_recovered_and_released(&world).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slot_name_that_postgresql_would_refuse_is_never_sent() {
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
