//! Waits until the previous relay no longer writes to the dispatch table.
//!
//! PostgreSQL frees the slot when the previous relay's walsender ends, even if that relay still has a
//! dispatch transaction open. If we read the table before that transaction commits, we publish its
//! events again. A transaction that begins after we have the slot records nothing, because the writer
//! checks who has the slot (`successor`). If the previous relay or the network hangs, its transaction
//! could stay open for hours, so we terminate its session.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use md5::{Digest, Md5};
use slot_manager::SlotName;
use slot_manager::activity::{self, OtherRolesSession};

use super::slot_reader::SlotReader;
use crate::error::Result;
use crate::postgres::Sql;

const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// How long a terminated session may take to end.
const END_LIMIT: Duration = Duration::from_secs(2);

/// Maximum length of an `application_name` in bytes. PostgreSQL truncates longer names.
const NAME_BYTES: usize = 63;

/// The `application_name` of this slot's writer. If the name would be too long, a hash replaces its end,
/// so that slots with a common prefix get different names.
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

/// Proof that the session has waited for the previous relay. The previous relay adds no more records,
/// unless a warning in the log says that it may. The session needs this proof to read which events are
/// recorded.
#[derive(Debug)]
pub(crate) struct PredecessorGone(());

impl PredecessorGone {
    /// Waits as [`wait_for_predecessor`] does. Needs the proof that our walsender reads the slot, because
    /// from then on no other relay begins to record anything.
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

/// Waits until no other writer of this slot has an open transaction. Any role can use the name of a
/// writer, so this function waits only for sessions of our own role. After `limit`, it terminates the
/// sessions that still have an open transaction, and PostgreSQL rolls their transactions back.
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
        if activity::busy_sessions(sql, name).await? == 0 {
            return Ok(true);
        }
        if began.elapsed() >= limit {
            return Ok(false);
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Warns, once per process, if another role has a session with the name of our writer.
async fn warn_of_strangers(sql: &Sql, name: &str) -> Result<()> {
    static WARNED: AtomicBool = AtomicBool::new(false);
    let Some(stranger) = activity::session_of_another_role(sql, name).await? else {
        return Ok(());
    };
    if !WARNED.swap(true, Ordering::Relaxed) {
        let OtherRolesSession { pid, role } = stranger;
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
