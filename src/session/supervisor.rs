//! Polls the database every few seconds, alongside the stream.
//!
//! pgoutput decodes each row with the publication as it was at the row's WAL position. If there was no
//! publication at that position, PostgreSQL 18 skips the row without an error. The relay can notice this only
//! by checking the publication over SQL. While the publication is wrong or cannot be checked, the relay must
//! not confirm the positions of keepalives, because it might confirm skipped rows. In each poll, the supervisor
//! also renews the lease and reads the slot's metrics. After a delivery it records the confirmed position.
//!
//! The supervisor also writes to the relay's row why delivery is held up or late, or which check fails. It writes soon
//! after a change, and about every 30 s without one. Without an SQL session, it leaves this to the dispatch writer.

mod held_slot;
mod lag_trend;
mod standby_slots;
mod supervision;

use std::sync::Arc;
use std::time::{Duration, Instant};

use decoder::PgTimestamp;
use replication::LeaseProof;
use slot_manager::activity;
use slot_manager::publication::{self, CapturedTable, PublicationState};
use slot_manager::{DatabaseOrigin, SlotName, cluster, slots};
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;
use tokio_postgres::types::PgLsn;

use crate::capture::claim;
use crate::condition::{Condition, RelayState, State};
use crate::error::{Code, Error, Result};
use crate::metrics::Metrics;
use crate::postgres::{Sql, Target, connect};
use crate::store::privileges::{Purpose, name_missing_on};
use crate::store::relay_row::{self, audits};
use crate::throttled_log::ThrottledLog;
use held_slot::{health_of, prove_lease};
use lag_trend::LagTrend;
use standby_slots::StandbySlots;
pub(super) use supervision::Supervision;

/// Pause between two polls. The pause is shorter if `wal_sender_timeout` is below 40 s. The pause is short, because
/// the stream leaves out rows while the publication is wrong, and operators should learn of that soon.
const INTERVAL: Duration = Duration::from_secs(5);
/// Identifies, in the throttled log, the warning that the publication does not cover all rows.
const NOT_STREAMED: (&str, Code) = ("rows are not streamed", Code::PublicationDrift);

/// Time between two checks for a changed state. The HTTP port shows a change at once, and the commands at
/// most this time later. This time also limits how often the relay writes if its state keeps changing.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);

/// Time after which the relay writes an unchanged condition again, so that readers can tell a current
/// condition from a stale one.
const REWRITE_AFTER: Duration = Duration::from_secs(30);

/// Maximum time for writing the condition. Short, because writing must not delay the next poll.
const WRITE_LIMIT: Duration = Duration::from_secs(1);

const STATEMENT_TIMEOUT: Duration = Duration::from_secs(4);
const POLL_TIMEOUT: Duration = Duration::from_secs(5);

/// The slot, publication and tables to watch, and the lease to renew.
#[derive(Debug, Clone)]
pub(super) struct WatchSubject {
    pub(super) target: Target,
    pub(super) slot: SlotName,
    pub(super) publication: String,
    pub(super) tables: Vec<CapturedTable>,
    pub(super) origin: DatabaseOrigin,
    /// The proof of our lease, which [`prove_lease`] renews, and the pid of our walsender.
    pub(super) lease: (LeaseProof, i32),
    pub(super) wal_sender_timeout: Duration,
    /// The name of this relay.
    pub(super) instance: String,
    pub(super) state: Arc<RelayState>,
}

/// Starts the supervisor. `state` is the publication as the session found it when the slot was free. If the
/// publication, a table or its partitions have changed since, the supervisor wakes the auditor through `audit`.
pub(super) fn start(
    subject: WatchSubject,
    state: PublicationState,
    metrics: Metrics,
    audit: Arc<Notify>,
) -> (Supervisor, watch::Receiver<Supervision>) {
    let (sender, receiver) = watch::channel(Supervision::PublicationRight);
    metrics.publication_ok.set(Some(1.0));
    let interval = INTERVAL.min(subject.wal_sender_timeout / 8);
    let task = tokio::spawn(async move {
        let mut watcher = Watcher {
            subject,
            sql: None,
            state,
            audit,
            log: ThrottledLog::default(),
            // Begin with the current number, so that the first poll does not write the confirmed position.
            // The session still needs the old position in the relay's row until it has taken over the row.
            delivered: metrics.delivered(),
            lag: LagTrend::default(),
            standby_slots: StandbySlots::default(),
            said: None,
            metrics,
        };
        loop {
            let found = watcher.poll().await;
            watcher.say(Occasion::Poll).await;
            watcher
                .metrics
                .publication_ok
                .set(Some(f64::from(u8::from(found.publication_is_right()))));
            sender.send_if_modified(|known| {
                let is_new = *known != found;
                *known = found;
                is_new
            });
            let next = tokio::time::Instant::now() + interval;
            while tokio::time::Instant::now() < next {
                tokio::time::sleep_until(next.min(tokio::time::Instant::now() + LOOK_INTERVAL))
                    .await;
                watcher.say(Occasion::Look).await;
            }
        }
    });
    (Supervisor(task), receiver)
}

/// The running task. Dropping this value ends it.
#[derive(Debug)]
pub(super) struct Supervisor(JoinHandle<()>);

impl Drop for Supervisor {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Why the supervisor checks whether the condition must be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Occasion {
    /// A poll has ended: write any change.
    Poll,
    /// Between two polls: write only a change of the state or of the code.
    Look,
}

struct Watcher {
    subject: WatchSubject,
    sql: Option<Sql>,
    /// The publication at the last poll.
    state: PublicationState,
    metrics: Metrics,
    audit: Arc<Notify>,
    /// Throttles repeated log lines. The name and the error code identify a line.
    log: ThrottledLog<(&'static str, Code)>,
    /// Number of delivered events when the relay's row was last written, or when the supervisor started.
    delivered: u64,
    lag: LagTrend,
    standby_slots: StandbySlots,
    /// The condition that the supervisor last wrote to the relay's row, or asked the dispatch writer to write, and the
    /// time. The inner `None` says that the relay had nothing to report.
    ///
    /// The outer `None` says that the supervisor has not written a condition yet. The row may still contain the
    /// condition that the relay wrote while it opened this session.
    said: Option<(Option<Condition>, Instant)>,
}

impl Watcher {
    async fn poll(&mut self) -> Supervision {
        let had_session = self.sql.is_some();
        match self.poll_in_time().await {
            Ok(found) => found,
            // The SQL session may have broken because the server has restarted or is shutting down. Try a new
            // SQL session: its error shows whether the server is shutting down.
            Err(_) if had_session => match self.poll_in_time().await {
                Ok(found) => found,
                Err(error) => self.unsure(&error),
            },
            Err(error) => self.unsure(&error),
        }
    }

    fn unsure(&mut self, error: &Error) -> Supervision {
        let is_stopping = error.code() == Code::PostgresStopping;
        if !is_stopping
            && let Some(since_last) = self.log.due(("cannot check the publication", error.code()))
        {
            tracing::warn!(
                code = %error.code(), hint = error.hint_text(), since_last,
                "cannot check the publication, so the relay confirms no position while it is idle: {error}"
            );
        }
        self.metrics.lag_bytes.set(None);
        self.metrics.retained_bytes.set(None);
        self.metrics.headroom_bytes.set(None);
        self.metrics.slot_health.set(None);
        self.metrics.troubles.set_stream(None);
        self.metrics.troubles.set_publication(Some(error));
        if is_stopping {
            Supervision::ServerStopping {
                publication_was_right: self.state.problems().is_empty(),
            }
        } else {
            Supervision::PublicationUnsure
        }
    }

    /// Makes one poll, with a time limit of its own, because a dead server does not apply the statement
    /// timeout.
    async fn poll_in_time(&mut self) -> Result<Supervision> {
        let looked = tokio::time::timeout(POLL_TIMEOUT, self.try_poll()).await;
        let found = looked.unwrap_or_else(|_| {
            Err(Error::new(
                Code::PostgresConnectionLost,
                "PostgreSQL does not answer",
            ))
        });
        if found.is_err() {
            self.sql = None;
        }
        found
    }

    async fn try_poll(&mut self) -> Result<Supervision> {
        let WatchSubject {
            target,
            slot,
            publication,
            tables,
            lease: (proof, walsender),
            ..
        } = &self.subject;
        let sql = match &self.sql {
            Some(sql) => sql,
            None => {
                let name = activity::supervisor_name(*walsender);
                let opened = connect(target, &name, STATEMENT_TIMEOUT).await?;
                opened.commit_locally().await?;
                self.sql.insert(opened)
            }
        };
        prove_lease(sql, proof, *walsender).await?;
        let asked_at = Instant::now();
        let shown = PgTimestamp::from(cluster::clock(sql).await?);
        let clock = &self.metrics.server_clock;
        clock.asked(shown, asked_at, Instant::now());
        let state = publication::inspect(sql, publication, tables).await?;
        if !state.problems().is_empty() {
            audits::note_wrong_publication(sql, slot, Some(*walsender)).await?;
        }
        if let Err(error) = claim::refuse_attached(sql, slot, &state).await {
            return Supervision::of_another_slot(error);
        }
        if let Some(slot) = slots::find(sql, slot).await? {
            self.metrics.lag_bytes.set(slot.lag_bytes.map(|n| n as f64));
            self.lag
                .measure(slot.lag_bytes, slot.confirmed_flush_lsn, &self.metrics);
            self.metrics
                .retained_bytes
                .set(slot.retained_bytes.map(|n| n as f64));
            let headroom = slot.safe_wal_size.map(|bytes| bytes.max(0) as f64);
            self.metrics.headroom_bytes.set(headroom);
            let oldest = self.metrics.oldest_pending.age_seconds();
            let health = health_of(&slot, self.subject.origin, oldest);
            self.metrics.slot_health.set(Some(health));
            let delivered = self.metrics.delivered();
            // Record the confirmed position only after a delivery, so that an idle relay writes nothing. Also
            // require that our walsender reads the slot. Otherwise somebody may have recreated the slot, and its
            // position would not be ours.
            let is_ours = slot.active_pid == Some(*walsender);
            let has_failover = slot.failover == Some(true);
            let standby_slots = &mut self.standby_slots;
            standby_slots
                .look(sql, *walsender, has_failover, &self.metrics)
                .await?;
            let confirmed = slot
                .confirmed_flush_lsn
                .map(|lsn| PgLsn::from(lsn.as_u64()));
            if let Some(lsn) = confirmed.filter(|_| is_ours && delivered != self.delivered) {
                match relay_row::update(sql, &self.subject.slot, lsn).await {
                    Ok(()) => self.delivered = delivered,
                    Err(error) => {
                        let error = name_missing_on(sql, error, &[], Purpose::Relay).await;
                        self.cannot_write_confirmed(&error);
                    }
                }
            }
        }
        Ok(self.judge(&state))
    }

    fn cannot_write_confirmed(&mut self, error: &Error) {
        if let Some(since_last) = self.log.due(("cannot write the position", error.code())) {
            tracing::warn!(
                code = %error.code(), hint = error.hint_text(), since_last,
                "cannot write the confirmed position to outbox.relay: {error}"
            );
        }
    }

    /// Records in the relay's row why delivery is held up or late, or which check fails. Clears the entry when the
    /// relay has nothing to report ([`Condition::is_written`]).
    async fn say(&mut self, occasion: Occasion) {
        let condition = self.metrics.condition(&self.subject.state);
        if condition.state == State::Starting {
            // The session is still on probation, so the row keeps the reason why the previous relay stopped.
            return;
        }
        let condition = condition.is_written().then_some(condition);
        // Without an SQL session, the supervisor asks the dispatch writer to write the condition. It repeats this
        // request after each poll, because the dispatch writer ignores a request while it has no connection.
        let asks_writer = self.sql.is_none() && occasion == Occasion::Poll;
        if !asks_writer && self.has_said(condition.as_ref(), occasion) {
            return;
        }
        let troubles = &self.metrics.troubles;
        let Some(sql) = self.sql.as_ref() else {
            troubles.leave_to_write(condition.clone());
            self.said = Some((condition, Instant::now()));
            return;
        };
        troubles.leave_to_write(None);
        let WatchSubject { slot, instance, .. } = &self.subject;
        let writing = relay_row::write_condition(&**sql, slot, instance, condition.as_ref());
        match tokio::time::timeout(WRITE_LIMIT, writing).await {
            Ok(Ok(())) => self.said = Some((condition, Instant::now())),
            Ok(Err(error)) => tracing::debug!(code = %error.code(), "outbox.relay: {error}"),
            // This SQL session is still waiting for the answer, so the next poll opens a new one.
            Err(_) => self.sql = None,
        }
    }

    /// Whether no write is needed, because the present condition `now` agrees with the last written condition. A
    /// condition is `None` if the relay has nothing to report. The two agree in these cases:
    ///
    /// - Both are `None`, and the last write is recent.
    /// - Both exist, the occasion is [`Occasion::Look`], and they have the same state and code.
    /// - Both exist, the occasion is [`Occasion::Poll`], the last write is recent, and they differ only in figures
    ///   ([`Condition::is_like`]). One figure must be equal: the number of events that wait for topics.
    fn has_said(&self, now: Option<&Condition>, occasion: Occasion) -> bool {
        let Some((said, at)) = &self.said else {
            return false;
        };
        let is_recent = at.elapsed() < REWRITE_AFTER;
        match (said, now, occasion) {
            (None, None, _) => is_recent,
            (Some(said), Some(now), Occasion::Look) => {
                said.state == now.state && said.code == now.code
            }
            (Some(said), Some(now), Occasion::Poll) => {
                let waits = Condition::waiting_for_topics;
                is_recent && said.is_like(now) && waits(said) == waits(now)
            }
            _ => false,
        }
    }

    fn judge(&mut self, state: &PublicationState) -> Supervision {
        let problems = state.problems();
        let first = problems.first().map(|problem| {
            let what = format!("rows are not streamed: {problem}");
            Error::new(Code::PublicationDrift, what).hint(problem.remedy())
        });
        self.metrics.troubles.set_publication(first.as_ref());
        if problems.is_empty() {
            self.log.forget(&NOT_STREAMED);
        } else if let Some(since_last) = self.log.due(NOT_STREAMED) {
            for problem in &problems {
                tracing::error!(
                    code = "publication-drift",
                    hint = problem.remedy(),
                    since_last,
                    "rows are not streamed: {problem}"
                );
            }
        }
        let was_wrong = !self.state.problems().is_empty();
        if problems.is_empty() && (was_wrong || state.has_changed_since(&self.state)) {
            tracing::warn!(
                code = "publication-drift",
                "the publication or a captured table was altered or recreated: rows inserted \
                 in between may not have been streamed; an audit of the tables follows"
            );
            self.metrics.gap_is_seen();
            self.audit.notify_one();
        } else if problems.is_empty() && state.has_other_partitions_than(&self.state) {
            self.audit.notify_one();
        }
        self.state = state.clone();
        if problems.is_empty() {
            Supervision::PublicationRight
        } else {
            Supervision::PublicationUnsure
        }
    }
}
