//! Tests in which other tables inherit from a captured table (`INHERITS`). The relay must refuse such a
//! captured table, because it would never deliver the rows of the other tables. A query of the captured
//! table returns these rows too, but the stream contains them under the names of the other tables.
//! TimescaleDB stores the rows of a hypertable in such tables, its chunks.

use std::process::Output;

use crate::harness::{self, Database, Relay, eventually, postrider};

const CREATE: &str = "CREATE TABLE public.boxed (id uuid DEFAULT gen_random_uuid(), \
    aggregatetype text, aggregateid text, event_type text, payload jsonb)";
const CHILD: &str = "CREATE TABLE public.child () INHERITS (public.boxed)";
/// A hypertable with one chunk, as TimescaleDB creates it.
const HYPERTABLE: &str = "\
    CREATE SCHEMA _timescaledb_internal; \
    CREATE FUNCTION _timescaledb_internal.insert_blocker() RETURNS trigger LANGUAGE plpgsql \
        AS 'BEGIN RAISE EXCEPTION ''invalid INSERT on the root table''; END'; \
    CREATE TRIGGER ts_insert_blocker BEFORE INSERT ON public.boxed FOR EACH ROW \
        EXECUTE FUNCTION _timescaledb_internal.insert_blocker(); \
    CREATE TABLE _timescaledb_internal._hyper_1_1_chunk () INHERITS (public.boxed)";
/// A hypertable that has no chunk yet.
const EMPTY_HYPERTABLE: &str = "\
    CREATE FUNCTION public.insert_blocker() RETURNS trigger LANGUAGE plpgsql \
        AS 'BEGIN RAISE EXCEPTION ''invalid INSERT on the root table''; END'; \
    CREATE TRIGGER ts_insert_blocker BEFORE INSERT ON public.boxed FOR EACH ROW \
        EXECUTE FUNCTION public.insert_blocker()";

/// The settings of a relay that captures `public.boxed` through a slot of its own.
const SETTINGS: [(&str, &str); 5] = [
    ("POSTRIDER_TABLE", "public.boxed"),
    ("POSTRIDER_SLOT", "boxed"),
    ("POSTRIDER_PUBLICATION", "boxed"),
    ("PUBSUB_PROJECT_ID", "demo"),
    ("POSTRIDER_HTTP_ADDR", "off"),
];

fn run(database: &Database, host: &str, arguments: &[&str]) -> Output {
    let mut environment = SETTINGS.to_vec();
    environment.push(("DATABASE_URL", &database.url));
    environment.push(("PUBSUB_EMULATOR_HOST", host));
    postrider(arguments, &environment).output().unwrap()
}

fn said(output: &Output) -> String {
    let texts = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    texts.concat()
}

async fn slots(database: &Database) -> i64 {
    let sql = "SELECT count(*) FROM pg_replication_slots WHERE slot_name = 'boxed'";
    database.number(sql).await
}

async fn refused_before_the_start(children: &str) {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    let host = emulator.addr().to_string();
    database.execute(CREATE).await;
    database.execute(children).await;
    for command in [&["init", "--apply"][..], &["check"], &["run"]] {
        let refused = run(&database, &host, command);
        let said = said(&refused);
        assert!(!refused.status.success(), "{command:?}: {said}");
        assert!(said.contains("publication-drift"), "{command:?}: {said}");
        assert!(said.contains("inherit from it"), "{command:?}: {said}");
    }
    assert_eq!(slots(&database).await, 0, "no slot retains WAL for nothing");
}

#[tokio::test(flavor = "multi_thread")]
async fn init_check_and_run_refuse_a_table_from_which_another_table_inherits() {
    refused_before_the_start(CHILD).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn init_check_and_run_refuse_a_hypertable_whose_chunks_inherit_from_it() {
    refused_before_the_start(HYPERTABLE).await;
    refused_before_the_start(EMPTY_HYPERTABLE).await;
}

/// While another table inherits from the captured table, the running relay reports this in its log, and a
/// second relay refuses to start. Once the other table is dropped, both inserted rows are published.
#[tokio::test(flavor = "multi_thread")]
async fn a_table_or_chunk_that_begins_to_inherit_under_a_running_relay_is_noticed() {
    let database = Database::private().await;
    let emulator = harness::emulator().await;
    let host = emulator.addr().to_string();
    database.execute(CREATE).await;
    let prepared = run(&database, &host, &["init", "--apply"]);
    assert!(prepared.status.success(), "{}", said(&prepared));
    let relay = Relay::start_with(&database, &host, &SETTINGS);
    relay.wait_for_log("streaming").await;
    database.execute(CHILD).await;
    relay.wait_for_log("inherit from it").await;
    let insert = |table: &str| {
        format!(
            "INSERT INTO public.{table} (aggregatetype, aggregateid, event_type, payload) \
             VALUES ('order', 'o-1', 'OrderPlaced', '{{}}')"
        )
    };
    database.execute(&insert("boxed")).await;
    let second = Relay::start_with(&database, &host, &SETTINGS);
    second.wait_for_error("publication-drift").await;
    assert_eq!(second.wait().await.code(), Some(3));
    database.execute("DROP TABLE public.child").await;
    database.execute(&insert("boxed")).await;
    eventually("the rows of the table are published", || async {
        (emulator.journal().counts().stored_messages == 2).then_some(())
    })
    .await;
    relay.stop().await;
}
