//! Whether another relay has taken the slot over, and sends again what we have not recorded by now.
//!
//! While our walsender reads the slot, no other relay serves it: what we record then is confirmed,
//! so it must be recorded. A successor that is gone again no longer reads the slot, but it has left
//! its name in outbox.relay, and may have sent what we would record.

/// Asked once per batch: the process that reads the slot, and whether another instance has begun to
/// serve it. `$1` is the slot, `$2` our instance.
pub(super) const WHO_SERVES: &str = "\
    SELECT (SELECT s.active_pid FROM pg_catalog.pg_replication_slots s \
            WHERE s.slot_name = $1::text), \
        EXISTS (SELECT FROM outbox.relay r WHERE r.slot = $1::text AND r.instance <> $2::text)";

/// Judges the answer to [`WHO_SERVES`]. `walsender` is ours, 0 when it is not known.
pub(super) fn is_there(
    reads_the_slot: Option<i32>,
    another_has_begun: bool,
    walsender: i32,
) -> bool {
    match reads_the_slot {
        Some(pid) => walsender != 0 && pid != walsender,
        None => another_has_begun,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_process_that_reads_the_slot_is_a_successor() {
        assert!(is_there(Some(8), true, 7));
        assert!(is_there(Some(8), false, 7));
    }

    #[test]
    fn while_our_walsender_reads_the_slot_there_is_no_successor() {
        assert!(!is_there(Some(7), false, 7));
        assert!(!is_there(Some(7), true, 7));
    }

    #[test]
    fn when_nobody_reads_the_slot_the_name_in_the_table_decides() {
        assert!(is_there(None, true, 7));
        assert!(!is_there(None, false, 7));
    }

    #[test]
    fn an_unknown_walsender_is_not_taken_for_anothers() {
        assert!(!is_there(Some(8), true, 0));
        assert!(is_there(None, true, 0));
    }
}
