//! Tests of `postrider prune` and `audit` with settings that differ from the relay's settings:
//! another mapping of ids, or another dispatch mode. Also tests ids at the limits of their types.
//! In none of these cases may `prune` delete rows or records that are still needed.

use std::time::Instant;

use scratch_postgres::ScratchPostgres;
use serde_json::Value;

use crate::support::{Database, PATIENCE, assert_contains};

const PRUNE: [&str; 5] = ["prune", "--older-than", "30d", "--yes", "--json"];

/// Runs `postrider prune`, and returns its JSON output. `prune` deletes no records before the slot has passed the end
/// of the WAL. No relay reads from the slot, so this function advances the slot and runs `prune` again.
async fn prune(database: &Database, env: &[(&str, &str)]) -> Value {
    let began = Instant::now();
    loop {
        let json = database.run_with(&PRUNE, env).await.json();
        let is_behind = json["dispatch"]["postponed"]
            .as_str()
            .is_some_and(|why| why.contains("has not passed"));
        if !is_behind {
            return json;
        }
        assert!(began.elapsed() < PATIENCE, "{json}");
        let advance = format!(
            "checkpoint; select pg_replication_slot_advance('{}', pg_current_wal_lsn())",
            database.name
        );
        database.execute(&advance).await;
    }
}

/// Creates a table whose ids have this type, and captures it. Returns the settings file that names
/// the table.
async fn with_table(database: &Database, id: &str) -> tempfile::NamedTempFile {
    database
        .execute(&format!(
            "create table public.t (id {id}, aggregatetype text not null default 'order', \
                 aggregateid text, event_type text not null default 'E', payload jsonb, \
                 occurred_at timestamptz not null default now() - interval '40 days')"
        ))
        .await;
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "[[tables]]\ntable = 'public.t'\n").unwrap();
    let config = file.path().display().to_string();
    let env = [("POSTRIDER_CONFIG", config.as_str())];
    let ran = database.run_with(&["init", "--apply"], &env).await;
    ran.assert_status(0);
    file
}

async fn raise_floor(database: &Database) {
    let raise = "update outbox.capture set floor = pg_snapshot_xmax(pg_current_snapshot())";
    database.execute(raise).await;
}

/// Inserts old rows into the default table, and an old record with the state `published` for each
/// row.
async fn recorded(database: &Database, events: u32) {
    let fill = format!(
        "insert into outbox.events (aggregatetype, event_type, occurred_at) \
             select 'order', 'E', now() - interval '40 days' from generate_series(1, {events}); \
         insert into outbox.dispatch (commit_lsn, committed_at, dispatched_at, ordinal, attempts, \
                 event_id, state) \
             select '0/10', occurred_at, occurred_at, seq, 1, id, 'published' from outbox.events"
    );
    database.execute(&fill).await;
}

async fn rows(database: &Database, table: &str) -> i64 {
    database
        .number(&format!("select count(*) from {table}"))
        .await
}

async fn records(database: &Database) -> i64 {
    rows(database, "outbox.dispatch").await
}

#[tokio::test]
async fn prune_keeps_the_records_of_kept_rows_with_extreme_integer_ids() {
    let server = ScratchPostgres::builder().start().unwrap();
    let database = Database::on(&server).await;
    let file = with_table(&database, "bigint primary key").await;
    let config = file.path().display().to_string();
    let env = [("POSTRIDER_CONFIG", config.as_str())];
    database
        .execute(
            "insert into public.t (id) values (1), (-1), (1234567890123456789), \
                 (9223372036854775807), (-9223372036854775808); \
             insert into outbox.dispatch (commit_lsn, committed_at, dispatched_at, ordinal, attempts, \
                     event_id, state, source_id) \
                 select '0/10', now(), now() - interval '40 days', row_number() over (), 1, \
                     outbox.event_uuid('public.t', id::text, inserted_xid), 'published', \
                     'public.t:' || id from public.t; \
             insert into outbox.dispatch (commit_lsn, committed_at, dispatched_at, ordinal, attempts, \
                     event_id, state, source_id) \
                 values ('0/10', now(), now() - interval '40 days', 6, 1, gen_random_uuid(), \
                     'published', 'public.t:9223372036854775808')",
        )
        .await;
    // The floor is below the transactions of the rows, so the rows stay.
    let json = prune(&database, &env).await;
    assert_eq!(json["tables"][0]["kept"]["above_floor"], 5, "{json}");
    assert_eq!(json["dispatch"]["rows"], 0, "{json}");
    assert_eq!(records(&database).await, 6);
    raise_floor(&database).await;
    let json = prune(&database, &env).await;
    assert_eq!(rows(&database, "public.t").await, 0, "{json}");
    assert_eq!(records(&database).await, 1, "no bigint has this id: {json}");
}

#[tokio::test]
async fn a_command_that_maps_other_ids_than_the_relay_deletes_nothing() {
    let server = ScratchPostgres::builder().start().unwrap();
    let database = Database::on(&server).await;
    database.run(&["init", "--apply"]).await.assert_status(0);
    recorded(&database, 20).await;
    raise_floor(&database).await;
    let file = tempfile::NamedTempFile::new().unwrap();
    let settings = "[[tables]]\ntable = 'outbox.events'\ncolumns = { id = 'seq' }\n";
    std::fs::write(file.path(), settings).unwrap();
    let config = file.path().display().to_string();
    let json = prune(&database, &[("POSTRIDER_CONFIG", &config)]).await;
    let why = json["dispatch"]["postponed"].to_string();
    assert_contains(&why, "none of the 20 old rows");
    assert_eq!(records(&database).await, 20);
    assert_eq!(rows(&database, "outbox.events").await, 20);
    // With the relay's settings, `prune` deletes all rows and records.
    let json = prune(&database, &[]).await;
    let left = (
        rows(&database, "outbox.events").await,
        records(&database).await,
    );
    assert_eq!(left, (0, 0), "{json}");
}

#[tokio::test]
async fn prune_uses_the_dispatch_mode_of_the_relay_and_not_of_the_command() {
    let server = ScratchPostgres::builder().start().unwrap();
    let database = Database::on(&server).await;
    database.run(&["init", "--apply"]).await.assert_status(0);
    // These rows have no record although the relay keeps full records, so they were never
    // published.
    database
        .execute(&format!(
            "insert into outbox.events (aggregatetype, event_type, occurred_at) \
                 select 'order', 'E', now() - interval '40 days' from generate_series(1, 7); \
             insert into outbox.relay (slot, system_identifier, timeline, instance, dispatch) \
                 select '{}', system_identifier::text, 1, 'x', 'full' from pg_control_system()",
            database.name
        ))
        .await;
    raise_floor(&database).await;
    let exceptions = [("POSTRIDER_DISPATCH", "exceptions")];
    let json = prune(&database, &exceptions).await;
    assert_eq!(rows(&database, "outbox.events").await, 7, "{json}");
    assert_eq!(json["tables"][0]["kept"]["waiting"], 7, "{json}");
    database
        .execute("update outbox.relay set dispatch = 'exceptions'")
        .await;
    let json = prune(&database, &exceptions).await;
    assert_eq!(rows(&database, "outbox.events").await, 0, "{json}");
}

#[tokio::test]
async fn rows_without_an_id_are_counted_and_stop_neither_audit_nor_prune() {
    let server = ScratchPostgres::builder().start().unwrap();
    let database = Database::on(&server).await;
    let file = with_table(&database, "uuid").await;
    let config = file.path().display().to_string();
    let env = [("POSTRIDER_CONFIG", config.as_str())];
    database
        .execute("insert into public.t (aggregatetype) select 'order' from generate_series(1, 4)")
        .await;
    let ran = database.run_with(&["audit", "--json"], &env).await;
    assert!(ran.json()["tables"][0].is_object(), "{ran}");
    let json = prune(&database, &env).await;
    let left = rows(&database, "public.t").await;
    assert_eq!(left, 4, "no outcome of them is known: {json}");
}
