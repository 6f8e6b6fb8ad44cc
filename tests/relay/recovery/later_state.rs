//! Tests in which a server is set back to an earlier state, for example by point-in-time recovery. Then somebody
//! restores records of a later state. Their floors name transactions that the server has not reached, so the relay
//! would take new rows for resolved ones. It must refuse such records.

use super::*;
use crate::harness::postrider;

/// The number of transaction ids that the server uses up between the two states.
const IDS: u32 = 3_000;

const RECORDS: [&str; 3] = ["outbox.dispatch", "outbox.relay", "outbox.capture"];

/// A server in an earlier state, and the rows of the relay's tables in a later state.
struct SetBack {
    /// The database of the earlier state. Its slot is gone, as after a point-in-time recovery.
    database: Database,
    emulator: RunningEmulator,
    mode: &'static str,
    /// The rows of the later state, as JSON: the table, and its rows.
    later: Vec<(&'static str, Vec<String>)>,
    _later_server: Database,
}

async fn rows_of(database: &Database, table: &'static str) -> (&'static str, Vec<String>) {
    let statement = format!("SELECT to_jsonb(t)::text FROM {table} t");
    let rows = database.client.query(&statement, &[]).await.unwrap();
    (table, rows.iter().map(|row| row.get(0)).collect())
}

async fn use_up_ids(database: &Database, count: u32) {
    let statement = format!(
        "DO $$ BEGIN FOR i IN 1..{count} LOOP PERFORM pg_current_xact_id(); COMMIT; END LOOP; END $$"
    );
    database.execute(&statement).await;
}

impl SetBack {
    /// Creates both states. In the earlier state, the events 1 to 20 are delivered. In the later state, the events 21
    /// to 40 are delivered too.
    async fn with(mode: &'static str) -> Self {
        let mut database = Database::private().await;
        let emulator = harness::emulator().await;
        let serve = async |database: &Database, first: u32| {
            let relay = start(database, &emulator, mode);
            insert(database, first, 20).await;
            let raised = "SELECT count(*) FROM outbox.capture c WHERE NOT EXISTS ( \
                              SELECT FROM outbox.events e WHERE e.inserted_xid >= c.floor)";
            eventually("the floor is above every row", || async {
                (database.number(raised).await == 1).then_some(())
            })
            .await;
            database.wait_until_confirmed().await;
            relay.stop().await;
        };
        serve(&database, 1).await;
        let stopped = database.server();
        stopped.stop(StopMode::Fast, harness::PATIENCE).unwrap();
        let copy = ScratchPostgres::builder()
            .setting("wal_level", "logical")
            .copy_of(stopped)
            .start()
            .unwrap();
        database.server().start_again().unwrap();
        database.reconnect().await;
        use_up_ids(&database, IDS).await;
        database.execute("SELECT pg_switch_wal()").await;
        serve(&database, 21).await;
        let mut later = Vec::new();
        for table in RECORDS.iter().chain(&["outbox.events"]) {
            later.push(rows_of(&database, table).await);
        }
        let mut earlier = Database::private().await;
        earlier.move_to(copy).await;
        earlier.drop_slot().await;
        Self {
            database: earlier,
            emulator,
            mode,
            later,
            _later_server: database,
        }
    }

    /// Replaces the rows of these tables by the rows of the later state, as a restore of a dump does.
    async fn restore(&self, tables: &[&str]) {
        for (table, rows) in self
            .later
            .iter()
            .filter(|(table, _)| tables.contains(table))
        {
            self.write(table, rows).await;
        }
        self.database
            .execute("SELECT setval('outbox.events_seq_seq', (SELECT max(seq) FROM outbox.events))")
            .await;
    }

    async fn write(&self, table: &str, rows: &[String]) {
        let client = &self.database.client;
        let delete = format!("DELETE FROM {table}");
        client.batch_execute(&delete).await.unwrap();
        let insert = format!(
            "INSERT INTO {table} SELECT * FROM jsonb_populate_record(null::{table}, $1::text::jsonb)"
        );
        for row in rows {
            client.execute(&insert, &[row]).await.unwrap();
        }
    }

    /// Runs a command. Returns its exit status and everything that it prints.
    fn command(&self, arguments: &[&str]) -> (Option<i32>, String) {
        let environment = [
            ("DATABASE_URL", self.database.url.as_str()),
            ("POSTRIDER_SLOT", self.database.slot()),
            ("POSTRIDER_DISPATCH", self.mode),
            ("PUBSUB_PROJECT_ID", "demo"),
        ];
        let ran = postrider(arguments, &environment).output().unwrap();
        let text = [ran.stdout, ran.stderr].map(|text| String::from_utf8(text).unwrap());
        (ran.status.code(), text.concat())
    }

    /// Whether `check` says that a relay would stop because of these records.
    fn is_refused(&self) -> bool {
        let (_, checked) = self.command(&["check", "--json"]);
        let checked: serde_json::Value = serde_json::from_str(&checked).unwrap();
        let stops = checked["run"]["stops"].as_array().unwrap();
        stops.iter().any(|code| code == "foreign-cluster")
    }

    async fn assert_run_refuses(&self) {
        let relay = start(&self.database, &self.emulator, self.mode);
        relay.wait_for_error("foreign-cluster").await;
        assert!(relay.log().contains("recover --adopt"), "{}", relay.log());
        assert_eq!(relay.wait().await.code(), Some(3));
    }
}

fn start(database: &Database, emulator: &RunningEmulator, mode: &str) -> Relay {
    let settings = [("POSTRIDER_DISPATCH", mode)];
    Relay::start_with(database, &emulator.addr().to_string(), &settings)
}

/// Restores the whole schema of the later state, inserts rows whose transactions are below the restored floor, and
/// checks that every view refuses the records until an operator adopts them, and that then no row is lost.
async fn new_rows_below_a_restored_floor_are_published(mode: &'static str) {
    let world = SetBack::with(mode).await;
    let (database, emulator) = (&world.database, &world.emulator);
    world
        .restore(&[&RECORDS[..], &["outbox.events"]].concat())
        .await;
    insert(database, 41, 20).await;
    let below = "SELECT count(*) FROM outbox.events e, outbox.capture c \
                 WHERE e.version > 40 AND e.inserted_xid < c.floor";
    assert_eq!(database.number(below).await, 20);

    world.assert_run_refuses().await;
    assert!(world.is_refused());
    for (arguments, status, text) in [
        (&["status"][..], 2, "FOREIGN CLUSTER"),
        (&["slot", "show"], 2, "a later state of this server"),
        (&["recover", "--dry-run"], 3, "error[foreign-cluster]"),
        (&["recover", "--yes"], 3, "error[foreign-cluster]"),
        (&["audit"], 3, "error[foreign-cluster]"),
        (
            &["prune", "--older-than", "1d", "--yes"],
            3,
            "error[foreign-cluster]",
        ),
    ] {
        let (code, said) = world.command(arguments);
        assert_eq!(code, Some(status), "{arguments:?}: {said}");
        assert!(said.contains(text), "{arguments:?}: {said}");
    }

    // However many transactions the server runs meanwhile, the records stay refused.
    use_up_ids(database, IDS + 500).await;
    world.assert_run_refuses().await;
    let (_, preview) = world.command(&["recover", "--dry-run"]);
    let rows = if mode == "full" { 20 } else { 60 };
    assert!(
        preview.contains(&format!("outbox.events: {rows} rows")),
        "{preview}"
    );
    assert!(
        preview.contains("recovery is needed (foreign-cluster)"),
        "{preview}"
    );
    let (adopted, said) = world.command(&["recover", "--adopt", "--yes"]);
    assert_eq!(adopted, Some(0), "{said}");
    assert!(!world.is_refused());

    let relay = start(database, emulator, mode);
    relay.wait_for_log("recovered").await;
    insert(database, 61, 10).await;
    database.wait_until_confirmed().await;
    let report = eventually("every event is published, in order", || async {
        let report = harness::check(database, emulator).await;
        report.is_clean().then_some(report)
    })
    .await;
    if mode == "full" {
        assert!(report.duplicates.is_empty(), "{report}\n{}", relay.log());
    }
    relay.stop().await;
    let relay = start(database, emulator, mode);
    relay.wait_for_log("streaming").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn new_rows_below_a_restored_floor_are_published_after_an_adoption_and_nothing_is_repeated() {
    new_rows_below_a_restored_floor_are_published("full").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_records_new_rows_below_a_restored_floor_are_published_after_an_adoption() {
    new_rows_below_a_restored_floor_are_published("exceptions").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn records_of_a_later_state_are_refused_whichever_of_them_were_restored() {
    let world = SetBack::with("full").await;
    let database = &world.database;
    let mut earlier = Vec::new();
    for table in RECORDS {
        earlier.push(rows_of(database, table).await);
    }
    assert!(!world.is_refused(), "nothing was restored");
    let floors = "SELECT floor::text FROM outbox.capture";
    let floor = database.text(floors).await;
    for (tables, change, is_refused) in [
        (&RECORDS[..], "", true),
        (&["outbox.capture"], "", true),
        // The events of the later state are at positions that the WAL of this server has not reached.
        (&["outbox.dispatch"], "", true),
        // With the floor of the earlier state, no value of the restored record is too high.
        (
            &["outbox.capture"],
            "UPDATE outbox.capture SET floor = 'FLOOR'",
            false,
        ),
        // In each of the next four cases, one value names a transaction that this server has not reached.
        (
            &["outbox.capture"],
            "UPDATE outbox.capture SET floor = '0', recorded_from = '4000'",
            true,
        ),
        (
            &["outbox.capture"],
            "UPDATE outbox.capture SET floor = '0', unread = '{\"1\": 4000}'",
            true,
        ),
        (
            &["outbox.capture"],
            "UPDATE outbox.capture SET floor = '0', since = '4000:4000:'",
            true,
        ),
        (
            &[],
            "UPDATE outbox.relay SET recovering = 'requested', recovery_lsn = '0/1', \
                 recovery_snapshot = '4000:4000:'",
            true,
        ),
        // The records of the earlier state, written again: a restore on a server that was not set back.
        (&[], "", false),
    ] {
        for (table, rows) in &earlier {
            world.write(table, rows).await;
        }
        world.restore(tables).await;
        database.execute(&change.replace("FLOOR", &floor)).await;
        assert_eq!(world.is_refused(), is_refused, "{tables:?} {change}");
    }

    // A point-in-time recovery without any restore: the relay recovers, and loses and repeats nothing.
    insert(database, 41, 20).await;
    let relay = start(database, &world.emulator, "full");
    relay.wait_for_log("recovered").await;
    database.wait_until_recorded().await;
    assert_eq!(recorded(database).await, 40, "{}", relay.log());
}

/// A long transaction, such as a migration, updates a capture record that is newer than the transaction. So `since` of
/// this record has a higher `xmax` than the id of the writing transaction. The relay must accept the record.
#[tokio::test(flavor = "multi_thread")]
async fn a_long_transaction_that_writes_a_newer_record_stops_no_relay() {
    let (database, emulator) = served_by(Database::private().await).await;
    database
        .execute(
            "CREATE TABLE public.later (LIKE outbox.events INCLUDING ALL); \
             ALTER PUBLICATION postrider ADD TABLE public.later",
        )
        .await;
    let (long, connection) = tokio_postgres::connect(&database.url, tokio_postgres::NoTls)
        .await
        .unwrap();
    tokio::spawn(connection);
    long.batch_execute("BEGIN; SELECT pg_current_xact_id()")
        .await
        .unwrap();
    use_up_ids(&database, 20).await;
    let mut file = tempfile::NamedTempFile::with_suffix(".toml").unwrap();
    let tables = "[[tables]]\ntable = \"outbox.events\"\n[[tables]]\ntable = \"public.later\"\n";
    std::io::Write::write_all(&mut file, tables.as_bytes()).unwrap();
    let path = file.path().display().to_string();
    let run = || {
        let settings = [("POSTRIDER_CONFIG", path.as_str())];
        Relay::start_with(&database, &emulator.addr().to_string(), &settings)
    };
    let relay = run();
    relay.wait_for_log("streaming").await;
    relay.stop().await;
    let changed = long
        .execute(
            "UPDATE outbox.capture SET added_xids = added_xids WHERE table_name = 'later' \
             AND pg_snapshot_xmax(since)::text::bigint > pg_current_xact_id()::text::bigint",
            &[],
        )
        .await;
    assert_eq!(changed.unwrap(), 1);
    long.batch_execute("COMMIT").await.unwrap();
    run().wait_for_log("streaming").await;
}
