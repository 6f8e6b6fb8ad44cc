//! Other activity in the database: DDL on the outbox table, other tables, another database,
//! checkpoints.
//!
//! Every statement here may fail, for example because a lock is not available. None of the
//! statements creates an event.

use std::time::Duration;

use tokio::task::JoinSet;

use crate::ground::{self, Database};
use crate::plan::WorkloadPlan;
use crate::random::Random;

/// DDL waits for the locks of writers, and later writers wait behind the DDL. The lock timeout keeps
/// this wait short.
const SESSION: &str = "SET lock_timeout = '200ms'; SET client_min_messages = 'error'";

const DDL: [&str; 8] = [
    "ALTER TABLE outbox.events ADD COLUMN IF NOT EXISTS extra text",
    "ALTER TABLE outbox.events DROP COLUMN IF EXISTS extra",
    "ALTER TABLE outbox.events ADD COLUMN IF NOT EXISTS more bigint",
    "ALTER TABLE outbox.events DROP COLUMN IF EXISTS more",
    "CREATE INDEX IF NOT EXISTS by_time ON outbox.events (occurred_at)",
    "DROP INDEX IF EXISTS outbox.by_time",
    "CREATE TABLE IF NOT EXISTS shop.passing (n int); DROP TABLE shop.passing",
    "ANALYZE outbox.events",
];

/// The noise for schedules that create slots. It has no statement that rewrites a table, such as `TRUNCATE`. If
/// a slot is created while such a statement runs, PostgreSQL 15 may create a slot that cannot be read ("could
/// not map filenode").
const MILD_NOISE: [&str; 3] = [
    "INSERT INTO noise SELECT i, repeat('n', 50) FROM generate_series(1, 500) i",
    "UPDATE noise SET pad = pad || 'u' WHERE n < 50",
    "BEGIN; INSERT INTO noise SELECT i FROM generate_series(1, 300) i; ROLLBACK",
];

const NOISE: [&str; 5] = [
    "INSERT INTO noise SELECT i, repeat('n', 50) FROM generate_series(1, 500) i",
    "UPDATE noise SET pad = pad || 'u' WHERE n < 50",
    "BEGIN; INSERT INTO noise SELECT i FROM generate_series(1, 300) i; ROLLBACK",
    "TRUNCATE noise",
    "INSERT INTO noise VALUES (1, 'one')",
];

/// Moves old rows, and rows that may be in flight, to the other partition. `session_replication_role =
/// replica` switches off the trigger that forbids updates of the table.
const MOVES: [&str; 2] = [
    "SET session_replication_role = replica; \
     UPDATE outbox.events SET part = 1 - part WHERE (id, part) IN \
        (SELECT id, part FROM outbox.events ORDER BY seq DESC LIMIT 30)",
    "SET session_replication_role = replica; \
     UPDATE outbox.events SET part = 1 - part WHERE (id, part) IN \
        (SELECT id, part FROM outbox.events ORDER BY seq LIMIT 20)",
];

/// Statements that affect the whole server: they make slots save their positions, or write WAL that
/// belongs to no table.
const SERVER: [&str; 4] = [
    "CHECKPOINT",
    "SELECT pg_switch_wal()",
    "SELECT pg_logical_emit_message(true, 'torture', 'inside')",
    "SELECT pg_logical_emit_message(false, 'torture', 'beside')",
];

pub(super) fn start(
    database: &Database,
    plan: &WorkloadPlan,
    makes_slots: bool,
    random: &mut Random,
) -> JoinSet<()> {
    let mut tasks = JoinSet::new();
    if plan.ddl {
        tasks.spawn(repeat(
            database.url.clone(),
            "public",
            &DDL,
            80,
            random.fork(),
        ));
    }
    if plan.noise {
        let (own, other) = (database.url.clone(), database.bystander_url.clone());
        let mild = if makes_slots {
            &MILD_NOISE[..]
        } else {
            &NOISE[..]
        };
        tasks.spawn(repeat(own, "shop", mild, 40, random.fork()));
        tasks.spawn(repeat(other, "public", &NOISE, 40, random.fork()));
    }
    tasks.spawn(repeat(
        database.url.clone(),
        "public",
        &SERVER,
        300,
        random.fork(),
    ));
    if plan.moves_rows {
        let own = database.url.clone();
        tasks.spawn(repeat(own, "public", &MOVES, 60, random.fork()));
    }
    tasks
}

/// Runs randomly drawn statements, with pauses of at most `pause_ms` milliseconds, until the task
/// is aborted.
async fn repeat(
    url: String,
    schema: &'static str,
    statements: &'static [&'static str],
    pause_ms: u64,
    mut random: Random,
) {
    let session = format!("{SESSION}; SET search_path = {schema}");
    loop {
        let Ok(client) = ground::connect(&url).await else {
            continue;
        };
        let mut ready = client.batch_execute(&session).await.is_ok();
        while ready && !client.is_closed() {
            tokio::time::sleep(random.millis(1..=pause_ms)).await;
            if client.batch_execute(random.pick(statements)).await.is_err() {
                ready = client.batch_execute("ROLLBACK").await.is_ok();
            }
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
