//! Writes the log lines about failing topics.
//!
//! Hundreds of topics may fail for the same reason, so the number of lines about single topics is limited.
//! The topics beyond the limit share lines that list their names.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Failing;
use crate::error::Error;

/// Minimum time between two log lines about one failing topic.
pub(super) const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Maximum number of lines about single topics per [`LOG_INTERVAL`], counted over all topics.
const LINES_MAX: u32 = 20;

/// Maximum number of topics that one line lists.
const LISTED_MAX: usize = 50;

/// Limits the number of lines about single topics to [`LINES_MAX`] per [`LOG_INTERVAL`].
#[derive(Debug, Default)]
pub(super) struct LineBudget {
    began: Option<Instant>,
    lines: u32,
}

impl LineBudget {
    /// Returns whether another line about a single topic may be written now. If so, counts the line.
    pub(super) fn take(&mut self, now: Instant) -> bool {
        let is_over = |began: Instant| now.saturating_duration_since(began) >= LOG_INTERVAL;
        if self.began.is_none_or(is_over) {
            (self.began, self.lines) = (Some(now), 0);
        }
        let fits = self.lines < LINES_MAX;
        self.lines += u32::from(fits);
        fits
    }
}

impl Failing {
    /// Logs that the topic fails, if the last line about it is old enough. If the budget is used up, a shared line
    /// lists the topic later.
    pub(super) fn log_failure(&mut self, error: &Error, now: Instant, lines: &mut LineBudget) {
        let (told, at) = self.told;
        if at.is_some_and(|at| now.saturating_duration_since(at) < LOG_INTERVAL) {
            return;
        }
        // `since_last` counts the failures that got no line. Subtract this failure, which gets the line.
        let (is_first, since_last) = (told == 0, (self.failures - told).saturating_sub(1));
        self.told = (self.failures, Some(now));
        self.owes_line = !lines.take(now);
        if self.owes_line {
            return;
        }
        self.log_says_failing = true;
        let (code, hint) = (self.trouble.code.name(), &self.trouble.hint);
        if is_first {
            tracing::warn!(code, hint, "{error}");
            return;
        }
        tracing::warn!(
            code,
            hint,
            failures = self.failures,
            since_last,
            for_s = now.saturating_duration_since(self.trouble.since).as_secs(),
            waiting_events = self.lanes.events,
            "{error}"
        );
    }

    /// Logs that the topic works again. Logs nothing if no earlier line said that the topic fails.
    pub(super) fn log_success(&mut self, topic: &str, now: Instant, lines: &mut LineBudget) {
        self.owes_line = self.log_says_failing && !lines.take(now);
        if self.owes_line || !std::mem::take(&mut self.log_says_failing) {
            return;
        }
        let lasted = now.saturating_duration_since(self.trouble.since);
        tracing::info!(
            topic,
            failures = self.failures,
            for_s = lasted.as_secs(),
            "publishing to the topic works again"
        );
    }
}

/// Logs the topics that got no line of their own, because the [`LineBudget`] was used up. Each line lists up to
/// [`LISTED_MAX`] of these topics.
pub(super) fn list_the_rest(topics: &mut HashMap<Arc<str>, Failing>) {
    let mut fail: BTreeMap<_, Vec<&str>> = BTreeMap::new();
    let mut work = Vec::new();
    for (topic, failing) in topics.iter_mut().filter(|(_, failing)| failing.owes_line) {
        failing.owes_line = false;
        failing.log_says_failing = failing.works_since.is_none();
        if failing.log_says_failing {
            let trouble = &failing.trouble;
            let same = fail.entry((trouble.code.name(), &trouble.hint));
            same.or_default().push(topic);
        } else {
            work.push(&**topic);
        }
    }
    for ((code, hint), mut topics) in fail {
        topics.sort_unstable();
        for some in topics.chunks(LISTED_MAX) {
            let (count, names) = (some.len(), some.join(", "));
            tracing::warn!(code, hint, topics = count, "publishing fails, too: {names}");
        }
    }
    work.sort_unstable();
    for some in work.chunks(LISTED_MAX) {
        let (count, names) = (some.len(), some.join(", "));
        tracing::info!(topics = count, "publishing works again, too: {names}");
    }
}

#[cfg(test)]
mod tests {
    use std::io::{self, Write};
    use std::process::Command;
    use std::sync::Mutex;

    use super::super::{EarlierFailures, FailingTopics};
    use super::*;
    use crate::condition::Troubles;
    use crate::error::Code;
    use crate::event::{Event, OrderingKey};
    use crate::lanes::{Lanes, Load, Serve};

    /// The log that the test captures, as text.
    #[derive(Clone, Default)]
    struct Log(Arc<Mutex<Vec<u8>>>);

    impl Write for Log {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// Returns the log of `run`, which must run in a process without other tests. `name` is the test of this module
    /// that calls this function. The test runs twice:
    ///
    /// - In the usual test process, this function starts a second process for this test alone, checks that the test
    ///   passes there, and returns `None`.
    /// - In the second process, this function calls `run`, and returns the log.
    ///
    /// In a process with other tests, the log may be incomplete. While another thread reaches a log statement for the
    /// first time, tracing does not ask a new subscriber about the statement, so our log would lack its lines.
    fn log_alone(name: &str, run: impl FnOnce()) -> Option<String> {
        if std::env::var_os("POSTRIDER_TEST_ALONE").is_none() {
            let (_, module) = module_path!().split_once("::").unwrap();
            let test = Command::new(std::env::current_exe().unwrap())
                .args([&format!("{module}::{name}"), "--exact", "--nocapture"])
                .env("POSTRIDER_TEST_ALONE", "1")
                .output()
                .unwrap();
            let output = String::from_utf8_lossy(&test.stdout);
            assert!(
                output.contains("1 passed"),
                "{output}{}",
                String::from_utf8_lossy(&test.stderr)
            );
            return None;
        }
        let log = Log::default();
        let writer = log.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_ansi(false)
            .with_writer(move || writer.clone())
            .finish();
        tracing::subscriber::with_default(subscriber, run);
        let text = log.0.lock().unwrap().clone();
        Some(String::from_utf8(text).unwrap())
    }

    #[test]
    fn the_log_names_every_topic_that_fails_and_every_topic_that_works_again() {
        let now = Instant::now();
        let topics: Vec<Arc<str>> = (0..130).map(|n| format!("topic-{n:03}").into()).collect();
        let fail_and_recover = || {
            let mut failing = FailingTopics::new(Troubles::default(), EarlierFailures::default());
            let mut lanes = Lanes::new(200);
            for topic in &topics {
                let key = OrderingKey::from("k");
                lanes.push(topic.clone(), key, Event::for_tests(1));
                let request = lanes.next_request(now, Serve::All).unwrap();
                let error = Error::new(Code::TopicMissing, format!("{topic} is missing"));
                failing.failed(topic, &error, now, false);
                lanes.failed(request, now, Load::Keep);
            }
            failing.survey(&lanes);
            while let Some(request) = lanes.next_request(now, Serve::All) {
                lanes.finished(&request);
                failing.published(&request.key.topic);
            }
            failing.survey_due = now;
            failing.survey(&lanes);
        };
        let name = "the_log_names_every_topic_that_fails_and_every_topic_that_works_again";
        let Some(text) = log_alone(name, fail_and_recover) else {
            return;
        };
        for topic in &topics {
            let lines: Vec<&str> = text
                .lines()
                .filter(|line| line.contains(&**topic))
                .collect();
            let [first, last] = lines[..] else {
                panic!("{topic}: {lines:?}");
            };
            assert!(first.contains("WARN") && first.contains("topic-missing"));
            assert!(last.contains("works again"), "{last}");
        }
        assert!(text.lines().count() < 30, "{text}");
    }

    /// A topic fails four times a second for 25 seconds, and then works again.
    #[test]
    fn a_failing_topic_is_logged_once_in_ten_seconds_with_its_failures_since() {
        let start = Instant::now();
        let run = || {
            let mut failing = FailingTopics::new(Troubles::default(), EarlierFailures::default());
            let mut lanes = Lanes::new(200);
            let topic: Arc<str> = "topic-7".into();
            lanes.push(topic.clone(), OrderingKey::from("k"), Event::for_tests(1));
            for n in 0..100 {
                let at = start + Duration::from_millis(250) * n;
                let request = lanes.next_request(at, Serve::All).unwrap();
                let error = Error::new(Code::TopicMissing, "topic-7 is missing");
                failing.failed(&topic, &error, at, false);
                lanes.failed(request, at, Load::Keep);
            }
            let later = start + Duration::from_secs(60);
            while let Some(request) = lanes.next_request(later, Serve::All) {
                lanes.finished(&request);
                failing.published(&topic);
            }
            failing.survey_due = start;
            failing.survey(&lanes);
            failing.survey_due = start;
            failing.survey(&lanes);
        };
        let name = "a_failing_topic_is_logged_once_in_ten_seconds_with_its_failures_since";
        let Some(text) = log_alone(name, run) else {
            return;
        };
        let lines: Vec<&str> = text.lines().collect();
        let [first, second, third, last] = lines[..] else {
            panic!("{text}");
        };
        assert!(
            first.contains("WARN") && !first.contains("since_last"),
            "{text}"
        );
        for (line, failures, for_s) in [(second, 41, 10), (third, 81, 20)] {
            let counts = format!("failures={failures} since_last=39 for_s={for_s} ");
            assert!(line.contains("WARN") && line.contains(&counts), "{text}");
        }
        let worked = "works again topic=\"topic-7\" failures=100";
        assert!(last.contains("INFO") && last.contains(worked), "{text}");
    }

    #[test]
    fn lines_about_single_topics_are_limited() {
        let (mut lines, start) = (LineBudget::default(), Instant::now());
        let written = (0..50).filter(|_| lines.take(start)).count();
        assert_eq!(written, LINES_MAX as usize);
        assert!(lines.take(start + LOG_INTERVAL));
    }
}
