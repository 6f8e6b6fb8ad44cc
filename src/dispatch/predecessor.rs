//! Waiting for the relay before us to be done with the dispatch table.
//!
//! The slot is free as soon as a relay's walsender ends, also when its last statement is still
//! running. What that records a moment after we have looked would be sent again. A statement that
//! begins once the slot is ours records nothing: the writer sees to that.

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

/// The name under which the writer of this slot connects.
pub(super) fn writer_name(slot: &SlotName) -> String {
    format!("postrider dispatch {slot}")
}

/// Waits until no other writer of this slot has a statement running, for at most `limit`.
///
/// # Errors
/// Those of a statement.
pub(crate) async fn wait_for_predecessor(
    sql: &Sql,
    slot: &SlotName,
    limit: Duration,
) -> Result<()> {
    let began = Instant::now();
    loop {
        let row = sql.query_one(WRITERS, &[&writer_name(slot)]).await?;
        if row.get::<_, i64>(0) == 0 {
            return Ok(());
        }
        if began.elapsed() >= limit {
            tracing::warn!(
                %slot,
                "the relay before this one still records what it has sent: events may repeat"
            );
            return Ok(());
        }
        tokio::time::sleep(LOOK_INTERVAL).await;
    }
}
