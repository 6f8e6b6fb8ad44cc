//! What came out, in figures; also the form of `--json`.

use std::collections::BTreeMap;

use serde::Serialize;
use slot_manager::Slot;

use super::ledger::Totals;
use super::verdict::Verdict;

/// The whole demonstration in figures.
#[derive(Debug, Serialize)]
pub(super) struct Summary {
    /// Committed events, as counted in the database.
    pub(super) events: u64,
    pub(super) orders: u32,
    /// As counted by writers and subscriber.
    pub(super) totals: Totals,
    pub(super) verdict: Verdict,
    /// Published, but without a dispatch row, when the relay was killed.
    pub(super) published_unrecorded: u64,
    /// Events that waited when the relay started again.
    pub(super) backlog: u64,
    /// How long it took to deliver the backlog.
    pub(super) caught_up_seconds: Option<f64>,
    /// Delivered per second before the kill.
    pub(super) steady_per_second: f64,
    /// From COMMIT to the subscriber, before the kill.
    pub(super) p50_ms: Option<f64>,
    pub(super) p99_ms: Option<f64>,
    /// Rows of `outbox.dispatch` by state.
    pub(super) dispatch: BTreeMap<String, u64>,
    pub(super) slot: Slot,
}
