//! The bounds of a captured table, by which the relay recognises rows of the stream that it has handled before.
//!
//! A row that was moved between partitions, copied or restored arrives in the stream as an insert. Such a row
//! keeps the `inserted_xid` of the transaction that wrote the row first. Comparing this transaction id with
//! the bounds shows whether the row was handled. The same bounds apply to rows that are read from the table.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::postgres::Snapshot;
use crate::store::capture_record::CaptureRecord;

/// The bounds of one table. The auditor raises the floor while the pipeline uses it.
#[derive(Debug)]
pub(crate) struct Bounds {
    since: Option<Snapshot>,
    floor: AtomicU64,
    recorded_from: u64,
}

impl Bounds {
    pub(crate) fn of(record: &CaptureRecord) -> Self {
        Self {
            since: record.since.clone(),
            floor: AtomicU64::new(record.floor),
            recorded_from: record.recorded_from,
        }
    }

    /// Notes that all rows of transactions before `floor` are resolved.
    pub(crate) fn raise_floor(&self, floor: u64) {
        self.floor.fetch_max(floor, Ordering::Relaxed);
    }

    /// Whether rows of this transaction were committed before the capture of the table began.
    pub(crate) fn is_from_before(&self, inserted_xid: u64) -> bool {
        let since = self.since.as_ref();
        since.is_some_and(|since| since.shows(inserted_xid))
    }

    /// Whether rows of this transaction may have been published without a record.
    pub(crate) fn may_lack_a_record(&self, inserted_xid: u64) -> bool {
        inserted_xid < self.recorded_from
    }

    /// Whether all rows that this transaction wrote to the table are resolved.
    pub(crate) fn is_resolved(&self, inserted_xid: u64) -> bool {
        inserted_xid < self.floor.load(Ordering::Relaxed)
    }
}
