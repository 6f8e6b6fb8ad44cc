//! Adds metrics of the topics to which publishing fails. Rows can choose their topic, so without a limit they could
//! create any number of labels. Only a limited number of topics gets a label of its own.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError};

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use crate::condition::Condition;
use crate::error::Code;

/// Maximum number of topics with their own counter. Failures of further topics are counted under
/// [`OTHERS`].
const TOPICS_MAX: usize = 50;

/// The label for all further topics. No topic has this name, because topic names begin with a letter.
const OTHERS: &str = "(others)";

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct TopicLabel {
    topic: String,
    code: String,
}

/// Failed requests by topic and error code.
#[derive(Debug, Clone, Default)]
pub struct TopicFailures {
    pub(super) counters: Family<TopicLabel, Counter>,
    known: Arc<Mutex<Vec<Arc<str>>>>,
}

impl TopicFailures {
    /// Counts a failed request to the topic.
    pub fn count(&self, topic: &Arc<str>, code: Code) {
        let label = TopicLabel {
            topic: self.label(topic),
            code: code.name().to_owned(),
        };
        self.counters.get_or_create(&label).inc();
    }

    fn label(&self, topic: &Arc<str>) -> String {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if !known.contains(topic) {
            if known.len() == TOPICS_MAX {
                return OTHERS.to_owned();
            }
            known.push(topic.clone());
        }
        topic.to_string()
    }
}

/// Registers the gauges of the topics to which publishing fails.
pub(super) fn register(registry: &mut Registry, condition: &Condition) {
    let failing = Gauge::<i64>::default();
    failing.set(i64::try_from(condition.failing_topics).unwrap_or(i64::MAX));
    registry.register(
        "failing_topics",
        "Topics to which publishing fails",
        failing,
    );
    let seconds = Family::<TopicLabel, Gauge<f64, AtomicU64>>::default();
    let waiting = Family::<TopicLabel, Gauge>::default();
    let oldest = Family::<TopicLabel, Gauge<f64, AtomicU64>>::default();
    for topic in &condition.topics {
        let label = TopicLabel {
            topic: topic.topic.clone(),
            code: topic.code.clone(),
        };
        seconds.get_or_create(&label).set(topic.for_seconds);
        let events = i64::try_from(topic.waiting_events).unwrap_or(i64::MAX);
        waiting.get_or_create(&label).set(events);
        if let Some(age) = topic.oldest_seconds {
            oldest.get_or_create(&label).set(age);
        }
    }
    registry.register(
        "topic_failing_seconds",
        "How long publishing to a topic has failed; absent for topics that work",
        seconds,
    );
    registry.register(
        "topic_waiting_events",
        "Events that were read and wait for a failing topic",
        waiting,
    );
    registry.register(
        "topic_oldest_seconds",
        "Age of the oldest event that waits for a failing topic",
        oldest,
    );
}
