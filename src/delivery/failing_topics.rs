//! Tracks the topics to which publishing fails: since when, why, and how many events wait.
//!
//! The log gets a line when a topic begins to fail, a line with counts every ten seconds while the
//! topic fails, and a line when the topic works again, if it failed for at least three seconds. A
//! topic works again once none of its lanes has a failed request, and a request was published after
//! the last failure or nothing is left to publish. The topic is remembered for ten seconds more, so
//! that a topic that fails now and then does not get a line for every failure.
//!
//! Tracking costs nothing while no topic fails. While a topic fails, [`FailingTopics::survey`] reads
//! all lanes about once per second.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use decoder::PgTimestamp;

use crate::condition::{FailingTopic, Trouble, Troubles};
use crate::error::Error;
use crate::lanes::Lanes;

/// Minimum time between two log lines about one failing topic.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// A shorter failure is an ordinary retry, so the log does not report its end.
const WORTH_A_LINE: Duration = Duration::from_secs(3);

/// Maximum number of log lines per [`LOG_INTERVAL`], about all topics together.
const LINES_MAX: u32 = 20;

/// Time between two surveys of the lanes.
const SURVEY_INTERVAL: Duration = Duration::from_secs(1);

/// Surveys take at most one hundredth of the time: a slow survey delays the next one.
const SURVEY_SHARE: u32 = 100;

#[derive(Debug)]
pub(super) struct FailingTopics {
    topics: HashMap<Arc<str>, Failing>,
    /// Where the HTTP port and the supervisor read the topics.
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
    /// The number of failures at the last log line, and the time of that line.
    told: (u64, Instant),
    /// Whether a request was published after the last failure.
    has_published: bool,
    /// Since when the topic works again; `None` while it fails.
    works_since: Option<Instant>,
    /// Whether this failure is among the recent errors already.
    is_remembered: bool,
    lanes: LanesOfTopic,
}

/// The lanes of a topic as of the last survey.
#[derive(Debug, Default, Clone, Copy)]
struct LanesOfTopic {
    events: u64,
    oldest: Option<PgTimestamp>,
    /// Lanes with a failed request.
    failing: u64,
}

impl FailingTopics {
    pub(super) fn new(shared: Troubles) -> Self {
        Self {
            topics: HashMap::new(),
            shared,
            survey_due: Instant::now(),
            lines: LineBudget::default(),
        }
    }

    /// Notes that a request for the topic failed and will be retried. If `is_made`, the relay creates the
    /// topic now, and this module logs nothing: `topic_maker` logs a failed creation.
    pub(super) fn failed(&mut self, topic: &Arc<str>, error: &Error, now: Instant, is_made: bool) {
        let is_new = !self.topics.contains_key(topic);
        let failing = self.topics.entry(topic.clone()).or_insert_with(|| Failing {
            trouble: Trouble::of(error, now),
            failures: 0,
            told: (0, now),
            has_published: false,
            works_since: None,
            is_remembered: false,
            lanes: LanesOfTopic::default(),
        });
        if failing.works_since.take().is_some() {
            failing.trouble = Trouble::of(error, now);
            failing.failures = 0;
            failing.told.0 = 0;
        }
        failing.failures += 1;
        failing.has_published = false;
        if failing.trouble.code != error.code() {
            failing.trouble = Trouble::of(error, failing.trouble.since);
        }
        let is_due =
            !is_made && (is_new || now.saturating_duration_since(failing.told.1) >= LOG_INTERVAL);
        if is_due && let Some(left_out) = self.lines.take(now) {
            let Failing {
                trouble,
                failures,
                lanes,
                ..
            } = failing;
            let (code, hint) = (trouble.code.name(), &trouble.hint);
            if is_new {
                tracing::warn!(code, hint, lines_left_out = left_out, "{error}");
            } else {
                let for_s = now.saturating_duration_since(trouble.since).as_secs();
                let since_last = *failures - failing.told.0;
                tracing::warn!(
                    code,
                    hint,
                    failures,
                    since_last,
                    for_s,
                    waiting_events = lanes.events,
                    lines_left_out = left_out,
                    "{error}"
                );
            }
            failing.told = (*failures, now);
        }
        if is_new {
            self.show();
        }
    }

    /// Notes that a request for the topic was published.
    pub(super) fn published(&mut self, topic: &str) {
        if !self.topics.is_empty()
            && let Some(failing) = self.topics.get_mut(topic)
        {
            failing.has_published = true;
        }
    }

    /// Surveys the lanes if a survey is due. Notes which topics work again, and forgets them after ten
    /// seconds.
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
            let seen = &mut failing.lanes;
            seen.events += lane.events;
            seen.failing += u64::from(lane.is_failing);
            seen.oldest = [seen.oldest, lane.oldest].into_iter().flatten().min();
        });
        let (lines, shared) = (&mut self.lines, &self.shared);
        self.topics.retain(|topic, failing| {
            let lasted = now.saturating_duration_since(failing.trouble.since);
            let is_over =
                failing.lanes.failing == 0 && (failing.has_published || failing.lanes.events == 0);
            if let Some(since) = failing.works_since {
                return now.saturating_duration_since(since) < LOG_INTERVAL;
            }
            if !is_over {
                if lasted >= WORTH_A_LINE && !std::mem::replace(&mut failing.is_remembered, true) {
                    shared.remember(&failing.trouble);
                }
                return true;
            }
            failing.works_since = Some(now);
            failing.is_remembered = false;
            if lasted >= WORTH_A_LINE
                && let Some(left_out) = lines.take(now)
            {
                tracing::info!(
                    topic = &**topic,
                    failures = failing.failures,
                    for_s = lasted.as_secs(),
                    lines_left_out = left_out,
                    "publishing to the topic works again"
                );
            }
            true
        });
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
        });
        let mut topics: Vec<_> = topics.collect();
        topics.sort_unstable_by(|a, b| a.topic.cmp(&b.topic));
        self.shared.set_topics(topics);
    }
}

/// Limits the log lines about all topics together, because hundreds may fail for the same reason.
#[derive(Debug, Default)]
struct LineBudget {
    began: Option<Instant>,
    lines: u32,
    left_out: u64,
}

impl LineBudget {
    /// Returns the number of lines left out since the last written line, or `None` if no line may be
    /// written now.
    fn take(&mut self, now: Instant) -> Option<u64> {
        let is_over = |began: Instant| now.saturating_duration_since(began) >= LOG_INTERVAL;
        if self.began.is_none_or(is_over) {
            (self.began, self.lines) = (Some(now), 0);
        }
        if self.lines == LINES_MAX {
            self.left_out += 1;
            return None;
        }
        self.lines += 1;
        Some(std::mem::take(&mut self.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Code;
    use crate::event::Event;
    use crate::event::OrderingKey;
    use crate::lanes::{Load, Serve};

    fn error() -> Error {
        Error::new(Code::TopicMissing, "the topic is missing")
    }

    #[test]
    fn a_topic_fails_until_its_last_failed_request_is_published() {
        let (troubles, now) = (Troubles::default(), Instant::now());
        let mut failing = FailingTopics::new(troubles.clone());
        let mut lanes = Lanes::new(8);
        let topic: Arc<str> = "projects/p/topics/t".into();
        for (key, ordinal) in [("a", 1), ("b", 2), ("b", 3)] {
            let key = OrderingKey::from(key);
            lanes.push(topic.clone(), key, Event::for_tests(ordinal));
        }
        let next = |lanes: &mut Lanes| lanes.next_request(now, Serve::All).unwrap();
        let (first, second) = (next(&mut lanes), next(&mut lanes));
        failing.failed(&topic, &error(), now, false);
        lanes.failed(first, now, Load::Keep);
        lanes.finished(&second);
        failing.published(&topic);
        failing.survey(&lanes);
        let shown = troubles.topics();
        assert_eq!((shown.len(), shown[0].failures), (1, 1));
        assert_eq!(
            shown[0].waiting_events, 1,
            "only the failed request is left"
        );

        let again = next(&mut lanes);
        failing.survey_due = now;
        failing.survey(&lanes);
        assert_eq!(troubles.topics().len(), 1, "the retry is in flight");
        lanes.finished(&again);
        failing.published(&topic);
        failing.survey_due = now;
        failing.survey(&lanes);
        assert!(troubles.topics().is_empty());
    }

    #[test]
    fn a_topic_whose_last_event_is_refused_fails_no_longer() {
        let (troubles, now) = (Troubles::default(), Instant::now());
        let mut failing = FailingTopics::new(troubles.clone());
        let mut lanes = Lanes::new(8);
        let topic: Arc<str> = "projects/p/topics/t".into();
        lanes.push(topic.clone(), OrderingKey::from("a"), Event::for_tests(1));
        let first = lanes.next_request(now, Serve::All).unwrap();
        failing.failed(&topic, &error(), now, false);
        lanes.failed(first, now, Load::Keep);
        failing.survey(&lanes);
        assert_eq!(troubles.topics().len(), 1);
        let again = lanes.next_request(now, Serve::All).unwrap();
        assert!(lanes.refused(again).is_some());
        failing.survey_due = now;
        failing.survey(&lanes);
        assert!(troubles.topics().is_empty());
    }

    #[test]
    fn lines_about_many_topics_are_limited_and_counted() {
        let (mut lines, start) = (LineBudget::default(), Instant::now());
        let written = (0..50).filter(|_| lines.take(start).is_some()).count();
        assert_eq!(written, LINES_MAX as usize);
        assert_eq!(lines.take(start + LOG_INTERVAL), Some(30));
        assert_eq!(lines.take(start + LOG_INTERVAL), Some(0));
    }
}
