//! Limits a frequent log line to one line per error code every ten seconds.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::error::Code;

const INTERVAL: Duration = Duration::from_secs(10);

/// When a line was last logged for each code, and how many lines were suppressed since then.
#[derive(Debug, Default)]
pub(crate) struct ThrottledLog {
    last: HashMap<Code, (Instant, u64)>,
}

impl ThrottledLog {
    /// Returns the number of lines suppressed since the last line, or `None` if no line is due.
    pub(crate) fn due(&mut self, code: Code) -> Option<u64> {
        self.due_at(code, Instant::now())
    }

    fn due_at(&mut self, code: Code, now: Instant) -> Option<u64> {
        match self.last.get_mut(&code) {
            Some((last, left_out)) if now.saturating_duration_since(*last) < INTERVAL => {
                *left_out += 1;
                None
            }
            Some((_, left_out)) => {
                let left_out = *left_out;
                self.last.insert(code, (now, 0));
                Some(left_out)
            }
            None => {
                self.last.insert(code, (now, 0));
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
}
