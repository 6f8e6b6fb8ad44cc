//! Waiting for the relay before us to be done with the dispatch table.
//!
//! The slot is free as soon as a relay's walsender ends, also when its last transaction is still
//! open. What that records a moment after we have looked would be sent again. A transaction that
//! begins once the slot is ours records nothing: the writer sees to that. One that stands still,
//! with its relay or the network, would keep its rows to itself for hours: it is ended.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use slot_manager::SlotName;

use crate::error::Result;
use crate::postgres::Sql;

const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// Sessions under the name that a writer of this slot has. Anybody may take any name: only those of
/// our own role are writers, and only those are waited for and ended.
const NAMED_SO: &str = "\
    from pg_catalog.pg_stat_activity \
    where application_name = left($1, 63) and datname = pg_catalog.current_database()";

const OURS: &str = "usename = session_user and state <> 'idle'";

/// How long a session that was told to end may take.
const END_LIMIT: Duration = Duration::from_secs(2);

/// The name under which the writer of this slot connects.
pub(super) fn writer_name(slot: &SlotName) -> String {
    format!("postrider dispatch {slot}")
}

/// Waits until no other writer of this slot has a transaction open; after `limit` those that have
/// are ended, and what they have not committed is rolled back.
///
/// # Errors
/// Those of a statement.
pub(crate) async fn wait_for_predecessor(
    sql: &Sql,
    slot: &SlotName,
    limit: Duration,
) -> Result<()> {
    let name = writer_name(slot);
    warn_of_strangers(sql, &name).await?;
    if are_done_within(sql, &name, limit).await? {
        return Ok(());
    }
    tracing::warn!(
        %slot,
        "ending what the relay before this one has left open"
    );
    let end_them = format!(
        "select count(*) from (select pg_catalog.pg_terminate_backend(pid) {NAMED_SO} \
             and {OURS} offset 0) ended"
    );
    sql.query_one(&end_them, &[&name]).await?;
    if !are_done_within(sql, &name, END_LIMIT).await? {
        tracing::warn!(
            %slot,
            "the relay before this one still records what it has sent: events may repeat"
        );
    }
    Ok(())
}

async fn are_done_within(sql: &Sql, name: &str, limit: Duration) -> Result<bool> {
    let began = Instant::now();
    let writers = format!("select count(*) {NAMED_SO} and {OURS}");
    loop {
        let row = sql.query_one(&writers, &[&name]).await?;
        if row.get::<_, i64>(0) == 0 {
            return Ok(true);
        }
        if began.elapsed() >= limit {
            return Ok(false);
        }
        tokio::time::sleep(LOOK_INTERVAL).await;
    }
}

/// Says once in the life of the process that other roles have sessions under our name.
async fn warn_of_strangers(sql: &Sql, name: &str) -> Result<()> {
    static WARNED: AtomicBool = AtomicBool::new(false);
    let strangers = format!(
        "select pid, usename::text {NAMED_SO} and usename is distinct from session_user limit 1"
    );
    let Some(row) = sql.query_opt(&strangers, &[&name]).await? else {
        return Ok(());
    };
    if !WARNED.swap(true, Ordering::Relaxed) {
        let (pid, role): (i32, Option<String>) = (row.get(0), row.get(1));
        tracing::warn!(
            pid,
            role,
            "another role has a session under the name of a relay: it is left alone"
        );
    }
    Ok(())
}
