//! Tracks the topics to which publishing fails: since when, why, and how many events wait.
//!
//! The relay's log says when a topic begins to fail, then at most every ten seconds how many requests have
//! failed, and when the topic works again (`lines`).
//!
//! When a topic counts as working again depends on how it fails:
//!
//! - Usually all requests of the topic fail, as in an outage. The first request that is then published shows that the
//!   topic works again, even if other requests still wait for their retry.
//! - If some requests fail while others succeed, the topic fails *in part*. It counts as working again only when none
//!   of its lanes has a failed request, or when nothing has failed for a while ([`QUIET_AFTER`]).
//!
//! Once a topic works again, the relay still remembers the topic for at least ten seconds. Otherwise a topic that
//! fails now and then would get a log line for every failure.
//!
//! Tracking costs nothing while no topic fails. While a topic fails, [`FailingTopics::survey`] visits all
//! lanes about once per second.

mod earlier;
mod lines;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use decoder::PgTimestamp;

use crate::condition::{FailingTopic, Trouble, Troubles, WaitingKey};
use crate::error::Error;
use crate::event::OrderingKey;
use crate::lanes::{LaneStanding, Lanes};
pub(crate) use earlier::EarlierFailures;
use earlier::KeptTopics;
use lines::{LOG_INTERVAL, LineBudget, list_the_rest};

/// Minimum duration of a failure that is listed among the recent troubles. A shorter failure usually ends with a
/// retry.
const WORTH_REMEMBERING: Duration = Duration::from_secs(3);

/// Minimum time between two surveys of the lanes, because a survey visits every lane.
const SURVEY_INTERVAL: Duration = Duration::from_secs(1);

/// Limit on the cost of surveys: after a survey that took `t`, the next one waits at least `t *
/// SURVEY_SHARE`. So surveys take at most about one hundredth of the time.
const SURVEY_SHARE: u32 = 100;

/// If a request fails within this time after another request of the topic was published, the topic fails in
/// part.
const PARTLY_WITHIN: Duration = Duration::from_secs(3);

/// A topic that fails in part counts as working again after this time without a failure. The time is longer than the
/// longest pause before a retry, so by its end the relay has usually retried the failed requests.
const QUIET_AFTER: Duration = Duration::from_secs(15);

/// Maximum number of keys that are named for each failing topic.
const KEYS_NAMED: usize = 5;

#[derive(Debug)]
pub(super) struct FailingTopics {
    topics: HashMap<Arc<str>, Failing>,
    /// Failing topics of earlier sessions, to which this session has sent no request yet.
    not_tried: HashMap<Arc<str>, Failing>,
    /// Where the topics are kept when this session ends.
    earlier: EarlierFailures,
    /// The list of failing topics that the HTTP port and the supervisor read.
    shared: Troubles,
    /// When the next survey is due.
    survey_due: Instant,
    lines: LineBudget,
}

/// A failing topic.
#[derive(Debug)]
struct Failing {
    trouble: Trouble,
    failures: u64,
    /// The number of failures when the last log line was due, and the time at which that line was due.
    told: (u64, Option<Instant>),
    /// Whether the last log line about the topic says that publishing fails.
    log_says_failing: bool,
    /// Whether a request was published after the last failure.
    has_published: bool,
    /// Whether the [`LineBudget`] was used up when the last line was due. If so, the next list must name the
    /// topic.
    owes_line: bool,
    /// When the last request failed.
    failed_at: Instant,
    /// When a request was last published. `None` if none was published after the first failure.
    published_at: Option<Instant>,
    /// Whether the last failure came soon after another request was published.
    fails_in_part: bool,
    /// Since when the topic works again; `None` while it fails.
    works_since: Option<Instant>,
    /// Whether this failure has already been added to the recent troubles.
    is_remembered: bool,
    lanes: LanesOfTopic,
}

/// The lanes of a topic as of the last survey.
#[derive(Debug, Default, Clone)]
struct LanesOfTopic {
    events: u64,
    oldest: Option<PgTimestamp>,
    /// Lanes with a failed request.
    failing: u64,
    /// At most [`KEYS_NAMED`] keys: those whose first event was committed earliest, in this order. Each entry
    /// has the commit time of the first event, the key, and the number of the key's events.
    keys: Vec<(PgTimestamp, OrderingKey, u64)>,
}

impl LanesOfTopic {
    fn add(&mut self, lane: &LaneStanding<'_>) {
        self.events += lane.events;
        self.failing += u64::from(lane.is_failing);
        self.oldest = [self.oldest, lane.oldest].into_iter().flatten().min();
        let Some(oldest) = lane.oldest.filter(|_| !lane.ordering_key.is_unordered()) else {
            return;
        };
        let at = self.keys.partition_point(|(time, ..)| *time <= oldest);
        if at < KEYS_NAMED {
            self.keys.truncate(KEYS_NAMED - 1);
            let key = (oldest, lane.ordering_key.clone(), lane.events);
            self.keys.insert(at, key);
        }
    }

    fn waiting_keys(&self) -> Vec<WaitingKey> {
        let keys = self.keys.iter().map(|(oldest, key, events)| WaitingKey {
            ordering_key: key.as_str().into(),
            waiting_events: *events,
            oldest_commit: oldest.as_unix_micros(),
        });
        keys.collect()
    }
}

impl Failing {
    fn new(error: &Error, now: Instant) -> Self {
        Self {
            trouble: Trouble::of(error, now),
            failures: 0,
            told: (0, None),
            log_says_failing: false,
            owes_line: false,
            has_published: false,
            failed_at: now,
            published_at: None,
            fails_in_part: false,
            works_since: None,
            is_remembered: false,
            lanes: LanesOfTopic::default(),
        }
    }

    /// Whether the topic works again, by the rules at the top of this file. A topic without events left works
    /// again, too.
    fn works(&self, now: Instant) -> bool {
        if !self.has_published {
            return self.lanes.failing == 0 && self.lanes.events == 0;
        }
        let quiet = now.saturating_duration_since(self.failed_at);
        self.lanes.failing == 0 || !self.fails_in_part || quiet >= QUIET_AFTER
    }
}

impl FailingTopics {
    /// Creates the list of failing topics of a new session. Topics that were failing in earlier sessions (`earlier`)
    /// keep their failure counts and the time when they began to fail.
    pub(super) fn new(shared: Troubles, earlier: EarlierFailures) -> Self {
        let KeptTopics { topics, lines } = earlier.take();
        Self {
            topics: HashMap::new(),
            not_tried: topics,
            earlier,
            shared,
            survey_due: Instant::now(),
            lines,
        }
    }

    /// Notes that a request for the topic failed and will be retried. Logs nothing if the relay is about to create the
    /// topic (`is_made`), because `topic_maker` logs a failed creation.
    pub(super) fn failed(&mut self, topic: &Arc<str>, error: &Error, now: Instant, is_made: bool) {
        let is_new = !self.topics.contains_key(topic);
        let failing = self.topics.entry(topic.clone()).or_insert_with(|| {
            let earlier = self.not_tried.remove(topic);
            earlier.unwrap_or_else(|| Failing::new(error, now))
        });
        if failing.works_since.take().is_some() {
            failing.trouble = Trouble::of(error, now);
            failing.failures = 0;
            failing.told.0 = 0;
            failing.owes_line = false;
        }
        failing.failures += 1;
        failing.failed_at = now;
        failing.fails_in_part = failing
            .published_at
            .is_some_and(|at| now.saturating_duration_since(at) < PARTLY_WITHIN);
        failing.has_published = false;
        if failing.trouble.code != error.code() {
            failing.trouble = Trouble::of(error, failing.trouble.since);
        }
        if !is_made {
            failing.log_failure(error, now, &mut self.lines);
        }
        if is_new {
            self.show();
        }
    }

    /// Notes that a request for the topic was published.
    pub(super) fn published(&mut self, topic: &str) {
        if !self.not_tried.is_empty()
            && let Some((topic, failing)) = self.not_tried.remove_entry(topic)
        {
            self.topics.insert(topic, failing);
        }
        if !self.topics.is_empty()
            && let Some(failing) = self.topics.get_mut(topic)
        {
            failing.has_published = true;
            failing.published_at = Some(Instant::now());
        }
    }

    /// Surveys the lanes if a survey is due, and notes which topics work again. Forgets a topic that has worked again
    /// for ten seconds, unless one of its lanes still has a failed request.
    pub(super) fn survey(&mut self, lanes: &Lanes) {
        if self.topics.is_empty() {
            return;
        }
        let now = Instant::now();
        if now < self.survey_due {
            return;
        }
        for failing in self.topics.values_mut() {
            failing.lanes = LanesOfTopic::default();
        }
        lanes.survey(|topic, lane| {
            let Some(failing) = self.topics.get_mut(topic) else {
                return;
            };
            failing.lanes.add(&lane);
        });
        let (lines, shared) = (&mut self.lines, &self.shared);
        self.topics.retain(|topic, failing| {
            let lasted = now.saturating_duration_since(failing.trouble.since);
            let is_over = failing.works(now);
            if let Some(since) = failing.works_since {
                let is_recent = now.saturating_duration_since(since) < LOG_INTERVAL;
                return is_recent || failing.lanes.failing > 0;
            }
            if !is_over {
                if lasted >= WORTH_REMEMBERING
                    && !std::mem::replace(&mut failing.is_remembered, true)
                {
                    shared.remember(&failing.trouble);
                }
                return true;
            }
            failing.works_since = Some(now);
            failing.is_remembered = false;
            failing.log_success(topic, now, lines);
            true
        });
        list_the_rest(&mut self.topics);
        self.show();
        let took = now.elapsed();
        self.survey_due = now + SURVEY_INTERVAL.max(took * SURVEY_SHARE);
    }

    fn show(&self) {
        let failing = self
            .topics
            .iter()
            .filter(|(_, failing)| failing.works_since.is_none());
        let topics = failing.map(|(topic, failing)| FailingTopic {
            topic: topic.clone(),
            trouble: failing.trouble.clone(),
            failures: failing.failures,
            waiting_events: failing.lanes.events,
            oldest_commit: failing.lanes.oldest.map(PgTimestamp::as_unix_micros),
            keys: failing.lanes.waiting_keys(),
        });
        let mut topics: Vec<_> = topics.collect();
        topics.sort_unstable_by(|a, b| a.topic.cmp(&b.topic));
        self.shared.set_topics(topics);
    }
}

impl Drop for FailingTopics {
    /// Keeps the topics for the next session.
    fn drop(&mut self) {
        let mut topics = std::mem::take(&mut self.not_tried);
        topics.extend(self.topics.drain());
        let lines = std::mem::take(&mut self.lines);
        self.earlier.keep(KeptTopics { topics, lines });
    }
}

#[cfg(test)]
mod tests;
