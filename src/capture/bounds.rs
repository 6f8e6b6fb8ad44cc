//! What the stream needs to know about a captured table: which of its rows were handled earlier.
//!
//! A row that was moved between partitions, copied or restored arrives in the stream as an insert.
//! It keeps the `inserted_xid` of the transaction that wrote it first. Whether such a row is an
//! event is decided by the same rule as for rows that are read from the table.

use std::sync::atomic::{AtomicU64, Ordering};

use super::claim::Captured;
use crate::postgres::Snapshot;

/// The bounds of one table. The floor rises while a session runs.
#[derive(Debug)]
pub(crate) struct Bounds {
    since: Option<Snapshot>,
    floor: AtomicU64,
    recorded_from: u64,
}

impl Bounds {
    pub(crate) fn of(captured: &Captured) -> Self {
        Self {
            since: captured.record.since.clone(),
            floor: AtomicU64::new(captured.record.floor),
            recorded_from: captured.record.recorded_from,
        }
    }

    /// Notes that all rows of older transactions are resolved.
    pub(crate) fn raise_floor(&self, floor: u64) {
        self.floor.fetch_max(floor, Ordering::Relaxed);
    }

    /// Whether a row that this transaction inserted is older than capturing.
    pub(crate) fn is_from_before(&self, inserted_xid: u64) -> bool {
        let since = self.since.as_ref();
        since.is_some_and(|since| since.shows(inserted_xid))
    }

    /// Whether rows of this transaction may have been published without a record.
    pub(crate) fn may_lack_a_record(&self, inserted_xid: u64) -> bool {
        inserted_xid < self.recorded_from
    }

    /// Whether all rows of this transaction that were in the table are resolved.
    pub(crate) fn is_resolved(&self, inserted_xid: u64) -> bool {
        inserted_xid < self.floor.load(Ordering::Relaxed)
    }
}
