//! The progress of an unfinished recovery in a captured table. The next recovery leaves out the rows that are
//! already resolved.

use serde::{Deserialize, Serialize};
use slot_manager::{SlotName, quoted_literal};

use crate::error::{Code, Error, Result};
use crate::postgres::Sql;

/// The part of a table that an unfinished recovery has resolved. A recovery reads a table in the order of `seq`. So
/// this part consists of the rows up to some `seq` whose transactions are older than `below`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RecoveryProgress {
    /// A transaction number. All older transactions had ended before the recovery read the table, so the
    /// recovery has seen all of their rows. Rows of later transactions do not count as resolved.
    pub(crate) below: u64,
    /// Of the transactions older than `below`, the rows up to this `seq` are resolved. `None` if all rows of these
    /// transactions are resolved.
    pub(crate) seq: Option<i64>,
    /// The name of the column that numbered the rows when `seq` was recorded. If another column numbers the rows now,
    /// `seq` is not valid.
    pub(crate) column: Option<String>,
    /// The name of the PostgreSQL sequence that fills the column `column`. If another sequence fills it now, `seq`
    /// is not valid.
    pub(crate) numbering: Option<String>,
    /// The OIDs of the partitions (or of the table itself) that the recovery has read, separated by commas.
    pub(crate) partitions: String,
}

impl RecoveryProgress {
    /// Reads the column `recovery_progress`.
    pub(super) fn read(json: Option<&str>) -> Result<Option<Self>> {
        let parsed = json.map(serde_json::from_str).transpose();
        parsed.map_err(|e| {
            let what = "outbox.capture holds an invalid recovery_progress";
            Error::new(Code::PostgresStatement, what).caused_by(e)
        })
    }

    /// Whether the recovery has read at least as far as it had in `earlier`.
    pub(crate) fn is_as_far_as(&self, earlier: &Self) -> bool {
        match (self.seq, earlier.seq) {
            (None, _) => true,
            (Some(_), None) => false,
            (Some(seq), Some(earlier)) => seq >= earlier,
        }
    }
}

/// Records how far a recovery has resolved a table. Does nothing if `walsender` no longer reads the slot,
/// because another session may then hold the slot. Waits for a lock for at most half a second. Both statements
/// are sent in one message and share an implicit transaction, so the lock timeout ends with them.
///
/// # Errors
/// Database errors.
pub(crate) async fn write(
    sql: &Sql,
    (slot, walsender): (&SlotName, i32),
    identity: &str,
    progress: &RecoveryProgress,
) -> Result<()> {
    let slot = quoted_literal(slot.as_str());
    let statements = format!(
        "SET LOCAL lock_timeout = '500ms'; \
         UPDATE outbox.capture SET recovery_progress = {progress}::text::jsonb \
         WHERE identity = {identity} AND slot = {slot} AND EXISTS ( \
             SELECT FROM pg_catalog.pg_replication_slots s \
             WHERE s.slot_name = {slot} AND s.active_pid = {walsender})",
        progress = quoted_literal(&serde_json::json!(progress).to_string()),
        identity = quoted_literal(identity),
    );
    Ok(sql.batch_execute(&statements).await?)
}
