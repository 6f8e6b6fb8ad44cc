//! Waiting for the relay before us to be done with the dispatch table.
//!
//! The slot is free as soon as a relay's walsender ends, also when its last transaction is still
//! open. What that records a moment after we have looked would be sent again. A transaction that
//! begins once the slot is ours records nothing: the writer sees to that. One that stands still,
//! with its relay or the network, would keep its rows to itself for hours: it is ended.

use std::time::{Duration, Instant};

use slot_manager::SlotName;

use crate::error::Result;
use crate::postgres::Sql;

const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// Sessions of another role show no name, and are not waited for.
const WRITERS: &str = "\
    select count(*) from pg_catalog.pg_stat_activity \
    where application_name = left($1, 63) and datname = pg_catalog.current_database() \
      and state <> 'idle'";

/// Needs no right but to be of the same role.
const END_THEM: &str = "\
    select count(*) from (select pg_catalog.pg_terminate_backend(pid) \
        from pg_catalog.pg_stat_activity \
        where application_name = left($1, 63) and datname = pg_catalog.current_database() \
          and state <> 'idle' offset 0) ended";

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
    if are_done_within(sql, &name, limit).await? {
        return Ok(());
    }
    tracing::warn!(%slot, "ending what the relay before this one has left open");
    sql.query_one(END_THEM, &[&name]).await?;
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
    loop {
        let row = sql.query_one(WRITERS, &[&name]).await?;
        if row.get::<_, i64>(0) == 0 {
            return Ok(true);
        }
        if began.elapsed() >= limit {
            return Ok(false);
        }
        tokio::time::sleep(LOOK_INTERVAL).await;
    }
}
