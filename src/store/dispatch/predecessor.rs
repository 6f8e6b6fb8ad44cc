//! Fencing by the new relay: waits until the previous relay no longer writes to the dispatch table.
//!
//! PostgreSQL frees the slot when the previous relay's walsender ends, even if that relay still has a
//! dispatch transaction open. If we read the table before that transaction commits, we publish its events
//! again. A transaction that begins after we have the slot records nothing, because the writer checks who
//! has the slot (`successor`). If the previous relay hangs or its network is down, its transaction could
//! stay open for hours, so we terminate its session after a while.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use md5::{Digest, Md5};
use slot_manager::SlotName;
use slot_manager::activity::{self, StrangersSession};

use super::slot_reader::SlotReader;
use crate::error::Result;
use crate::postgres::Sql;

const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Maximum time to wait for a terminated session to end. After that, our session continues, and logs that
/// events may be published twice.
const END_LIMIT: Duration = Duration::from_secs(2);

/// The table whose locks show the open transactions of writers with another role than ours. PostgreSQL may hide the
/// state of their sessions from our role, but not their locks. Every transaction of a writer begins by reading this
/// table, so the transaction holds a lock on the table until it ends. We ignore the locks of roles that may not update
/// the table, because they are not the roles of relays.
const CHECKED: &str = "outbox.relay";

/// Maximum length of an `application_name`, in bytes: PostgreSQL truncates longer names.
const NAME_BYTES: usize = 63;

/// Returns the `application_name` of this slot's dispatch writer. If the name would be too long, a hash
/// replaces its end, so that slots with a common prefix still get different names.
pub(super) fn writer_name(slot: &SlotName) -> String {
    let name = format!("postrider dispatch {slot}");
    if name.len() <= NAME_BYTES {
        return name;
    }
    let hash = Md5::digest(slot.as_str());
    let hash = u64::from_be_bytes(hash[..8].try_into().expect("invariant: MD5 has 16 bytes"));
    let ending = format!("#{hash:016x}");
    let start = &name[..NAME_BYTES - ending.len()];
    [start, &ending].concat()
}

/// Proof that the session has waited for the previous relay to stop adding records. The session needs this proof
/// to read which events are recorded. If the wait reached its limit, the previous relay may still be adding
/// records, and this process has logged a warning that events may be published twice.
#[derive(Debug)]
pub(crate) struct PredecessorGone(());

impl PredecessorGone {
    /// Waits as [`wait_for_predecessor`] does. `_ours` proves that our walsender reads the slot, so no other relay
    /// can begin to record outcomes after the wait.
    ///
    /// # Errors
    /// Database errors.
    pub(crate) async fn wait(
        sql: &Sql,
        slot: &SlotName,
        _ours: &SlotReader,
        limit: Duration,
    ) -> Result<Self> {
        wait_for_predecessor(sql, slot, limit).await?;
        Ok(Self(()))
    }
}

/// Waits until no other writer of this slot has an open transaction. Any role can use a writer's name, so
/// this function waits only for roles that may write the relay's tables. After `limit`, it terminates the
/// sessions of our own role that still have an open transaction, and PostgreSQL rolls their transactions back.
/// It terminates no session of another role, because usually it has no right to. If a transaction is open even
/// after [`END_LIMIT`], this function logs a warning and returns.
///
/// # Errors
/// Database errors.
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
        "terminating a transaction that the previous relay has left open on outbox.dispatch"
    );
    activity::end_busy_sessions(sql, &name).await?;
    if !are_done_within(sql, &name, END_LIMIT).await? {
        tracing::warn!(
            %slot,
            "the previous relay is still recording outcomes: events may be published twice"
        );
    }
    Ok(())
}

async fn are_done_within(sql: &Sql, name: &str, limit: Duration) -> Result<bool> {
    let began = Instant::now();
    loop {
        if activity::busy_sessions(sql, name, CHECKED).await? == 0 {
            return Ok(true);
        }
        if began.elapsed() >= limit {
            return Ok(false);
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Warns, once per process, if a role that is no relay has a session with the name of our writer. We do not wait
/// for such a session.
async fn warn_of_strangers(sql: &Sql, name: &str) -> Result<()> {
    static WARNED: AtomicBool = AtomicBool::new(false);
    let Some(stranger) = activity::session_of_a_stranger(sql, name, CHECKED).await? else {
        return Ok(());
    };
    if !WARNED.swap(true, Ordering::Relaxed) {
        let StrangersSession { pid, role } = stranger;
        tracing::warn!(
            pid,
            role,
            "another role has a session under the name of a relay: not waiting for it"
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_with_a_common_prefix_get_distinct_writer_names_within_63_bytes() {
        let name = |slot: String| writer_name(&slot.parse().unwrap());
        assert_eq!(name("shop".into()), "postrider dispatch shop");
        let start = "s".repeat(44);
        let names: Vec<String> = ["", "_a", "_b", "_a_longer_suffix"]
            .map(|end| name(format!("{start}{end}")))
            .into();
        for (n, one) in names.iter().enumerate() {
            assert!(one.len() <= NAME_BYTES, "{one}");
            assert!(!names[..n].contains(one), "{names:?}");
        }
    }
}
