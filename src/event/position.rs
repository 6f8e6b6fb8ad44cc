//! Defines the position of an event in the log.

use std::fmt;

use decoder::{Lsn, PgTimestamp};

/// The position of an event in the log, by which the relay identifies it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct EventPosition {
    /// Position of the commit record of the event's transaction.
    pub commit_lsn: Lsn,
    /// Number of the insert within that transaction, from 1.
    pub ordinal: u32,
    /// When the transaction was committed.
    pub commit_time: PgTimestamp,
}

impl fmt::Display for EventPosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "commit {}, ordinal {}", self.commit_lsn, self.ordinal)
    }
}
