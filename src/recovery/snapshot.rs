//! Reads the snapshot of a new slot, and waits until other sessions see the same transactions. The
//! snapshot shows the transactions that had ended at the slot's consistent point. The slot does not
//! stream these transactions.
//!
//! PostgreSQL builds this snapshot from the WAL. The snapshot shows a transaction as soon as its commit
//! record is in the WAL, even if the committing process has not recorded the commit in `pg_xact` yet, or
//! still waits for a synchronous standby server. Other sessions see the transaction's rows only after
//! both steps, so we wait before we read the tables. (Sources: `RecordTransactionCommit`,
//! `SnapBuildInitialSnapshot`.)

use std::time::{Duration, Instant};

use crate::error::{Code, Error, Result};
use crate::postgres::{Snapshot, Sql, Target, connect, current_snapshot};

/// Statement timeout for importing the snapshot.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(60);

const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Time after which the relay logs a warning about a slow commit, and time between two such warnings. A
/// commit that takes this long probably waits for a synchronous standby server.
const TOLD_AFTER: Duration = Duration::from_secs(10);

/// Returns the snapshot of the new slot. The replication session that has created the slot has exported the snapshot
/// under the name `name`.
///
/// # Errors
/// `slot-busy` when the snapshot is gone, because that session has ended; connection errors.
pub(super) async fn exported(target: &Target, name: &str) -> Result<Snapshot> {
    let sql = connect(target, "postrider recovery", STATEMENT_TIMEOUT).await?;
    let name = slot_manager::quoted_literal(name);
    let statement =
        format!("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; SET TRANSACTION SNAPSHOT {name}");
    let imported = sql.batch_execute(&statement).await;
    // If the session that exported the snapshot has ended, the next attempt creates a new slot.
    imported.map_err(|error| {
        Error::new(Code::SlotBusy, "the snapshot of the new slot is gone")
            .caused_by(error)
            .hint("no action needed: the relay creates the slot again")
    })?;
    current_snapshot(&*sql).await
}

/// Waits until other sessions see every transaction that the snapshot shows.
///
/// # Errors
/// Connection errors.
pub(super) async fn wait_until_visible(sql: &Sql, snapshot: &Snapshot) -> Result<()> {
    let began = Instant::now();
    let mut told = began;
    let mut is_first = true;
    loop {
        let now = current_snapshot(&**sql).await?;
        if !snapshot.is_ahead_of(&now) {
            return Ok(());
        }
        if std::mem::take(&mut is_first) {
            tracing::info!("recovering: waiting for transactions that are just being committed");
        }
        if told.elapsed() >= TOLD_AFTER {
            told = Instant::now();
            tracing::warn!(
                code = %Code::SlotBusy,
                hint = "see pg_stat_replication for the synchronous standbys; the relay continues as \
                        soon as the commits end",
                waited_s = began.elapsed().as_secs(),
                "recovering: cannot read the rows of transactions that wait for a synchronous standby"
            );
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}
