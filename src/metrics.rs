//! Holds the relay's metrics, for Prometheus and for `/status`.
//!
//! The metrics are created once and shared. Cloning them is cheap, and no method waits for IO. Names
//! follow the conventions of Prometheus: the base unit is the last word of the name, and counters end in
//! `_total`.

mod export;
mod process;
mod prometheus_text;
mod topics;

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, UNIX_EPOCH};

use decoder::PgTimestamp;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use slot_manager::Health;

use crate::condition::{
    self, Condition, PruneRuns, RelayFacts, RelayState, StateFacts, Troubles, Verdict,
};
use crate::error::Error;
use crate::server_clock::ServerClock;
pub use prometheus_text::prometheus_text;
pub use topics::TopicFailures;

/// Upper bounds of the latency buckets in seconds, from half a millisecond to ten minutes.
const LATENCY_BUCKETS: [f64; 14] = [
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 30.0, 120.0, 600.0,
];

/// Upper bounds of the buckets for events per publish request. Pub/Sub accepts at most 1,000.
const BATCH_BUCKETS: [f64; 10] = [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0];

/// The label `kind`. Each metric defines its values: for example, the error code of a failed attempt.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct KindLabel {
    /// The label's value.
    pub kind: &'static str,
}

/// A measured value that is absent until it is known.
#[derive(Debug, Clone, Default)]
pub struct OptionalGauge(Arc<Mutex<Option<f64>>>);

impl OptionalGauge {
    /// Sets the value; `None` makes it unknown.
    pub fn set(&self, value: Option<f64>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = value;
    }

    /// The value, if known.
    pub fn get(&self) -> Option<f64> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The health of the slot; unknown while the relay does not read the slot.
#[derive(Debug, Clone, Default)]
pub struct SlotHealth(Arc<Mutex<Option<Health>>>);

impl SlotHealth {
    /// Sets the health; `None` makes it unknown.
    pub fn set(&self, health: Option<Health>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = health;
    }

    /// The health, if known.
    pub fn get(&self) -> Option<Health> {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

/// The commit time of the oldest event without an outcome. [`age_seconds`](Self::age_seconds) computes the
/// age of the event from this time.
#[derive(Debug, Clone)]
pub struct OldestPending {
    committed: Arc<AtomicI64>,
    server_clock: ServerClock,
}

/// Value of `committed` while the commit time is unknown.
const UNKNOWN: i64 = 0;
/// Value of `committed` while every event has its outcome.
const NONE: i64 = -1;

impl OldestPending {
    /// Starts with an unknown commit time. Ages are measured with `server_clock`.
    fn by(server_clock: ServerClock) -> Self {
        Self {
            committed: Arc::default(),
            server_clock,
        }
    }

    /// Sets the commit time of the oldest event without an outcome, if there is one.
    pub fn set(&self, commit_time: Option<PgTimestamp>) {
        self.committed.store(
            commit_time.map_or(NONE, |at| at.as_unix_micros().max(1)),
            Ordering::Relaxed,
        );
    }

    /// Age in seconds of the oldest event without an outcome: 0 if there is none, `None` if unknown. The age is
    /// measured with the server's clock, because the server sets commit times.
    pub fn age_seconds(&self) -> Option<f64> {
        match self.committed.load(Ordering::Relaxed) {
            UNKNOWN => None,
            NONE => Some(0.0),
            micros => {
                let committed = Duration::from_micros(micros.unsigned_abs());
                let now = self.server_clock.now();
                let now = now.duration_since(UNIX_EPOCH).unwrap_or_default();
                Some(now.saturating_sub(committed).as_secs_f64())
            }
        }
    }

    /// Makes the commit time unknown, because the session ends.
    pub fn forget(&self) {
        self.committed.store(UNKNOWN, Ordering::Relaxed);
    }
}

/// The latencies since the last call of [`take_mean`](Self::take_mean). The latency of a request is the time from
/// the commit of its first event to Pub/Sub's answer. A request does not count if its first event already had a
/// dispatch row, as a released event has: its commit may be long ago.
#[derive(Debug, Clone, Default)]
pub struct RecentLatency(Arc<(AtomicU64, AtomicU64)>);

impl RecentLatency {
    /// Adds the latency of one request.
    pub fn add(&self, latency: Duration) {
        let micros = u64::try_from(latency.as_micros()).unwrap_or(u64::MAX);
        self.0.0.fetch_add(1, Ordering::Relaxed);
        self.0.1.fetch_add(micros, Ordering::Relaxed);
    }

    /// Returns the mean of the latencies since the last call, in seconds, or `None` if there was none.
    pub fn take_mean(&self) -> Option<f64> {
        let requests = self.0.0.swap(0, Ordering::Relaxed);
        let micros = self.0.1.swap(0, Ordering::Relaxed);
        (requests > 0).then(|| micros as f64 / requests as f64 / 1e6)
    }
}

/// When something last happened.
#[derive(Debug, Clone, Default)]
pub struct LastTime(Arc<Mutex<Option<Instant>>>);

impl LastTime {
    /// Sets the time to now.
    pub fn now(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    pub(crate) fn forget(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Time since the last call of [`now`](Self::now). `None` if there was no call since the start, or since
    /// the last `forget`.
    pub fn age(&self) -> Option<Duration> {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .map(|at| at.elapsed())
    }
}

/// All counters and gauges.
#[derive(Debug, Clone)]
#[allow(missing_docs, reason = "each is described where it is registered")]
pub struct Metrics {
    pub events_read: Counter,
    pub events_published: Counter,
    pub events_skipped: Counter,
    pub events_recorded: Counter,
    pub events_from_table: Counter,
    pub recoveries: Family<KindLabel, Counter>,
    pub rows_pruned: Family<KindLabel, Counter>,
    pub publish_requests: Counter,
    pub publish_failures: Family<KindLabel, Counter>,
    pub topic_failures: TopicFailures,
    pub unexpected_changes: Family<KindLabel, Counter>,
    pub events_quarantined: Family<KindLabel, Counter>,
    pub blocked_keys: OptionalGauge,
    pub events_in_quarantine: OptionalGauge,
    pub sessions: Counter,
    pub received_bytes: Counter,
    pub in_flight_bytes: Gauge,
    pub in_flight_requests: Gauge,
    pub lanes: Gauge,
    pub lanes_waiting: Gauge,
    pub holds_slot: Gauge,
    pub publication_ok: OptionalGauge,
    /// 1 while audits fail, 0 after a successful one.
    pub audit_failing: OptionalGauge,
    /// The health of the slot when the relay last read it.
    pub slot_health: SlotHealth,
    pub lag_bytes: OptionalGauge,
    /// Number of events without an outcome: the events in memory, plus an estimate of the unread events of the
    /// transaction that the relay is reading from the stream.
    pub unresolved_events: OptionalGauge,
    pub oldest_pending: OldestPending,
    pub server_clock: ServerClock,
    pub retained_bytes: OptionalGauge,
    pub headroom_bytes: OptionalGauge,
    /// Estimated seconds until the session has read and published the backlog.
    pub caught_up_in: OptionalGauge,
    /// When Pub/Sub last stored a request.
    pub last_published: LastTime,
    /// Present and recent problems of delivery.
    pub troubles: Troubles,
    /// How the latest pruning runs of the relay ended.
    pub prune_runs: PruneRuns,
    pub latency: Histogram,
    pub batch_events: Histogram,
    /// Number of spans of events that were started, exported, or failed to export.
    pub trace_spans: Family<KindLabel, Counter>,
    /// The latencies since the last sample of the history, for the graphs on the page for operators.
    pub recent_latency: RecentLatency,
    /// When the last status message was sent to PostgreSQL; `/livez` checks its age.
    pub last_status: LastTime,
}

impl Metrics {
    /// Returns a number that grows whenever an event gets an outcome.
    pub(crate) fn delivered(&self) -> u64 {
        self.events_published.get() + self.events_recorded.get()
    }

    /// Age in seconds of the oldest event without an outcome. Returns 0 if there is no such event, and `None` if the
    /// age is unknown. The age is also unknown if the stream may lack rows that the relay has not found yet:
    ///
    /// - The publication is wrong, or the relay cannot check the publication.
    /// - The stream may have left out rows, and no audit has looked for these rows.
    pub(crate) fn lag_seconds(&self) -> Option<f64> {
        let has_gap = self.troubles.auditing().is_some_and(|audit| audit.has_gap);
        if has_gap || self.troubles.publication().is_some() {
            return None;
        }
        self.oldest_pending.age_seconds()
    }

    /// Notes that audits have failed since the time `since`. `has_gap` says whether the stream may have left out
    /// rows.
    pub(crate) fn audit_fails(&self, error: &Error, since: Instant, has_gap: bool) {
        self.audit_failing.set(Some(1.0));
        self.troubles.cannot_audit(error, since, has_gap);
    }

    /// Notes that the stream may have left out rows, and that no audit has looked for them yet.
    pub(crate) fn gap_is_seen(&self) {
        if self.troubles.auditing().is_none() {
            self.audit_failing.set(None);
            self.troubles.sees_gap();
        }
    }

    /// Notes that no audit has failed for a while, so audits no longer count as failing. It is unknown whether they
    /// work, because none has succeeded since the last failure.
    pub(crate) fn audit_is_unknown(&self) {
        self.audit_failing.set(None);
        self.troubles.can_audit();
    }

    /// Notes that an audit has succeeded.
    pub(crate) fn audit_succeeded(&self) {
        self.audit_failing.set(Some(0.0));
        self.troubles.can_audit();
    }

    /// Returns the relay's present condition.
    pub fn condition(&self, state: &RelayState) -> Condition {
        let server_time = self.server_clock.now().duration_since(UNIX_EPOCH);
        let server_time = server_time.unwrap_or_default();
        let seconds = |gauge: Option<f64>| Duration::try_from_secs_f64(gauge?).ok();
        let facts = RelayFacts {
            phase: state.phase_since(),
            topics: self.troubles.topics(),
            recording: self.troubles.recording(),
            publication: self.troubles.publication(),
            stream: self.troubles.stream(),
            auditing: self.troubles.auditing(),
            opening: self.troubles.opening(),
            lag_bytes: self.lag_bytes.get().map(|bytes| bytes as u64),
            oldest: seconds(self.oldest_pending.age_seconds()),
            caught_up_in: seconds(self.caught_up_in.get()),
            server_micros: i64::try_from(server_time.as_micros()).unwrap_or(i64::MAX),
        };
        condition::judge(&facts, Instant::now())
    }

    /// Returns the state to show, which depends on the relay's condition and on the health of its slot.
    pub fn verdict(&self, condition: &Condition) -> Verdict {
        let health = self.slot_health.get();
        // Check both numbers. Bad events can exist without a blocked key, because an event without an
        // ordering key blocks no key, and with `on_bad_event = quarantine_event` no event blocks its key.
        let quarantine = [&self.blocked_keys, &self.events_in_quarantine];
        let has_some = |gauge: &&OptionalGauge| gauge.get().is_some_and(|count| count > 0.0);
        condition::decide(StateFacts {
            health: health.as_ref(),
            condition: Some(condition),
            has_quarantine: quarantine.iter().any(has_some),
            ..StateFacts::default()
        })
    }

    /// Resets the values that only the holder of the slot can know.
    pub(crate) fn forget_session(&self) {
        for nothing in [
            &self.holds_slot,
            &self.in_flight_bytes,
            &self.in_flight_requests,
            &self.lanes,
            &self.lanes_waiting,
        ] {
            nothing.set(0);
        }
        for unknown in [
            &self.publication_ok,
            &self.audit_failing,
            &self.blocked_keys,
            &self.events_in_quarantine,
            &self.lag_bytes,
            &self.retained_bytes,
            &self.headroom_bytes,
            &self.caught_up_in,
            &self.unresolved_events,
        ] {
            unknown.set(None);
        }
        self.slot_health.set(None);
        self.last_status.forget();
        self.troubles.forget();
        self.prune_runs.forget();
        self.oldest_pending.forget();
        self.server_clock.forget();
    }
}

impl Default for Metrics {
    fn default() -> Self {
        let server_clock = ServerClock::default();
        Self {
            events_read: Counter::default(),
            events_published: Counter::default(),
            events_skipped: Counter::default(),
            events_recorded: Counter::default(),
            events_from_table: Counter::default(),
            recoveries: Family::default(),
            rows_pruned: Family::default(),
            publish_requests: Counter::default(),
            publish_failures: Family::default(),
            topic_failures: TopicFailures::default(),
            unexpected_changes: Family::default(),
            events_quarantined: Family::default(),
            blocked_keys: OptionalGauge::default(),
            events_in_quarantine: OptionalGauge::default(),
            sessions: Counter::default(),
            received_bytes: Counter::default(),
            in_flight_bytes: Gauge::default(),
            in_flight_requests: Gauge::default(),
            lanes: Gauge::default(),
            lanes_waiting: Gauge::default(),
            holds_slot: Gauge::default(),
            publication_ok: OptionalGauge::default(),
            audit_failing: OptionalGauge::default(),
            slot_health: SlotHealth::default(),
            lag_bytes: OptionalGauge::default(),
            unresolved_events: OptionalGauge::default(),
            oldest_pending: OldestPending::by(server_clock.clone()),
            server_clock,
            retained_bytes: OptionalGauge::default(),
            headroom_bytes: OptionalGauge::default(),
            caught_up_in: OptionalGauge::default(),
            last_published: LastTime::default(),
            troubles: Troubles::default(),
            prune_runs: PruneRuns::default(),
            latency: Histogram::new(LATENCY_BUCKETS),
            batch_events: Histogram::new(BATCH_BUCKETS),
            trace_spans: Family::default(),
            recent_latency: RecentLatency::default(),
            last_status: LastTime::default(),
        }
    }
}

#[cfg(test)]
mod tests;
