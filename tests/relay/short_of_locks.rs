//! Tests a server that has no room for more locks. The server then reports the same SQLSTATE as for a value that
//! needs too much memory. The relay must not mistake this error for a bad event, and must quarantine nothing.

use pubsub_emulator::{Action, Code, Fault};
use scratch_postgres::ScratchPostgres;
use tempfile::NamedTempFile;

use crate::harness::{self, Database, Relay, eventually};

const PARTITIONS: u32 = 120;
const ROWS: i64 = 300;

/// The captured table. [`create_tables`] creates its partitions.
const TABLES: &str = "\
    CREATE TABLE public.parts (id uuid NOT NULL DEFAULT gen_random_uuid(), aggregatetype text, \
        aggregateid text, event_type text, payload jsonb, n int NOT NULL) PARTITION BY LIST (n);";

/// Locks tables until the server has no room for another lock.
const LOCK_ALL: &str = "\
    DO $$ BEGIN FOR i IN 1..3000 LOOP \
        BEGIN EXECUTE format('LOCK TABLE public.held_%s IN ACCESS SHARE MODE', i); \
        EXCEPTION WHEN out_of_memory THEN EXIT; END; \
    END LOOP; END $$";

/// Creates the captured table with its partitions, and tables on which another session can hold locks.
/// Commits after each statement, because the server has no room for so many locks in one transaction.
async fn create_tables(url: &str) {
    let client = harness::connect(url).await;
    client.batch_execute(TABLES).await.unwrap();
    let repeated = [
        (
            PARTITIONS,
            "CREATE TABLE public.parts_%1$s PARTITION OF public.parts FOR VALUES IN (%1$s)",
        ),
        (3_000, "CREATE TABLE public.held_%1$s ()"),
    ];
    for (count, statement) in repeated {
        let sql = format!(
            "DO $$ BEGIN FOR i IN 1..{count} LOOP \
             EXECUTE format('{statement}', i); COMMIT; END LOOP; END $$"
        );
        client.batch_execute(&sql).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_without_room_for_locks_puts_no_event_into_quarantine() {
    let server = ScratchPostgres::builder()
        .setting("wal_level", "logical")
        .setting("max_locks_per_transaction", "10")
        .setting("max_connections", "30");
    let server = server.start().unwrap();
    let url = server.socket_url("postgres");
    create_tables(&url).await;
    let settings = NamedTempFile::new().unwrap();
    std::fs::write(settings.path(), "[[tables]]\ntable = \"public.parts\"\n").unwrap();
    let path = settings.path().display().to_string();
    let database = Database::on_with(server, &[("POSTRIDER_CONFIG", &path)]).await;
    let emulator = harness::emulator().await;
    let host = emulator.addr().to_string();
    let more = [
        ("POSTRIDER_CONFIG", path.as_str()),
        ("POSTRIDER_IN_FLIGHT_MIB", "1"),
    ];
    let relay = Relay::start_with(&database, &host, &more);
    relay.wait_for_log("streaming").await;
    relay.stop().await;
    database
        .execute(&format!(
            "INSERT INTO public.parts (aggregatetype, aggregateid, event_type, payload, n) \
             SELECT 'order', 'key-' || i, 'New', jsonb_build_object('text', \
                 (SELECT string_agg(md5(i || '-' || j), '') FROM generate_series(1, 2000) j)), \
                 1 + i % {PARTITIONS} \
             FROM generate_series(1, {ROWS}) i"
        ))
        .await;
    database.drop_slot().await;

    // An outage of Pub/Sub stops the recovery in the middle of the table, once unpublished rows fill the memory
    // budget. The recovery has to read the other rows after the outage, when the server has no room for locks.
    let outage = emulator
        .faults()
        .inject(Fault::new(Action::Fail(Code::Unavailable)));
    let relay = Relay::start_with(&database, &host, &more);
    eventually("the relay tries to publish", || async {
        (!emulator.journal().attempts().is_empty()).then_some(())
    })
    .await;
    let holder = harness::connect(&url).await;
    holder.batch_execute("BEGIN").await.unwrap();
    holder.batch_execute(LOCK_ALL).await.unwrap();
    emulator.faults().lift(outage);
    relay.wait_for_log("out of shared memory").await;
    holder.batch_execute("ROLLBACK").await.unwrap();
    eventually("every event has an outcome", || async {
        let recorded = "SELECT count(DISTINCT event_id) FROM outbox.dispatch";
        (database.number(recorded).await == ROWS).then_some(())
    })
    .await;
    let aside = "SELECT count(*) FROM outbox.dispatch WHERE state <> 'published'";
    assert_eq!(database.number(aside).await, 0, "{}", relay.log());
    relay.stop().await;
}
