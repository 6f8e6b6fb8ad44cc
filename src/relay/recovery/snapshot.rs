//! What a new slot will not bring: the transactions that had ended at its consistent point.
//!
//! That snapshot is made from the log: it shows a transaction whose commit stands there, also before
//! the server process that wrote it has noted it in `pg_xact`, or while it waits for a synchronous
//! standby. Other sessions see its rows only then, so reading waits for that.
//! (Sources: `RecordTransactionCommit`, `SnapBuildInitialSnapshot`.)

use std::time::{Duration, Instant};

use crate::capture::Snapshot;
use crate::capture::record::current_snapshot;
use crate::error::{Code, Error, Result};
use crate::postgres::{Sql, Target, answer_within, connect};
use crate::relay::session::{ANSWER_LIMIT, STATEMENT_TIMEOUT};

const LOOK_INTERVAL: Duration = Duration::from_millis(10);

/// A commit that takes longer waits for a synchronous standby.
const TOLD_AFTER: Duration = Duration::from_secs(10);

/// Reads the snapshot that the session of a new slot exports.
///
/// # Errors
/// `slot-busy` when the snapshot is gone; those of the connections.
pub(super) async fn exported(target: &Target, name: &str) -> Result<Snapshot> {
    let sql = connect(target, "postrider recovery", STATEMENT_TIMEOUT).await?;
    let name = slot_manager::quoted_literal(name);
    let statement =
        format!("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; SET TRANSACTION SNAPSHOT {name}");
    let imported = answer_within(ANSWER_LIMIT, sql.batch_execute(&statement)).await;
    // The session that exports it may have been ended: the next attempt makes a new one.
    imported.map_err(|error| {
        Error::new(Code::SlotBusy, "the snapshot of the new slot is gone")
            .caused_by(error)
            .hint("no action needed: the relay makes the slot anew")
    })?;
    answer_within(ANSWER_LIMIT, current_snapshot(&*sql)).await
}

/// Waits until other sessions see every transaction that the snapshot shows.
///
/// # Errors
/// Those of the connection.
pub(super) async fn wait_until_visible(sql: &Sql, snapshot: &Snapshot) -> Result<()> {
    let mut told = Instant::now();
    let mut is_first = true;
    loop {
        let now = answer_within(ANSWER_LIMIT, current_snapshot(&**sql)).await?;
        if !snapshot.is_ahead_of(&now) {
            return Ok(());
        }
        if std::mem::take(&mut is_first) {
            tracing::info!("recovering: transactions are just being committed");
        }
        if told.elapsed() >= TOLD_AFTER {
            told = Instant::now();
            tracing::warn!(
                code = %Code::SlotBusy,
                hint = "see pg_stat_replication for the synchronous standbys; the relay goes on as \
                        soon as the commits end",
                "recovering: transactions wait for a synchronous standby, and their rows with them"
            );
        }
        tokio::time::sleep(LOOK_INTERVAL).await;
    }
}
