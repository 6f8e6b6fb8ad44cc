//! The results of the demonstration: as rows for a terminal, and as the JSON of `--json`.

use std::collections::BTreeMap;

use serde::Serialize;
use slot_manager::Slot;

use crate::figures::{grouped, milliseconds, rounded, size};
use crate::ledger::Totals;
use crate::verdict::Verdict;

/// The results of the demonstration.
#[derive(Debug, Serialize)]
pub(crate) struct Summary {
    /// The number of committed events, counted in the database.
    pub(crate) events: u64,
    pub(crate) orders: u32,
    /// What the writers and the subscriber counted.
    pub(crate) totals: Totals,
    pub(crate) verdict: Verdict,
    /// Events that were published but had no dispatch row when the second relay started.
    pub(crate) published_unrecorded: u64,
    /// Events that were committed but not delivered when the second relay started.
    pub(crate) backlog: u64,
    /// Seconds from the start of the second relay until the backlog was delivered. `None` if the
    /// backlog was not delivered completely.
    pub(crate) caught_up_seconds: Option<f64>,
    /// Events delivered per second before the kill.
    pub(crate) steady_per_second: f64,
    /// Median latency before the kill, from COMMIT to the subscriber, in milliseconds. `None` if no event
    /// arrived before the kill.
    pub(crate) p50_ms: Option<f64>,
    /// The 99th percentile of the same latencies, in milliseconds.
    pub(crate) p99_ms: Option<f64>,
    /// Rows of `outbox.dispatch`, by state.
    pub(crate) dispatch: BTreeMap<String, u64>,
    pub(crate) slot: Slot,
}

impl Summary {
    /// The names and values of the results, in the order in which they are printed.
    pub(crate) fn rows(&self) -> Vec<(&'static str, String)> {
        let Self {
            totals,
            verdict,
            slot,
            ..
        } = self;
        let transactions = |events, count| {
            format!(
                "{} events in {} transactions",
                grouped(events),
                grouped(count)
            )
        };
        let committed = transactions(self.events, totals.transactions);
        let rolled_back = transactions(totals.rolled_back, totals.rolled_back_transactions);
        let arrived = grouped(verdict.never_committed);
        let state = if slot.active { "active" } else { "inactive" };
        let confirmed = slot
            .confirmed_flush_lsn
            .map_or("-".into(), |lsn| lsn.to_string());
        let lag = size(slot.lag_bytes.unwrap_or_default());
        vec![
            ("committed", committed),
            (
                "rolled back",
                format!("{rolled_back}; {arrived} of them arrived"),
            ),
            (
                "delivered",
                format!(
                    "{} events of {} orders",
                    grouped(totals.delivered),
                    self.orders
                ),
            ),
            ("lost", grouped(verdict.lost)),
            ("out of order", grouped(verdict.out_of_order)),
            ("delivered twice", self.delivered_twice()),
            ("latency", self.latency()),
            ("throughput", self.throughput()),
            ("outbox.dispatch", self.recorded()),
            (
                "slot",
                format!(
                    "{}, {state}, confirmed {confirmed}, lag {lag}",
                    slot.slot_name
                ),
            ),
        ]
    }

    fn delivered_twice(&self) -> String {
        let repeated = grouped(self.totals.repeated);
        match self.published_unrecorded {
            0 => repeated,
            count => format!(
                "{repeated}; at the kill {} were published but not recorded\n{:19}\
                 (consumers drop repeats by the attribute event_id)",
                grouped(count),
                ""
            ),
        }
    }

    fn latency(&self) -> String {
        let [p50, p99] = [self.p50_ms, self.p99_ms].map(|ms| ms.map_or("-".into(), milliseconds));
        format!("p50 {p50}, p99 {p99} from COMMIT to the subscriber, before the kill")
    }

    fn throughput(&self) -> String {
        let steady = grouped(rounded(self.steady_per_second));
        let backlog = grouped(self.backlog);
        let caught_up = match self.caught_up_seconds {
            Some(seconds) => format!("backlog of {backlog} delivered in {seconds:.1} s"),
            None => format!("backlog of {backlog} not delivered in full"),
        };
        let build = if cfg!(debug_assertions) {
            " (debug build)"
        } else {
            ""
        };
        format!("{steady} events/s before the kill; the {caught_up}{build}")
    }

    fn recorded(&self) -> String {
        let states = self.dispatch.iter();
        let states: Vec<String> = states
            .map(|(state, count)| format!("{} {state}", grouped(*count)))
            .collect();
        let missing = grouped(self.verdict.unrecorded);
        format!("{}; {missing} without a row", states.join(", "))
    }
}
