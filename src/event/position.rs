//! Defines the position of an event in the WAL.

use std::fmt;

use decoder::PgTimestamp;
use replication::CommitLsn;
use serde::{Serialize, Serializer};

/// WAL records begin at multiples of this number of bytes. So an LSN between two multiples cannot be a commit
/// LSN.
pub(crate) const RECORD_ALIGNMENT: u64 = 8;

/// The position of an event in the WAL, by which the relay identifies the event. Positions sort in commit
/// order, which is the order of the stream. A position is also the primary key of the event's row in
/// `outbox.dispatch`. In JSON it consists of the fields `commit_lsn` and `ordinal`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize)]
pub struct EventPosition {
    /// LSN of the commit record of the event's transaction.
    #[serde(rename = "commit_lsn", serialize_with = "as_text")]
    pub commit: CommitLsn,
    /// Number of the insert within that transaction, starting at 1.
    pub ordinal: u32,
}

impl EventPosition {
    /// Whether the event was read from a table. The WAL position of such an event is unknown, so the event
    /// gets a commit LSN that no commit can have (`capture::positions`).
    pub(crate) fn is_of_a_table(self) -> bool {
        self.commit.lsn().as_u64() % RECORD_ALIGNMENT == RECORD_ALIGNMENT - 1
    }

    /// The position with this commit LSN and ordinal.
    #[cfg(test)]
    pub(crate) fn for_tests(commit: u64, ordinal: u32) -> Self {
        let commit = CommitLsn::new(decoder::Lsn::new(commit));
        Self { commit, ordinal }
    }
}

/// Writes the LSN as PostgreSQL does, such as `16/B374D848`.
fn as_text<S: Serializer>(commit: &CommitLsn, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&commit.lsn())
}

impl fmt::Display for EventPosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "commit {}, ordinal {}", self.commit.lsn(), self.ordinal)
    }
}

/// The position of an event, and when its transaction was committed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CommittedAt {
    /// The event's position.
    pub position: EventPosition,
    /// When the transaction was committed.
    pub time: PgTimestamp,
}
