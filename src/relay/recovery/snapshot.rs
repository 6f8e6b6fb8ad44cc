//! The session that reads in the snapshot of a new slot.
//!
//! That snapshot is made from the log: it shows a transaction whose commit stands there, also before
//! the server process that wrote it has noted it in `pg_xact`. Whoever reads a row of such a transaction
//! meanwhile finds it neither running nor committed, and PostgreSQL marks the row as aborted, for good.
//! A subscription of PostgreSQL takes that risk, which is a moment long; here nothing is read until those
//! transactions have ended.
//! (Sources: `RecordTransactionCommit`, `SnapBuildInitialSnapshot`, `HeapTupleSatisfiesMVCC`.)

use std::time::{Duration, Instant};

use tokio_postgres::types::ToSql;

use crate::error::{Code, Error, Result};
use crate::postgres::{PatientSql, Sql, Target, answer_within};
use crate::relay::session::ANSWER_LIMIT;

/// Reading waits for Pub/Sub, which may be away for long.
const NO_TIMEOUT: Duration = Duration::ZERO;

const LOOK_INTERVAL: Duration = Duration::from_millis(10);

/// What takes longer to end is noted in `pg_xact`, and waits for a synchronous standby.
const COMMITTING_LIMIT: Duration = Duration::from_secs(10);

/// Those from `xmax` on run too, as far as there are any: it is the one after the last that has ended.
const RUNNING: &str = "\
    SELECT ARRAY(SELECT xid::text::bigint FROM pg_catalog.pg_snapshot_xip(s) AS running (xid)), \
           pg_catalog.pg_snapshot_xmax(s)::text::bigint \
    FROM pg_catalog.pg_current_snapshot() s";

const SHOWN: &str = "\
    SELECT count(*) FROM pg_catalog.pg_current_snapshot() s, LATERAL ( \
        SELECT pg_catalog.unnest($1::bigint[]) UNION ALL \
        SELECT pg_catalog.generate_series($2::bigint, greatest( \
            pg_catalog.pg_snapshot_xmin(s), pg_catalog.pg_snapshot_xmax(s))::text::bigint - 1) \
    ) AS running (xid) \
    WHERE pg_catalog.pg_visible_in_snapshot(xid::text::xid8, s)";

/// Opens the session. `sql` sees what runs now.
///
/// # Errors
/// `slot-busy` when the snapshot is gone; those of the connections.
pub(super) async fn import(sql: &Sql, target: &Target, snapshot: &str) -> Result<PatientSql> {
    let reader = PatientSql::open(target, "postrider recovery", NO_TIMEOUT).await?;
    let snapshot = slot_manager::quoted_literal(snapshot);
    let statement = format!(
        "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; SET TRANSACTION SNAPSHOT {snapshot}"
    );
    let imported = reader.answer(reader.batch_execute(&statement)).await;
    // The session that exports it may have been ended: the next attempt makes a new one.
    imported.map_err(|error| {
        Error::new(Code::SlotBusy, "the snapshot of the new slot is gone")
            .caused_by(error)
            .hint("no action needed: the relay makes the slot anew")
    })?;
    wait_for_commits(sql, &reader).await?;
    Ok(reader)
}

/// Waits until no transaction runs that the snapshot shows.
async fn wait_for_commits(sql: &Sql, reader: &PatientSql) -> Result<()> {
    let began = Instant::now();
    let mut is_told = false;
    loop {
        let running = answer_within(ANSWER_LIMIT, sql.query_one(RUNNING, &[])).await?;
        let (some, all_from): (Vec<i64>, i64) = (running.get(0), running.get(1));
        let parameters: [&(dyn ToSql + Sync); 2] = [&some, &all_from];
        let asking = reader.query_one(SHOWN, &parameters);
        let shown: i64 = reader.answer(asking).await?.get(0);
        if shown == 0 {
            return Ok(());
        }
        if began.elapsed() >= COMMITTING_LIMIT {
            tracing::warn!(
                code = %Code::SlotBusy, shown,
                hint = "no action needed; if commits hang, see pg_stat_replication for the synchronous \
                        standbys",
                "recovering: transactions wait for a synchronous standby; their rows are read all the same"
            );
            return Ok(());
        }
        if !is_told {
            tracing::info!(shown, "recovering: transactions are just being committed");
            is_told = true;
        }
        tokio::time::sleep(LOOK_INTERVAL).await;
    }
}
