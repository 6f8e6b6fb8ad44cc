//! Detects a dead connection of a session whose statements may take long.
//!
//! A statement on a large table may take so long that a timeout would end it on every attempt. TCP keepalives
//! do not help either, because a proxy may answer them although it no longer forwards anything. So while an
//! answer is outstanding, we ask the server over another connection whether it is still working on the
//! statement.

use std::time::Duration;

use replication::Target;
use slot_manager::activity::{self, ServerProcess};
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep, sleep_until};

use super::limited::AnswerLimit;
use super::sql::{Sql, connect, log_dead};
use crate::error::Result;

/// Time between two polls of the server process. An answer that is in transit at one poll arrives before the next.
const POLL_INTERVAL: Duration = Duration::from_secs(10);

/// Time limit for one poll.
const CHECK_TIMEOUT: Duration = Duration::from_secs(5);

/// Opens a session whose statements may take any amount of time, or up to `statement_timeout` if this is
/// not 0. The session ends if the server has finished a statement, but the answer does not arrive.
///
/// # Errors
/// Connection errors.
pub(crate) async fn connect_patiently(
    servers: &impl AsRef<[Target]>,
    application_name: &str,
    statement_timeout: Duration,
) -> Result<Sql> {
    let mut sql = connect(servers, application_name, CHECK_TIMEOUT).await?;
    let process = activity::own_process(&sql).await?;
    sql.limit_statements(statement_timeout).await?;
    let watchdog = Watchdog {
        target: sql.target().clone(),
        process,
        answers: sql.answers().clone(),
        session: sql.abort_handle(),
    };
    sql.watch(tokio::spawn(watchdog.run()));
    Ok(sql)
}

/// Ends a session if the server has finished a statement, but the connection does not deliver the answer.
struct Watchdog {
    target: Target,
    process: ServerProcess,
    answers: AnswerLimit,
    session: AbortHandle,
}

impl Watchdog {
    async fn run(self) {
        // Set if the last poll found that the server had finished the statement. The value is the result of
        // `silent_since` at that poll. If `silent_since` has the same result at the next poll, no byte has arrived in
        // between. If the statement is finished at that poll too, the answer is lost.
        let mut done_in = None;
        loop {
            let Some(since) = self.answers.silent_since() else {
                sleep(POLL_INTERVAL).await;
                continue;
            };
            let due = since + POLL_INTERVAL;
            if Instant::now() < due {
                sleep_until(due).await;
                continue;
            }
            // A failed poll proves nothing about the session's connection, so do not count the statement as finished.
            let is_done = matches!(self.is_at_work().await, Ok(false));
            let is_silent = self.answers.silent_since() == Some(since);
            if is_done && is_silent && done_in == Some(since) {
                log_dead("PostgreSQL has answered, but the answer does not arrive");
                self.session.abort();
                return;
            }
            done_in = is_done.then_some(since);
            sleep(POLL_INTERVAL).await;
        }
    }

    async fn is_at_work(&self) -> Result<bool> {
        let sql = connect(&self.target, "postrider", CHECK_TIMEOUT).await?;
        Ok(activity::is_at_work(&sql, &self.process).await?)
    }
}
