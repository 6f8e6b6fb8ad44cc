//! Tests of `postrider prune` without a relay: which rows it deletes, its plan, the rights it
//! needs, and how it is stopped.

use std::time::{Duration, Instant};

use scratch_postgres::ScratchPostgres;

use crate::support::{Database, PATIENCE, assert_contains, command};

pub(crate) fn server() -> ScratchPostgres {
    ScratchPostgres::builder().start().unwrap()
}

/// Inserts events, with records which say that they were published 40 days ago. Then raises the
/// floor above their transactions, and advances the slot.
pub(crate) async fn fill(database: &Database, events: u32) {
    database
        .execute(&format!(
            "insert into outbox.events (aggregatetype, aggregateid, event_type, occurred_at) \
                 select 'order', 'o-' || i % 50, 'OrderPlaced', now() - interval '40 days' \
                 from generate_series(1, {events}) i; \
             insert into outbox.dispatch (commit_lsn, committed_at, dispatched_at, ordinal, attempts, \
                 event_id, state, topic, ordering_key) \
                 select '0/10', occurred_at, occurred_at, seq, 1, id, 'published', \
                     'projects/p/topics/order.events', aggregateid \
                 from outbox.events"
        ))
        .await;
    database
        // Use `xmax`, because `xmin` may be below the transactions of the rows: an older transaction of another
        // test on the same server may still be open.
        .execute("update outbox.capture set floor = pg_snapshot_xmax(pg_current_snapshot())")
        .await;
    advance(database).await;
}

/// Advances the slot to the end of the WAL, as if a relay had read everything.
async fn advance(database: &Database) {
    database
        .execute(&format!(
            "checkpoint; select pg_replication_slot_advance('{}', pg_current_wal_lsn())",
            database.name
        ))
        .await;
}

/// Prunes until `prune` no longer postpones anything, and returns the reports. No relay reads from the
/// slot, so this function advances the slot between two runs.
async fn prune_all(database: &Database) -> Vec<serde_json::Value> {
    let began = Instant::now();
    let mut reports = Vec::new();
    while began.elapsed() < PATIENCE {
        let ran = database
            .run(&[
                "prune",
                "--older-than",
                "30d",
                "--yes",
                "--json",
                "--pause",
                "0ms",
            ])
            .await;
        let json = ran.json();
        let is_done = json["dispatch"]["postponed"].is_null();
        ran.assert_status(i32::from(!is_done));
        reports.push(json);
        if is_done {
            return reports;
        }
        advance(database).await;
    }
    panic!("still postponed: {reports:#?}");
}

fn total(reports: &[serde_json::Value], pointer: &str) -> u64 {
    let counts = reports
        .iter()
        .map(|report| report.pointer(pointer).unwrap());
    counts.map(|count| count.as_u64().unwrap()).sum()
}

#[tokio::test]
async fn no_chunk_reads_a_whole_table_and_each_row_is_judged_once() {
    let server = server();
    let database = Database::on(&server).await;
    database.run(&["init", "--apply"]).await.assert_status(0);
    fill(&database, 200_000).await;
    database.execute("vacuum analyze").await;
    let scans = "select sum(seq_scan)::bigint from pg_stat_user_tables \
                 where relid in ('outbox.events'::regclass, 'outbox.dispatch'::regclass)";
    let fetched = "select sum(idx_tup_fetch)::bigint from pg_stat_user_tables \
                   where relid in ('outbox.events'::regclass, 'outbox.dispatch'::regclass)";
    // Wait until PostgreSQL has counted the reads of the sessions that have ended.
    tokio::time::sleep(Duration::from_millis(1_100)).await;
    let (scans_before, fetched_before) =
        (database.number(scans).await, database.number(fetched).await);
    let reports = prune_all(&database).await;
    assert_eq!(total(&reports, "/tables/0/rows"), 200_000);
    assert_eq!(total(&reports, "/dispatch/rows"), 200_000);
    tokio::time::sleep(Duration::from_millis(1_100)).await;
    database.execute("select pg_stat_clear_snapshot()").await;
    assert_eq!(database.number(scans).await, scans_before);
    // Each event needs 6 index fetches. `prune` fetches the row and its record twice: to decide about the row, and to
    // delete the row. Later it fetches the record twice more. The limit of 8 leaves some room.
    let fetched = database.number(fetched).await - fetched_before;
    assert!(fetched < 200_000 * 8, "{fetched}");
    assert_eq!(
        database.number("select count(*) from outbox.events").await,
        0
    );
    assert_eq!(
        database
            .number("select count(*) from outbox.dispatch")
            .await,
        0
    );
}

#[tokio::test]
async fn a_dry_run_counts_and_deletes_nothing() {
    let database = Database::initialised().await;
    fill(&database, 700).await;
    database
        .execute(
            "update outbox.dispatch set state = 'quarantined' where ordinal <= 10; \
             update outbox.dispatch set dispatched_at = now() where ordinal > 500; \
             delete from outbox.dispatch where ordinal = 200",
        )
        .await;
    let dry = ["prune", "--older-than", "30d", "--dry-run"];
    let ran = database.run(&dry).await;
    ran.assert_status(0);
    assert_contains(&ran.stdout, "       489  outbox.events, the oldest from ");
    assert_contains(&ran.stdout, "kept: 10 rows in quarantine");
    assert_contains(&ran.stdout, "kept: 1 row without an outcome");
    assert_contains(
        &ran.stdout,
        "       489  outbox.dispatch, the oldest recorded at ",
    );
    assert_contains(&ran.stdout, "Nothing was deleted: replace --dry-run");
    let rows = "select count(*) from outbox.events";
    assert_eq!(database.number(rows).await, 700);
    let ran = database.run(&["prune", "--older-than", "30d"]).await;
    ran.assert_error("confirmation-missing", 2);
    assert_contains(&ran.stderr, "--dry-run");
    let reports = prune_all(&database).await;
    assert_eq!(total(&reports, "/tables/0/rows"), 489);
    assert_eq!(total(&reports, "/dispatch/rows"), 489);
}

#[tokio::test]
async fn a_dry_run_leaves_out_the_records_of_rows_that_stay() {
    let database = Database::initialised().await;
    fill(&database, 300).await;
    database
        .execute(
            "insert into outbox.events (aggregatetype, aggregateid, event_type, occurred_at) \
                 select 'order', 'o-1', 'OrderPlaced', now() - interval '40 days' \
                 from generate_series(1, 20); \
             insert into outbox.dispatch (commit_lsn, committed_at, dispatched_at, ordinal, attempts, \
                 event_id, state) \
                 select '0/11', occurred_at, occurred_at, seq, 1, id, 'published' \
                 from outbox.events where seq > 300; \
             update outbox.capture set floor = (select max(inserted_xid::text::bigint)::text::xid8 from outbox.events)",
        )
        .await;
    // Give five of the events a second, younger record, so that their rows must stay.
    database
        .execute(
            "insert into outbox.dispatch (commit_lsn, committed_at, ordinal, attempts, event_id, state) \
                 select '0/12', now(), seq, 1, id, 'published' from outbox.events where seq <= 5",
        )
        .await;
    advance(&database).await;
    let dry = ["prune", "--older-than", "30d", "--dry-run", "--json"];
    let json = database.run(&dry).await.json();
    assert_eq!(json["tables"][0]["rows"], 295, "{json:#}");
    assert_eq!(json["tables"][0]["kept"]["above_floor"], 20, "{json:#}");
    assert_eq!(json["dispatch"]["rows"], 295, "{json:#}");
    assert_eq!(json["dispatch"]["of_rows"], 25, "{json:#}");
    let reports = prune_all(&database).await;
    assert_eq!(total(&reports, "/tables/0/rows"), 295);
    assert_eq!(total(&reports, "/dispatch/rows"), 295);
}

#[tokio::test]
async fn rows_above_the_floor_or_from_before_capturing_stay() {
    let database = Database::initialised().await;
    fill(&database, 100).await;
    database
        .execute("update outbox.capture set floor = '0'")
        .await;
    let dry = ["prune", "--older-than", "30d", "--dry-run", "--json"];
    let json = database.run(&dry).await.json();
    assert_eq!(json["tables"][0]["rows"], 0);
    assert_eq!(json["tables"][0]["kept"]["above_floor"], 100);
    database
        .execute(
            "update outbox.capture set floor = pg_snapshot_xmax(pg_current_snapshot()), \
                 since = pg_current_snapshot(); \
             delete from outbox.dispatch",
        )
        .await;
    let json = database.run(&dry).await.json();
    assert_eq!(json["tables"][0]["rows"], 0);
    assert_eq!(json["tables"][0]["kept"]["not_captured"], 100);
}

#[tokio::test]
async fn a_role_without_delete_gets_the_grant_that_it_needs() {
    let database = Database::initialised().await;
    fill(&database, 10).await;
    let role = format!("{}_pruner", database.name);
    database
        .execute(&format!(
            "create role {role} login; grant select on outbox.events, outbox.dispatch, \
                 outbox.capture, outbox.relay to {role}; grant usage on schema outbox to {role}"
        ))
        .await;
    let url = database.url_as(&role);
    let prune = ["prune", "--older-than", "30d", "--yes"];
    let ran = database.run_with(&prune, &[("DATABASE_URL", &url)]).await;
    ran.assert_error("privilege-missing", 3);
    let grant = format!("GRANT DELETE ON outbox.events, outbox.dispatch TO {role}");
    assert_contains(&ran.stderr, &grant);
    let rows = "select count(*) from outbox.events";
    assert_eq!(database.number(rows).await, 10);
    database.execute(&grant).await;
    let ran = database.run_with(&prune, &[("DATABASE_URL", &url)]).await;
    assert_contains(&ran.stdout, "        10  outbox.events");
    assert_eq!(database.number(rows).await, 0);
}

#[tokio::test]
async fn prune_keeps_all_records_while_a_formerly_captured_table_is_not_in_the_settings() {
    let database = Database::initialised().await;
    fill(&database, 10).await;
    database
        .execute(
            "create table public.former (id uuid primary key); \
             insert into outbox.capture (identity, schema_name, table_name, table_oid, slot, \
                 has_inserted_xid, instance) \
             select 'public.former', 'public', 'former', 'public.former'::regclass, slot, false, 'x' \
             from outbox.capture",
        )
        .await;
    let ran = database
        .run(&["prune", "--older-than", "30d", "--yes", "--json"])
        .await;
    ran.assert_status(1);
    let why = ran.json()["dispatch"]["postponed"].to_string();
    assert_contains(
        &why,
        "table public.former was captured and is not in the settings",
    );
}

#[tokio::test]
async fn numbered_rows_of_a_partitioned_table_are_deleted_through_its_root() {
    let server = server();
    let database = Database::on(&server).await;
    database
        .execute(
            "create table public.p (id bigserial, day int not null default 1, \
                 aggregatetype text not null, aggregateid text, event_type text not null, \
                 payload jsonb, occurred_at timestamptz not null default now(), \
                 primary key (id, day)) partition by list (day); \
             create table public.p1 partition of public.p for values in (1); \
             create table public.p2 partition of public.p for values in (2)",
        )
        .await;
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "[[tables]]\ntable = 'public.p'\n").unwrap();
    let config = file.path().display().to_string();
    let env = [("POSTRIDER_CONFIG", config.as_str())];
    let ran = database.run_with(&["init", "--apply"], &env).await;
    ran.assert_status(0);
    database
        .execute(
            "insert into public.p (day, aggregatetype, aggregateid, event_type) \
                 select 1 + i % 2, 'order', 'o', 'OrderPlaced' from generate_series(1, 600) i; \
             insert into outbox.dispatch (commit_lsn, committed_at, dispatched_at, ordinal, attempts, \
                 event_id, state, source_id) \
                 select '0/10', now(), now() - interval '40 days', id, 1, \
                     outbox.event_uuid('public.p', id::text, inserted_xid), 'published', \
                     'public.p:' || id from public.p",
        )
        .await;
    database
        // Use `xmax`, because `xmin` may be below the transactions of the rows: an older transaction of another
        // test on the same server may still be open.
        .execute("update outbox.capture set floor = pg_snapshot_xmax(pg_current_snapshot())")
        .await;
    // The loop below inserts two of the deleted rows again, so their records must stay.
    let prune = [
        "prune",
        "--older-than",
        "30d",
        "--yes",
        "--json",
        "--chunk",
        "100",
    ];
    let began = Instant::now();
    let (mut rows, mut records, mut is_done) = (0, 0, false);
    while !is_done && began.elapsed() < PATIENCE {
        let json = database.run_with(&prune, &env).await.json();
        rows += json["tables"][0]["rows"].as_u64().unwrap();
        records += json["dispatch"]["rows"].as_u64().unwrap();
        is_done = json["dispatch"]["postponed"].is_null();
        if rows == 600 && database.number("select count(*) from public.p").await == 0 {
            database
                .execute(
                    "insert into public.p (id, aggregatetype, event_type) \
                     values (7, 'order', 'OrderPlaced'), (8, 'order', 'OrderPlaced')",
                )
                .await;
        }
        advance(&database).await;
    }
    assert_eq!((rows, records, is_done), (600, 598, true));
}

#[tokio::test]
async fn a_signal_stops_prune_between_two_steps_and_the_next_run_continues() {
    let server = server();
    let database = Database::on(&server).await;
    database.run(&["init", "--apply"]).await.assert_status(0);
    fill(&database, 3_000).await;
    let prune = [
        "prune",
        "--older-than",
        "30d",
        "--yes",
        "--chunk",
        "100",
        "--pause",
        "200ms",
    ];
    let child = command(&prune, &database.env()).spawn().unwrap();
    let rows = "select count(*) from outbox.events";
    let began = Instant::now();
    while database.number(rows).await == 3_000 {
        assert!(began.elapsed() < PATIENCE);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let pid = child.id().unwrap().to_string();
    let sent = std::process::Command::new("kill")
        .args(["-INT", &pid])
        .status();
    assert!(sent.unwrap().success());
    let output = child.wait_with_output().await.unwrap();
    assert_eq!(output.status.code(), Some(1));
    let said = String::from_utf8(output.stdout).unwrap();
    assert_contains(
        &said,
        "Stopped before the end: run the command again to continue.",
    );
    let left = database.number(rows).await;
    assert!(left > 0 && left < 3_000, "{left}");
    let reports = prune_all(&database).await;
    assert_eq!(total(&reports, "/tables/0/rows"), left.unsigned_abs());
    assert_eq!(total(&reports, "/dispatch/rows"), 3_000);
}

/// In the first database no row can be deleted, so no record can be deleted afterwards. `prune` must not wait
/// for the slot there, although the slot is behind.
#[tokio::test]
async fn prune_waits_for_the_slot_only_if_there_is_a_record_to_delete_and_says_so() {
    let prune = ["prune", "--older-than", "30d", "--yes"];
    let database = Database::initialised().await;
    database.emit(10).await;
    let ran = database.run(&prune).await;
    ran.assert_status(0);
    assert_contains(&ran.stdout, "No row can be deleted now.");
    assert!(!ran.stderr.contains("waiting"), "{ran}");

    let database = Database::initialised().await;
    fill(&database, 10).await;
    let ran = database.run(&prune).await;
    assert_contains(&ran.stdout, "        10  outbox.events");
    assert_contains(
        &ran.stderr,
        "waiting up to 20 s for the slot to pass the deleted rows",
    );
}
