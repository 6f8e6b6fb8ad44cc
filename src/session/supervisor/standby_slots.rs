//! Notices that the walsender waits for the standby servers of `synchronized_standby_slots`. During such a
//! wait the stream is silent, and only the server's log says why.

use std::time::{Duration, Instant};

use decoder::Lsn;
use slot_manager::standby_slots::{self, WalsenderWait};

use crate::error::{Code, Error, Result};
use crate::metrics::Metrics;
use crate::postgres::Sql;
use crate::throttled_log::ThrottledLog;

/// How long the walsender can wait before the relay reports the wait. A standby server that restarts is away
/// for some seconds, which needs no report.
const LIMIT: Duration = Duration::from_secs(10);

/// The wait of the walsender for standby servers.
#[derive(Debug, Default)]
pub(super) struct StandbySlots {
    wait: Option<StandbySlotsWait>,
    log: ThrottledLog,
}

#[derive(Debug, Clone, Copy)]
struct StandbySlotsWait {
    /// The position up to which the walsender has read the WAL. The wait ends when this position changes.
    sent: Lsn,
    since: Instant,
}

impl StandbySlots {
    /// Asks PostgreSQL what the walsender waits for, and reports a wait of at least [`LIMIT`]. `has_failover` says
    /// whether the slot has `failover`; the walsenders of other slots do not wait for standby servers.
    ///
    /// # Errors
    /// Database errors.
    pub(super) async fn look(
        &mut self,
        sql: &Sql,
        walsender: i32,
        has_failover: bool,
        metrics: &Metrics,
    ) -> Result<()> {
        let found = if has_failover {
            standby_slots::walsender_wait(sql, walsender).await?
        } else {
            None
        };
        let now = Instant::now();
        self.wait = next(self.wait, found.as_ref(), now);
        let stalled = self.wait.filter(|wait| now - wait.since >= LIMIT);
        let (Some(wait), Some(found)) = (stalled, found) else {
            metrics.troubles.set_stream(None);
            self.log = ThrottledLog::default();
            return Ok(());
        };
        let error = stalled_error(&found);
        metrics.troubles.set_stream(Some((&error, wait.since)));
        if let Some(since_last) = self.log.due(error.code()) {
            let seconds = wait.since.elapsed().as_secs();
            tracing::warn!(
                code = %error.code(), hint = error.hint_text(), since_last,
                "nothing is delivered for {seconds} s: {error}"
            );
        }
        Ok(())
    }
}

/// Returns the wait at the time `now`, computed from the wait at the last poll and the result of this poll.
/// Returns `None` if the walsender does not wait for standby servers.
fn next(
    last: Option<StandbySlotsWait>,
    found: Option<&WalsenderWait>,
    now: Instant,
) -> Option<StandbySlotsWait> {
    let found = found?;
    let same = last.filter(|wait| wait.sent == found.sent);
    match found.is_for_standbys {
        Some(true) => Some(same.unwrap_or(StandbySlotsWait {
            sent: found.sent,
            since: now,
        })),
        Some(false) => None,
        None => same,
    }
}

fn stalled_error(found: &WalsenderWait) -> Error {
    let slots: Vec<String> = found.behind.iter().map(ToString::to_string).collect();
    let slots = if slots.is_empty() {
        "they are behind".to_owned()
    } else {
        slots.join(", ")
    };
    let what = format!(
        "PostgreSQL sends nothing to the relay, because it waits for the standby servers of \
         synchronized_standby_slots: {slots}"
    );
    Error::new(Code::StandbySlotsStalled, what)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_lasts_until_the_walsender_moves_or_waits_for_something_else() {
        let start = Instant::now();
        let mut wait: Option<StandbySlotsWait> = None;
        let mut poll = |second, sent, is_for_standbys| {
            let found = WalsenderWait {
                sent: Lsn::new(sent),
                is_for_standbys,
                behind: Vec::new(),
            };
            let now = start + Duration::from_secs(second);
            wait = next(wait, Some(&found), now);
            wait.map(|wait| (now - wait.since).as_secs())
        };
        assert_eq!(poll(0, 5, None), None);
        assert_eq!(poll(5, 5, Some(true)), Some(0));
        // At this poll, the walsender is awake for a moment to check the standby servers. The wait continues.
        assert_eq!(poll(10, 5, None), Some(5));
        assert_eq!(poll(15, 5, Some(true)), Some(10));
        // A standby server that is always a little behind delays each new position a little. Each of these delays is
        // a new wait, so its time begins at zero.
        assert_eq!(poll(20, 6, Some(true)), Some(0));
        assert_eq!(poll(25, 7, None), None);
        assert_eq!(poll(30, 7, Some(true)), Some(0));
        assert_eq!(poll(35, 7, Some(false)), None);
        assert!(next(wait, None, start).is_none());
    }
}
