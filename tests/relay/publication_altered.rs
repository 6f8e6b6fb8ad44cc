//! Tests in which the publication is altered, or a table is altered while the relay reads its rows.

use std::time::Duration;

use pubsub_emulator::{Action, Fault};
use tonic::Code;

use crate::harness::{self, Database, Relay, eventually, insert_orders};
use crate::mapping::settings;

const OUT: &str = "ALTER PUBLICATION postrider DROP TABLE outbox.events";
const IN: &str = "ALTER PUBLICATION postrider ADD TABLE outbox.events";

/// SQL that inserts one event for each key.
fn insert(keys: &[&str]) -> String {
    let row = |key: &&str| format!("('order', '{key}', 'OrderPlaced')");
    let rows: Vec<String> = keys.iter().map(row).collect();
    format!(
        "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type) VALUES {}",
        rows.join(", ")
    )
}

async fn recorded(database: &Database, count: i64) {
    eventually("the events are recorded", || async {
        let records = "SELECT count(*) FROM outbox.dispatch";
        (database.number(records).await == count).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_filter_prevents_a_start_and_the_rows_it_left_out_are_delivered_later() {
    let database = Database::start().await;
    let version = "SELECT current_setting('server_version_num')::bigint";
    if database.number(version).await < 150_000 {
        eprintln!("SKIPPED row filters: they need PostgreSQL 15");
        return;
    }
    let emulator = harness::emulator().await;
    let relay = Relay::start(&database, &emulator);
    relay.wait_for_log("streaming").await;
    let filter = "WHERE (aggregateid <> 'left-out')";
    database
        .execute(&format!("BEGIN; {OUT}; {IN} {filter}; COMMIT"))
        .await;
    relay.wait_for_log("leaves out the rows of").await;
    database.execute(&insert(&["kept", "left-out"])).await;
    let second = Relay::start(&database, &emulator);
    second.wait_for_log("publication-drift").await;
    assert_eq!(second.wait().await.code(), Some(3));
    database
        .execute(&format!("BEGIN; {OUT}; {IN}; COMMIT"))
        .await;
    recorded(&database, 2).await;
}

/// After a restart, PostgreSQL leaves out some rows of a transaction that it sent before. The rows that it still sends
/// get lower ordinals than before, so the relay must recognise published rows by their event ids.
///
/// The reason is a cache: pgoutput remembers whether the publication contains a table. The test proceeds as follows:
///
/// 1. The publication loses the table. Transaction A inserts rows and stays open.
/// 2. The publication gets the table back. Transaction B inserts a row and commits.
/// 3. Transaction A inserts more rows and commits.
/// 4. In the first session, pgoutput decodes B first and remembers that the publication contains the table. So
///    it sends all rows of A.
/// 5. The second session begins with A, and its cache is empty. So pgoutput leaves out the rows that A inserted
///    while the publication lacked the table.
#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_with_other_rows_after_a_restart_is_recognised_by_its_event_ids() {
    let mut database = Database::private().await;
    let emulator = harness::emulator().await;
    let relay = Relay::start(&database, &emulator);
    database.execute(&insert(&["first"])).await;
    recorded(&database, 1).await;
    let url = database.server().socket_url("postgres");
    let open = harness::connect(&url).await;
    database.execute(OUT).await;
    let begin = format!("BEGIN; {}", insert(&["gap-1", "gap-2", "gap-3"]));
    open.batch_execute(&begin).await.unwrap();
    database.execute(IN).await;
    database.execute(&insert(&["between"])).await;
    recorded(&database, 2).await;
    database.wait_until_confirmed().await;
    for key in ["gap-2", "later-1", "later-4"] {
        let refusal = Fault::new(Action::Fail(Code::Unavailable));
        emulator.faults().inject(refusal.on_ordering_key(key));
    }
    let end = insert(&["later-1", "later-2", "later-3", "later-4", "later-5"]);
    open.batch_execute(&format!("{end}; COMMIT")).await.unwrap();
    // Pub/Sub refuses three of the eight events of the transaction.
    recorded(&database, 2 + 8 - 3).await;
    relay.kill_9();
    // Keep refusing until all requests of the killed relay have arrived, so that Pub/Sub stores none of
    // them.
    harness::wait_until_killed_relays_are_gone(&database, &emulator).await;
    emulator.faults().lift_all();
    let relay = Relay::start(&database, &emulator);
    relay.wait_for_log("was decoded with different rows").await;
    database.wait_until_recorded().await;
    recorded(&database, 2 + 8).await;
    let report = harness::check(&database, &emulator).await;
    assert!(report.is_clean(), "{report}\n{}", relay.log());
    assert!(report.duplicates.is_empty(), "{report}\n{}", relay.log());
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_of_a_gap_come_once_even_if_their_table_is_altered_meanwhile() {
    let database = Database::start().await;
    database
        .execute("ALTER TABLE outbox.events ADD COLUMN extra text")
        .await;
    let emulator = harness::emulator().await;
    let settings = [("POSTRIDER_IN_FLIGHT_MIB", "1")];
    let relay = Relay::start_with(&database, &emulator.addr().to_string(), &settings);
    database.execute(&insert(&["first"])).await;
    recorded(&database, 1).await;
    let refused = Fault::new(Action::Fail(Code::Unavailable));
    let refused = emulator.faults().inject(refused);
    database.execute(OUT).await;
    database
        .execute(
            "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, version, payload) \
             SELECT 'order', 'gap', 'OrderPlaced', n, \
                 jsonb_build_object('large', repeat(md5(n::text), 400)) \
             FROM generate_series(1, 500) n",
        )
        .await;
    database.execute(IN).await;
    // Alter the table when the relay has read only some of the rows. Pub/Sub refuses all events, so these rows
    // fill the relay's memory budget.
    relay.wait_for_log("pubsub-unreachable").await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    database
        .execute("ALTER TABLE outbox.events DROP COLUMN extra")
        .await;
    emulator.faults().lift(refused);
    database.wait_until_recorded().await;
    let report = harness::check(&database, &emulator).await;
    assert!(report.is_clean(), "{report}\n{}", relay.log());
    assert!(report.duplicates.is_empty(), "{report}\n{}", relay.log());
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_recovery_restarts_when_a_table_is_altered_while_it_reads() {
    let database = Database::private().await;
    database
        .execute("ALTER TABLE outbox.events ADD COLUMN extra text")
        .await;
    let emulator = harness::emulator().await;
    let relay = Relay::start(&database, &emulator);
    insert_orders(&database, 20, 5).await;
    database.wait_until_recorded().await;
    relay.stop().await;
    database.drop_slot().await;
    insert_orders(&database, 20, 5).await;
    let altering = harness::connect(&database.url).await;
    let alter = "BEGIN; ALTER TABLE outbox.events DROP COLUMN extra";
    altering.batch_execute(alter).await.unwrap();
    let relay = Relay::start(&database, &emulator);
    let waits_to_read = eventually("the relay waits for the table", || async {
        let waiting = "SELECT coalesce(max((query LIKE '%e.extra%')::int), -1)::bigint \
                       FROM pg_stat_activity WHERE wait_event_type = 'Lock'";
        let found = database.number(waiting).await;
        (found >= 0).then_some(found == 1)
    })
    .await;
    altering.batch_execute("COMMIT").await.unwrap();
    // The PostgreSQL version decides which statement of the relay waits for the lock:
    //
    // - Before PostgreSQL 16, the statement that reads the table waits. The relay has already looked up the table's
    //   columns, and they are outdated when the wait ends. So the recovery must restart.
    // - From PostgreSQL 16 on, an earlier statement waits: the query on the publication. So the relay looks up the
    //   columns only after the table was altered, and the recovery need not restart.
    if waits_to_read {
        relay
            .wait_for_log("was altered or renamed while it was read")
            .await;
    }
    database.wait_until_recorded().await;
    let report = harness::check(&database, &emulator).await;
    assert!(report.is_clean(), "{report}\n{}", relay.log());
    assert!(report.duplicates.is_empty(), "{report}\n{}", relay.log());
    relay.stop().await;
}

const LATER: &str = "\
    CREATE TABLE public.later (LIKE outbox.events INCLUDING DEFAULTS, extra int); \
    GRANT SELECT ON public.later TO postrider_relay; \
    ALTER PUBLICATION postrider ADD TABLE public.later";

/// SQL that inserts rows with the versions `versions`, each with a payload of about `bytes` bytes.
fn fill(table: &str, versions: std::ops::RangeInclusive<i64>, bytes: u32) -> String {
    format!(
        "INSERT INTO {table} (aggregatetype, aggregateid, event_type, version, payload) \
         SELECT 'order', '{table}', 'OrderPlaced', n, \
             jsonb_build_object('large', repeat('x', {bytes})) \
         FROM generate_series({}, {}) n",
        versions.start(),
        versions.end()
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn a_recovery_skips_no_row_of_a_table_rewritten_before_its_turn() {
    let database = Database::private().await;
    database.execute(LATER).await;
    let emulator = harness::emulator().await;
    let file =
        settings("[[tables]]\ntable = 'outbox.events'\n[[tables]]\ntable = 'public.later'\n");
    let (path, host) = (
        file.path().display().to_string(),
        emulator.addr().to_string(),
    );
    let environment = [
        ("POSTRIDER_CONFIG", path.as_str()),
        ("POSTRIDER_IN_FLIGHT_MIB", "1"),
    ];
    let start = || Relay::start_with(&database, &host, &environment);
    let relay = start();
    relay.wait_for_log("streaming").await;
    database.execute(&fill("public.later", 1..=1, 1)).await;
    recorded(&database, 1).await;
    relay.stop().await;
    database.drop_slot().await;
    database
        .execute(&fill("outbox.events", 1..=1_500, 2_000))
        .await;
    database.execute(&fill("public.later", 2..=30, 1)).await;
    let down = emulator
        .faults()
        .inject(Fault::new(Action::Fail(Code::Unavailable)));
    let relay = start();
    // Rewrite the second table before the relay reads it. The relay is still in the first table, whose rows
    // have filled its memory budget.
    relay.wait_for_log("pubsub-unreachable").await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    database
        .execute("ALTER TABLE public.later ALTER COLUMN extra TYPE bigint")
        .await;
    emulator.faults().lift(down);
    recorded(&database, 1_530).await;
    let row = database
        .client
        .query_one(
            "SELECT array_agg(l.version ORDER BY d.message_id::bigint) \
             FROM outbox.dispatch d JOIN public.later l ON l.id = d.event_id",
            &[],
        )
        .await
        .unwrap();
    assert_eq!(row.get::<_, Vec<i64>>(0), Vec::from_iter(1..=30));
    assert_eq!(emulator.journal().counts().stored_messages, 1_530);
    relay.stop().await;
}

/// Event ids of numbered rows depend on `inserted_xid`. If PostgreSQL streams rows without this
/// column, the relay must still give them the event ids that the same rows have in the table.
#[tokio::test(flavor = "multi_thread")]
async fn leaving_inserted_xid_out_of_the_column_list_for_a_moment_repeats_nothing() {
    let database = Database::private().await;
    let version = "SELECT current_setting('server_version_num')::bigint";
    if database.number(version).await < 150_000 {
        eprintln!("SKIPPED: column lists need PostgreSQL 15");
        return;
    }
    let emulator = harness::emulator().await;
    let create = "CREATE TABLE public.numbered (id bigserial PRIMARY KEY, aggregatetype text, \
                      aggregateid text, event_type text, payload jsonb)";
    database.execute(create).await;
    let table = [("POSTRIDER_TABLE", "public.numbered")];
    let mut environment = vec![("DATABASE_URL", database.url.as_str())];
    environment.extend(table);
    let ran = harness::postrider(&["init", "--apply"], &environment).output();
    assert!(ran.unwrap().status.success());
    let run = || Relay::start_with(&database, &emulator.addr().to_string(), &table);
    let insert = "INSERT INTO public.numbered (aggregatetype, aggregateid, event_type, payload) \
                  SELECT 'order', 'k', 'New', '{}' FROM generate_series(1, 5)";
    let relay = run();
    relay.wait_for_log("streaming").await;
    relay.stop().await;
    let list = "id, aggregatetype, aggregateid, event_type, payload";
    database
        .execute(&format!(
            "ALTER PUBLICATION postrider SET TABLE public.numbered ({list}); {insert}; \
             ALTER PUBLICATION postrider SET TABLE public.numbered; {insert}"
        ))
        .await;
    let relay = run();
    eventually("all rows are recorded once", || async {
        let recorded = "SELECT count(*) FROM outbox.dispatch d JOIN public.numbered e \
                        ON d.event_id = outbox.event_uuid('public.numbered', e.id::text, e.inserted_xid)";
        (database.number(recorded).await == 10).then_some(())
    })
    .await;
    relay.stop().await;
    assert_eq!(emulator.journal().counts().stored_messages, 10);
}
