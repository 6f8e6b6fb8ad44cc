//! Defines the position of an event in the log.

use std::fmt;

use decoder::PgTimestamp;
use replication::CommitLsn;

/// The position of an event in the log, by which the relay identifies it. Positions are in the order of
/// the stream. A position is also the primary key of the event's row in `outbox.dispatch`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct EventPosition {
    /// Position of the commit record of the event's transaction.
    pub commit: CommitLsn,
    /// Number of the insert within that transaction, from 1.
    pub ordinal: u32,
}

impl EventPosition {
    /// The position with this commit LSN and ordinal.
    #[cfg(test)]
    pub(crate) fn for_tests(commit: u64, ordinal: u32) -> Self {
        let commit = CommitLsn::new(decoder::Lsn::new(commit));
        Self { commit, ordinal }
    }
}

impl fmt::Display for EventPosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "commit {}, ordinal {}", self.commit.lsn(), self.ordinal)
    }
}

/// Where an event is in the log, and when its transaction was committed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CommittedAt {
    /// The event's position.
    pub position: EventPosition,
    /// When the transaction was committed.
    pub time: PgTimestamp,
}
