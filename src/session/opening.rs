//! Watches a session of the relay while it opens. If the session has to wait for long, the relay's log and
//! all views say why. The session may wait for a lock (the views name its holder), for a synchronous standby
//! server, or for the transactions that delay a new slot.

use std::convert::Infallible;
use std::time::Instant;

use super::{REWRITE_AFTER, SessionRunner};
use crate::condition::{Condition, Phase, State};
use crate::error::Code;
use crate::postgres::{LOOK_INTERVAL, LongWait, WatchedSession};
use crate::throttled_log::ThrottledLog;

impl SessionRunner {
    /// Reports what the opening of a session waits for, until the caller drops the future. `opener` is the
    /// SQL session that the opening uses.
    pub(super) async fn report_what_opening_waits_for(
        &self,
        opener: &WatchedSession,
    ) -> Infallible {
        let troubles = &self.metrics.troubles;
        let (mut sql, mut said) = (None, None);
        let mut log = ThrottledLog::default();
        let mut is_locked = false;
        loop {
            tokio::time::sleep(LOOK_INTERVAL).await;
            if matches!(
                self.state.phase(),
                Phase::Standby(_) | Phase::HeldByStranger(_)
            ) {
                sql = None;
                continue;
            }
            match opener.long_wait(&mut sql).await {
                Ok(Some(LongWait { error, since })) => {
                    troubles.set_opening(&error, since);
                    is_locked = true;
                    if let Some(since_last) = log.due(error.code()) {
                        tracing::warn!(
                            code = %error.code(), hint = error.hint_text(), since_last,
                            "the session cannot begin yet: {error}"
                        );
                    }
                }
                Ok(None) if is_locked => {
                    troubles.opening_continues();
                    is_locked = false;
                }
                // `Ok(None)`: there is no report to withdraw. `Err(_)`: the check failed and says nothing about the
                // session, so the report of the last successful check stays.
                Ok(None) | Err(_) => {}
            }
            self.write_wait(&mut said).await;
        }
    }

    /// Writes the relay's condition to its row while delivery is held up or a recovery begins. Removes the condition
    /// from the row afterwards. Writes an unchanged condition again after [`REWRITE_AFTER`], so that the commands know
    /// that this relay still runs. `said` is the last written condition, and the time at which it was written.
    async fn write_wait(&self, said: &mut Option<(Condition, Instant)>) {
        let condition = self.metrics.condition(&self.state);
        // `Recovering` is written too, because a command can see that the slot is missing, but not that the
        // relay is creating a new one. In a copy of the database, write nothing: the copied row belongs to the
        // relay of the original.
        let is_of_a_copy = condition.code.as_deref() == Some(Code::ForeignCluster.name());
        let says =
            (condition.is_held_up() && !is_of_a_copy) || condition.state == State::Recovering;
        let condition = says.then_some(condition);
        let is_known = match (&said, &condition) {
            (None, None) => true,
            (Some((said, at)), Some(now)) => said.is_like(now) && at.elapsed() < REWRITE_AFTER,
            _ => false,
        };
        if !is_known && self.write_condition(condition.as_ref()).await {
            *said = condition.map(|condition| (condition, Instant::now()));
        }
    }
}
