//! Tests how the metrics are exported, and which of them are absent without a session.

use super::*;
use crate::error::Code;

fn encoded(metrics: &Metrics, slot: &str) -> String {
    let condition = metrics.condition(&RelayState::default());
    metrics.encode(slot, &condition).unwrap()
}

#[test]
fn metrics_of_a_session_are_absent_before_and_after_it() {
    let metrics = Metrics::default();
    let exported = |name: &str| {
        let text = encoded(&metrics, "s");
        let name = format!("postrider_{name}{{slot=\"s\"");
        text.lines().any(|line| line.starts_with(&name))
    };
    let known = [
        ("slot_lag_bytes", &metrics.lag_bytes),
        ("slot_retained_bytes", &metrics.retained_bytes),
        ("publication_ok", &metrics.publication_ok),
        ("blocked_keys", &metrics.blocked_keys),
        ("events_in_quarantine", &metrics.events_in_quarantine),
    ];
    assert!(!known.iter().any(|(name, _)| exported(name)));
    for (name, value) in known {
        value.set(Some(0.0));
        assert!(exported(name), "{name}");
    }
    metrics.oldest_pending.set(None);
    metrics.slot_health.set(Some(Health::Lost));
    let lost = || encoded(&metrics, "s").contains("kind=\"lost\"} 1");
    assert!(lost());
    metrics.lanes_waiting.set(7);
    assert!(exported("lag_seconds"));
    metrics.forget_session();
    assert!(!known.iter().any(|(name, _)| exported(name)));
    assert!(!exported("lag_seconds") && !lost());
    assert_eq!(metrics.lanes_waiting.get(), 0);
}

#[test]
fn the_lag_does_not_depend_on_the_relays_own_clock() {
    let metrics = Metrics::default();
    // The server's clock is an hour ahead of the relay's, and then a day behind.
    for ahead_s in [3_600, -86_400] {
        let ours = PgTimestamp::from(std::time::SystemTime::now()).as_micros();
        let server = |s: i64| PgTimestamp::from_micros(ours + (ahead_s + s) * 1_000_000);
        metrics.server_clock.heard(server(0), Instant::now());
        metrics.oldest_pending.set(Some(server(-7)));
        let age = metrics.oldest_pending.age_seconds().unwrap();
        assert!((7.0..8.0).contains(&age), "{age}");
        metrics.forget_session();
    }
}

#[test]
fn counters_have_the_names_that_dashboards_rely_on() {
    let metrics = Metrics::default();
    metrics.events_published.inc();
    let text = encoded(&metrics, "postrider");
    assert!(text.contains("postrider_events_published_total{slot=\"postrider\"} 1"));
    assert!(text.ends_with("# EOF\n"));
}

#[test]
fn the_process_and_the_build_have_the_names_of_the_convention() {
    let text = encoded(&Metrics::default(), "s");
    let value = |name: &str| -> f64 {
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        let line = line.unwrap_or_else(|| panic!("{name} in {text}"));
        line.trim().parse().unwrap()
    };
    assert!(value("process_cpu_seconds_total ") >= 0.0);
    assert!(value("process_resident_memory_bytes ") > 1e6);
    assert!((1.0..=value("process_max_fds ")).contains(&value("process_open_fds ")));
    let now = std::time::SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap();
    let age = now.as_secs_f64() - value("process_start_time_seconds ");
    assert!((-2.0..3600.0).contains(&age), "{age}");
    let build = format!(
        "postrider_build_info{{slot=\"s\",version=\"{}\"",
        env!("CARGO_PKG_VERSION")
    );
    assert!(text.contains(&build), "{text}");
    assert_eq!(text.matches("# EOF").count(), 1);
    assert!(prometheus_text(&text).contains("# TYPE process_cpu_seconds_total counter\n"));
}

#[test]
fn every_event_in_quarantine_is_a_warning() {
    let metrics = Metrics::default();
    let severity = || {
        let condition = metrics.condition(&RelayState::default());
        metrics.verdict(&condition).severity
    };
    metrics.blocked_keys.set(Some(0.0));
    metrics.events_in_quarantine.set(Some(0.0));
    let before = severity();
    // One event in quarantine and no blocked key: the event has no ordering key.
    metrics.events_in_quarantine.set(Some(1.0));
    assert!(
        before < slot_manager::Severity::Warning && severity() == slot_manager::Severity::Warning
    );
}

/// Rows can choose their topic, so without a limit they could create any number of series. At the limit, further
/// topics share the series `(others)`.
#[test]
fn the_series_of_topics_are_bounded_and_their_sum_counts_every_failure() {
    let metrics = Metrics::default();
    let topic = |n: usize| -> Arc<str> { format!("projects/p/topics/t{n:03}").into() };
    let codes = [Code::TopicMissing, Code::PubsubPermission];
    let count = |topics: std::ops::Range<usize>| {
        for (n, code) in topics.flat_map(|n| codes.map(|code| (n, code))) {
            metrics.topic_failures.count(&topic(n), code);
        }
    };
    let value = |of: &str| -> u64 {
        let text = encoded(&metrics, "s");
        let lines = text.lines().filter(|line| {
            line.starts_with("postrider_topic_publish_failures_total{") && line.contains(of)
        });
        let values = lines.map(|line| line.rsplit(' ').next().unwrap().parse::<u64>().unwrap());
        values.sum()
    };
    count(0..50);
    assert_eq!(
        (value("(others)"), value("topic=")),
        (0, 100),
        "at the limit"
    );
    count(0..130);
    assert_eq!(value("t049\""), 4, "a topic with a series keeps it");
    assert_eq!(value("t050\""), 0);
    assert_eq!(value("(others)"), 160);
    assert_eq!(value("topic=\"(others)\",code=\"topic-missing\""), 80);
    assert_eq!(value("topic="), 360);
    let text = encoded(&metrics, "s");
    let series = text
        .matches("postrider_topic_publish_failures_total{")
        .count();
    assert_eq!(series, 51 * codes.len());
}

#[test]
fn at_most_20_failing_topics_have_gauges_but_all_are_counted() {
    let metrics = Metrics::default();
    let since = Instant::now().checked_sub(Duration::from_secs(60)).unwrap();
    let failing = (0..30).map(|n| crate::condition::FailingTopic {
        topic: format!("projects/p/topics/t{n:02}").into(),
        trouble: crate::condition::Trouble::of(&Error::new(Code::TopicMissing, "no topic"), since),
        failures: 1,
        waiting_events: 7,
        oldest_commit: None,
        keys: Vec::new(),
    });
    metrics.troubles.set_topics(failing.collect());
    let condition = metrics.condition(&RelayState::default());
    let text = metrics.encode("s", &condition).unwrap();
    assert!(
        text.contains("postrider_failing_topics{slot=\"s\"} 30"),
        "{text}"
    );
    for name in ["failing_seconds", "waiting_events"] {
        let series = text.matches(&format!("postrider_topic_{name}{{")).count();
        assert_eq!(series, 20, "{name}");
    }
}
