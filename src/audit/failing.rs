//! Reports that audits fail. While they fail, nobody notices rows that the stream leaves out, so all views show the
//! failure.

use std::time::{Duration, Instant};

use super::{AuditState, SOON};
use crate::error::{Code, Error};
use crate::store::privileges::{Purpose, name_missing};

/// After this long without another failure, audits no longer count as failing, even if none has succeeded. An
/// audit may have to wait for a backlog before it can succeed.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(60);

/// When audits began to fail, and when one failed last.
#[derive(Debug, Clone, Copy)]
pub(super) struct FailingAudits {
    since: Instant,
    last: Instant,
}

impl FailingAudits {
    /// Notes one more failure.
    fn again(earlier: Option<Self>, now: Instant) -> Self {
        let since = earlier.map_or(now, |earlier| earlier.since);
        Self { since, last: now }
    }

    fn is_forgotten(self, now: Instant) -> bool {
        now.duration_since(self.last) > FORGOTTEN_AFTER
    }
}

impl AuditState {
    /// Reports an error of an audit. The log has at most one line per code in ten seconds. The other views show an
    /// error only if audits have failed for at least [`SOON`], because a shorter failure usually ends with the next
    /// attempt.
    pub(super) async fn failed(&mut self, error: Error) {
        let (target, tables) = (&self.subject.target, &self.subject.tables);
        let error = name_missing(error, target, tables, Purpose::Relay).await;
        if let Some(since_last) = self.log.due(error.code()) {
            tracing::warn!(
                code = %error.code(), hint = error.hint_text(), since_last,
                "cannot compare the tables with outbox.dispatch, retrying in {SOON:?}: {error}"
            );
        }
        if error.code() == Code::TableCaptured {
            // Another slot also captures rows of our tables, and both relays would publish these rows. So end the
            // session. If it has ended already, nobody receives this error.
            let _ = self.broken.try_send(error);
            return;
        }
        let failing = FailingAudits::again(self.failing, Instant::now());
        self.failing = Some(failing);
        if failing.since.elapsed() >= SOON {
            let has_gap = self.has_trace || self.gap.is_some();
            let since = failing.since;
            self.subject.metrics.audit_fails(&error, since, has_gap);
        }
    }

    /// Notes that a step of an audit has succeeded. The audit itself may not be complete yet.
    pub(super) fn continues(&mut self) {
        let now = Instant::now();
        if self
            .failing
            .is_some_and(|failing| failing.is_forgotten(now))
        {
            self.failing = None;
            self.subject.metrics.audit_is_unknown();
        }
    }

    /// Notes that audits no longer fail.
    pub(super) fn succeeded(&mut self) {
        self.failing = None;
        self.subject.metrics.audit_succeeded();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_count_from_the_first_one_and_are_forgotten_after_a_minute_without_another() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let first = FailingAudits::again(None, start);
        let second = FailingAudits::again(Some(first), at(50));
        assert_eq!(second.since, start);
        assert!(!second.is_forgotten(at(100)));
        assert!(second.is_forgotten(at(111)));
    }
}
