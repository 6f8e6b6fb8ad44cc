//! Exports the metrics as OpenMetrics text.

use std::sync::atomic::AtomicU64;

use prometheus_client::encoding::text::{encode_eof, encode_registry};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use super::{KindLabel, Metrics, process, topics};
use crate::condition::{Condition, State};

impl Metrics {
    /// Returns all metrics as OpenMetrics text, labelled with the name of the slot.
    ///
    /// # Errors
    /// Never in practice: the encoder fails only if it cannot write to a `String`.
    pub fn encode(&self, slot: &str, condition: &Condition) -> Result<String, std::fmt::Error> {
        let label = ("slot".into(), slot.to_owned().into());
        let mut registry = Registry::with_prefix_and_labels("postrider", [label].into_iter());
        self.register_counters(&mut registry);
        self.register_families(&mut registry);
        self.register_gauges(&mut registry);
        self.register_pruning(&mut registry);
        self.register_state(&mut registry, condition);
        topics::register(&mut registry, condition);
        process::register_build(&mut registry);
        // Prometheus prescribes the names of process metrics, so they get neither our prefix nor our
        // label.
        let mut process = Registry::with_prefix("process");
        process::register_process(&mut process);
        let mut text = String::new();
        encode_registry(&mut text, &registry)?;
        encode_registry(&mut text, &process)?;
        encode_eof(&mut text)?;
        Ok(text)
    }

    fn register_counters(&self, registry: &mut Registry) {
        let mut add =
            |name, help, counter: &Counter| registry.register(name, help, counter.clone());
        add(
            "events_read",
            "Events read from the stream or from a table that had no recorded outcome",
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
    }

    /// Registers the metrics that have their own labels, and the histograms.
    fn register_families(&self, registry: &mut Registry) {
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
            "trace_spans",
            "Spans `started`, and then `exported` or `failed`; the rest waits or was dropped",
            self.trace_spans.clone(),
        );
        registry.register(
            "commit_to_ack_seconds",
            "Time from the commit to the acknowledgement by Pub/Sub",
            self.latency.clone(),
        );
        registry.register(
            "publish_batch_events",
            "Events per publish request that Pub/Sub has stored",
            self.batch_events.clone(),
        );
    }

    fn register_gauges(&self, registry: &mut Registry) {
        let mut add = |name, help, gauge: &Gauge| registry.register(name, help, gauge.clone());
        add(
            "in_flight_bytes",
            "Bytes of the events in memory",
            &self.in_flight_bytes,
        );
        add(
            "in_flight_requests",
            "Publish requests in flight",
            &self.in_flight_requests,
        );
        add("lanes", "Ordering keys with work", &self.lanes);
        add(
            "lanes_waiting",
            "Ordering keys that wait for a retry or because their topic is throttled",
            &self.lanes_waiting,
        );
        add(
            "holds_slot",
            "1 while this relay streams from the slot",
            &self.holds_slot,
        );
        let mut add = |name, help, value| add_known(registry, name, help, value);
        add(
            "slot_lag_bytes",
            "WAL beyond the confirmed position",
            self.lag_bytes.get(),
        );
        add(
            "slot_retained_bytes",
            "WAL that the server retains for the slot",
            self.retained_bytes.get(),
        );
        add(
            "slot_headroom_bytes",
            "WAL that can still be written before the slot is lost; absent without a limit",
            self.headroom_bytes.get(),
        );
        add(
            "publication_ok",
            "1 while the publication is known to be correct, 0 if it is wrong or cannot be checked",
            self.publication_ok.get(),
        );
        add(
            "audit_failing",
            "1 while the relay cannot look for rows that the stream has left out, 0 if its last audit succeeded",
            self.audit_failing.get(),
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
            self.lag_seconds(),
        );
    }

    /// Registers the state that every view shows, and the time until the relay has caught up.
    fn register_state(&self, registry: &mut Registry, condition: &Condition) {
        let verdict = self.verdict(condition);
        let states = Family::<KindLabel, Gauge>::default();
        for state in State::ALL {
            let label = KindLabel { kind: state.name() };
            let is_current = i64::from(state == verdict.state);
            states.get_or_create(&label).set(is_current);
        }
        registry.register(
            "condition",
            "1 for the current state of the relay and its slot, 0 for all others",
            states,
        );
        add_known(
            registry,
            "caught_up_in_seconds",
            "Time until the relay has caught up, at the present rate; absent unless it is catching up",
            verdict.caught_up_in.map(|time| time.as_secs_f64()),
        );
    }

    fn register_pruning(&self, registry: &mut Registry) {
        registry.register(
            "rows_pruned",
            "Old rows deleted by the relay: `outbox` (of the outbox tables) or `dispatch` (of outbox.dispatch)",
            self.rows_pruned.clone(),
        );
        let latest = self.prune_runs.latest();
        let failing = latest.map(|(run, _)| f64::from(u8::from(run.code.is_some())));
        let success = self.prune_runs.success_age();
        add_known(
            registry,
            "prune_failing",
            "1 while the relay cannot delete old rows, 0 when its last run succeeded; absent if it has not run",
            failing,
        );
        add_known(
            registry,
            "prune_success_age_seconds",
            "Time since the relay last deleted all old rows that it may delete",
            success.map(|age| age.as_secs_f64()),
        );
    }
}

/// Adds a gauge if its value is known.
fn add_known(registry: &mut Registry, name: &'static str, help: &'static str, value: Option<f64>) {
    if let Some(value) = value {
        let gauge = Gauge::<f64, AtomicU64>::default();
        gauge.set(value);
        registry.register(name, help, gauge);
    }
}
