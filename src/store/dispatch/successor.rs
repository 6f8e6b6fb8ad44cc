//! Fencing of the old relay: decides whether another relay has taken over the slot. If one has, it publishes
//! our unrecorded events again, so we must no longer record them.
//!
//! - If our walsender reads the slot, no other relay has taken over. We are going to confirm the events, so we
//!   must record their outcomes first.
//! - If another process reads the slot, another relay has taken over.
//! - If nobody reads the slot, another relay may have taken over and stopped again. Its name is then still in
//!   `outbox.relay`. It may have published the events that we are about to record, so it counts as a successor.

/// A query that returns which process reads the slot, and whether another instance has begun to serve the
/// slot. The writer runs the query in every transaction. `$1` is the slot, `$2` our instance.
pub(super) const WHO_SERVES: &str = "\
    SELECT (SELECT s.active_pid FROM pg_catalog.pg_replication_slots s \
            WHERE s.slot_name = $1::text), \
        EXISTS (SELECT FROM outbox.relay r WHERE r.slot = $1::text AND r.instance <> $2::text)";

/// Whether the result of [`WHO_SERVES`] means that another relay has taken over. `walsender` is the
/// pid of our own walsender, or 0 if the pid is unknown.
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
    fn another_process_reading_the_slot_is_a_successor() {
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
    fn if_our_walsender_is_unknown_a_reader_does_not_count_as_a_successor() {
        assert!(!is_there(Some(8), true, 0));
        assert!(is_there(None, true, 0));
    }
}
