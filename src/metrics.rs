//! The relay's metrics, for Prometheus and for `/status`.
//!
//! Created once and shared. Cloning is cheap, and nothing here waits. Names follow Prometheus: base
//! units last, `_total` for counters.

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
use prometheus_client::registry::Registry;

use crate::condition::{self, Condition, Facts, RelayState, Troubles};
use crate::server_clock::ServerClock;
pub use topics::TopicFailures;

/// Upper bounds of the latency buckets, seconds: from half a millisecond to ten minutes.
const LATENCY_BUCKETS: [f64; 14] = [
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 30.0, 120.0, 600.0,
];

/// The label `kind`: the class of a failed attempt, the kind of an unexpected change, and so on.
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

/// The commit time of the oldest event without an outcome, to compute its age.
#[derive(Debug, Clone)]
pub struct OldestPending {
    committed: Arc<AtomicI64>,
    server_clock: ServerClock,
}

/// No session has set a commit time yet.
const UNKNOWN: i64 = 0;
/// Nothing is pending.
const NONE: i64 = -1;

impl OldestPending {
    /// Starts with an unknown commit time. Ages are measured by `server_clock`.
    fn by(server_clock: ServerClock) -> Self {
        Self {
            committed: Arc::default(),
            server_clock,
        }
    }

    /// Sets the commit time of the oldest pending transaction, if there is one.
    pub fn set(&self, commit_time: Option<PgTimestamp>) {
        self.committed.store(
            commit_time.map_or(NONE, |at| at.as_unix_micros().max(1)),
            Ordering::Relaxed,
        );
    }

    /// Its age in seconds: 0 if nothing is pending, `None` if unknown. Uses the server's clock, because
    /// commit times come from it.
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

    /// Makes the commit time unknown, when the session ends.
    pub fn forget(&self) {
        self.committed.store(UNKNOWN, Ordering::Relaxed);
    }
}

/// When something last happened.
#[derive(Debug, Clone, Default)]
pub struct LastTime(Arc<Mutex<Option<Instant>>>);

impl LastTime {
    /// It happens now.
    pub fn now(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    /// The time since then; `None` if it has not happened yet.
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
    pub slot_health: Family<KindLabel, Gauge>,
    pub lag_bytes: OptionalGauge,
    pub oldest_pending: OldestPending,
    pub server_clock: ServerClock,
    pub retained_bytes: OptionalGauge,
    /// Seconds until the session has caught up.
    pub caught_up_in: OptionalGauge,
    /// When Pub/Sub last stored a request.
    pub last_published: LastTime,
    /// What fails at present.
    pub troubles: Troubles,
    pub latency: Histogram,
    /// When the last status message was sent to PostgreSQL; `/livez` checks its age.
    pub last_status: LastTime,
}

impl Metrics {
    /// A number that grows whenever an event gets an outcome.
    pub(crate) fn delivered(&self) -> u64 {
        self.events_published.get() + self.events_recorded.get()
    }

    /// The relay's condition now.
    pub fn condition(&self, state: &RelayState) -> Condition {
        let server_time = self.server_clock.now().duration_since(UNIX_EPOCH);
        let server_time = server_time.unwrap_or_default();
        let seconds = |gauge: Option<f64>| Duration::try_from_secs_f64(gauge?).ok();
        let facts = Facts {
            phase: state.phase_since(),
            topics: self.troubles.topics(),
            recording: self.troubles.recording(),
            publication: self.troubles.publication(),
            lag_bytes: self.lag_bytes.get().map(|bytes| bytes as u64),
            oldest: seconds(self.oldest_pending.age_seconds()),
            caught_up_in: seconds(self.caught_up_in.get()),
            server_micros: i64::try_from(server_time.as_micros()).unwrap_or(i64::MAX),
        };
        condition::judge(&facts, Instant::now())
    }

    /// Resets the values that only the relay that holds the slot can know.
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
            &self.blocked_keys,
            &self.events_in_quarantine,
            &self.lag_bytes,
            &self.retained_bytes,
            &self.caught_up_in,
        ] {
            unknown.set(None);
        }
        self.slot_health.clear();
        self.troubles.forget();
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
            slot_health: Family::default(),
            lag_bytes: OptionalGauge::default(),
            oldest_pending: OldestPending::by(server_clock.clone()),
            server_clock,
            retained_bytes: OptionalGauge::default(),
            caught_up_in: OptionalGauge::default(),
            last_published: LastTime::default(),
            troubles: Troubles::default(),
            latency: Histogram::new(LATENCY_BUCKETS),
            last_status: LastTime::default(),
        }
    }
}

impl Metrics {
    /// Everything in Prometheus' text format (OpenMetrics), labelled with the name of the slot.
    ///
    /// # Errors
    /// Never in practice: only when a `String` cannot be written to.
    pub fn encode(&self, slot: &str, condition: &Condition) -> Result<String, std::fmt::Error> {
        let label = ("slot".into(), slot.to_owned().into());
        let mut registry = Registry::with_prefix_and_labels("postrider", [label].into_iter());
        self.register_counters(&mut registry);
        self.register_gauges(&mut registry);
        topics::register(&mut registry, condition);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry)?;
        Ok(text)
    }

    fn register_counters(&self, registry: &mut Registry) {
        let mut add =
            |name, help, counter: &Counter| registry.register(name, help, counter.clone());
        add(
            "events_read",
            "Events read from the stream that had no recorded outcome",
            &self.events_read,
        );
        add(
            "events_published",
            "Events that Pub/Sub has stored",
            &self.events_published,
        );
        add(
            "events_skipped",
            "Events skipped because their outcome was already recorded",
            &self.events_skipped,
        );
        add(
            "events_recorded",
            "Events with a durable dispatch row",
            &self.events_recorded,
        );
        add(
            "events_from_table",
            "Events published from their table because they were missing from the stream",
            &self.events_from_table,
        );
        add(
            "publish_requests",
            "Publish requests answered with success",
            &self.publish_requests,
        );
        add("sessions", "Replication sessions started", &self.sessions);
        add(
            "received_bytes",
            "Bytes read from the replication stream",
            &self.received_bytes,
        );
        registry.register(
            "recoveries",
            "Recoveries started, by the kind of loss",
            self.recoveries.clone(),
        );
        registry.register(
            "publish_failures",
            "Failed publish attempts, by error code. Refused events are set aside; all others are retried",
            self.publish_failures.clone(),
        );
        registry.register(
            "topic_publish_failures",
            "Failed publish attempts, by topic and error code; at most 50 topics are named",
            self.topic_failures.counters.clone(),
        );
        registry.register(
            "unexpected_changes",
            "UPDATE, DELETE and TRUNCATE on a captured table, never published",
            self.unexpected_changes.clone(),
        );
        registry.register(
            "events_quarantined",
            "Events quarantined, by error code, or `waits` for events behind a bad one of their key",
            self.events_quarantined.clone(),
        );
        registry.register(
            "commit_to_ack_seconds",
            "Time from the commit to the acknowledgement by Pub/Sub",
            self.latency.clone(),
        );
    }

    fn register_gauges(&self, registry: &mut Registry) {
        let mut add = |name, help, gauge: &Gauge| registry.register(name, help, gauge.clone());
        add("in_flight_bytes", "Events in memory", &self.in_flight_bytes);
        add(
            "in_flight_requests",
            "Publish requests in flight",
            &self.in_flight_requests,
        );
        add("lanes", "Ordering keys with work", &self.lanes);
        add(
            "lanes_waiting",
            "Ordering keys that wait for a retry",
            &self.lanes_waiting,
        );
        add(
            "holds_slot",
            "1 while this relay streams from the slot",
            &self.holds_slot,
        );
        registry.register(
            "slot_health",
            "1 for the current health",
            self.slot_health.clone(),
        );
        let mut add = |name, help, value: Option<f64>| {
            if let Some(value) = value {
                let gauge = Gauge::<f64, AtomicU64>::default();
                gauge.set(value);
                registry.register(name, help, gauge);
            }
        };
        add(
            "slot_lag_bytes",
            "WAL beyond the confirmed position",
            self.lag_bytes.get(),
        );
        add(
            "slot_retained_bytes",
            "WAL that the slot holds back",
            self.retained_bytes.get(),
        );
        add(
            "publication_ok",
            "1 while the publication is known to be correct",
            self.publication_ok.get(),
        );
        add(
            "blocked_keys",
            "Ordering keys blocked by events in quarantine",
            self.blocked_keys.get(),
        );
        add(
            "events_in_quarantine",
            "Events in quarantine: bad events and those that wait behind them; counted up to a million",
            self.events_in_quarantine.get(),
        );
        add(
            "lag_seconds",
            "Age of the oldest event without an outcome, 0 if none",
            self.oldest_pending.age_seconds(),
        );
    }
}

#[cfg(test)]
mod tests;
