//! Gives positions (commit LSN and ordinal) to events that come from a table. The position of such an event
//! in the WAL is unknown, so the event gets a commit LSN that no commit can have. WAL records are aligned to
//! 8 bytes, but this LSN is not a multiple of 8.

use decoder::Lsn;
use replication::CommitLsn;

use crate::event::RECORD_ALIGNMENT;

/// Returns the commit LSN for table events that were committed before `position`. This LSN is just below
/// `position` and not a multiple of 8, so no commit can have it. The result is at least 7, even if `position`
/// is lower.
pub(crate) fn commit_before(position: Lsn) -> CommitLsn {
    let aligned = position.as_u64() / RECORD_ALIGNMENT * RECORD_ALIGNMENT;
    CommitLsn::new(Lsn::new(aligned.max(RECORD_ALIGNMENT) - 1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::EventPosition;

    #[test]
    fn events_from_a_table_get_a_commit_lsn_that_no_commit_can_have() {
        let is_of_a_table = |commit| EventPosition { commit, ordinal: 1 }.is_of_a_table();
        for position in [8, 0x16_B374_D848, 0x16_B374_D84C] {
            let commit = commit_before(Lsn::new(position));
            assert!(commit.lsn() < Lsn::new(position));
            assert!(is_of_a_table(commit));
        }
        assert!(!is_of_a_table(CommitLsn::new(Lsn::new(0x16_B374_D848))));
    }
}
