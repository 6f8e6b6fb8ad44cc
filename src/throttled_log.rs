//! Limits a frequent log line to one line per subject every ten seconds. The subject is an error code in most places.

use std::collections::HashMap;
use std::hash::Hash;
use std::time::{Duration, Instant};

use crate::error::Code;

const INTERVAL: Duration = Duration::from_secs(10);

/// When a line was last logged for each subject, and how many lines were suppressed since then. If several
/// kinds of lines share one log, the subject also contains the kind, so that no kind suppresses another.
#[derive(Debug)]
pub(crate) struct ThrottledLog<S = Code> {
    last: HashMap<S, (Instant, u64)>,
}

impl<S> Default for ThrottledLog<S> {
    fn default() -> Self {
        let last = HashMap::new();
        Self { last }
    }
}

impl<S: Eq + Hash> ThrottledLog<S> {
    /// Decides whether to log a line about `subject` now. Returns `None` if this line must be suppressed, otherwise
    /// the number of lines that were suppressed since the last one.
    pub(crate) fn due(&mut self, subject: S) -> Option<u64> {
        self.due_at(subject, Instant::now())
    }

    /// Forgets the subject, so that its next line is logged at once.
    pub(crate) fn forget(&mut self, subject: &S) {
        self.last.remove(subject);
    }

    fn due_at(&mut self, subject: S, now: Instant) -> Option<u64> {
        match self.last.get_mut(&subject) {
            Some((last, left_out)) if now.saturating_duration_since(*last) < INTERVAL => {
                *left_out += 1;
                None
            }
            Some((_, left_out)) => {
                let left_out = *left_out;
                self.last.insert(subject, (now, 0));
                Some(left_out)
            }
            None => {
                self.last.insert(subject, (now, 0));
                Some(0)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_line_is_logged_at_once_and_later_ones_count_suppressed_lines() {
        let (mut log, start) = (ThrottledLog::default(), Instant::now());
        assert_eq!(log.due_at(Code::TopicMissing, start), Some(0));
        assert_eq!(log.due_at(Code::TopicMissing, start), None);
        assert_eq!(log.due_at(Code::TopicMissing, start), None);
        assert_eq!(log.due_at(Code::PubsubThrottled, start), Some(0));
        assert_eq!(log.due_at(Code::TopicMissing, start + INTERVAL), Some(2));
    }
    #[test]
    fn a_line_suppresses_no_other_line_with_the_same_code() {
        let (mut log, start) = (ThrottledLog::default(), Instant::now());
        assert_eq!(log.due_at(("one", Code::EventInvalid), start), Some(0));
        assert_eq!(log.due_at(("two", Code::EventInvalid), start), Some(0));
        assert_eq!(log.due_at(("two", Code::EventInvalid), start), None);
        log.forget(&("one", Code::EventInvalid));
        assert_eq!(log.due_at(("one", Code::EventInvalid), start), Some(0));
        assert_eq!(log.due_at(("two", Code::EventInvalid), start), None);
    }
}
