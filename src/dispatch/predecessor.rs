//! Waiting for the relay before us to be done with the dispatch table.
//!
//! The slot is free as soon as a relay's walsender ends, also when the relay itself lives on and
//! still records what it has sent, or when its last statement is still running though it is dead.
//! What is recorded a moment after we have looked would be sent again.

use std::time::{Duration, Instant};

use slot_manager::SlotName;

use crate::error::Result;
use crate::postgres::Sql;

const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// Sessions of another role show no name, and are not waited for.
const WRITERS: &str = "\
    select count(*) from pg_catalog.pg_stat_activity \
    where application_name = left($1, 63) and datname = pg_catalog.current_database()";

/// The name under which the writer of this slot connects.
pub(super) fn writer_name(slot: &SlotName) -> String {
    format!("postrider dispatch {slot}")
}

/// Waits until no other writer of this slot is connected, for at most `limit`: the time that an
/// attempt to publish may take.
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
                "the relay before this one has not ended in {limit:?}: events may repeat"
            );
            return Ok(());
        }
        tokio::time::sleep(LOOK_INTERVAL).await;
    }
}
