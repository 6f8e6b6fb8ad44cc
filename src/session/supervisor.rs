//! Polls the database every few seconds, alongside the stream.
//!
//! pgoutput uses the publication as it was at the WAL position that it is decoding. If the
//! publication did not exist at that position, PostgreSQL 18 skips rows without an error. Checking the
//! publication over SQL is the only protection: while the publication is wrong or unknown, the relay
//! must not confirm keepalives. The same poll also renews the lease, reads the slot's metrics, and
//! records the confirmed position. After each poll, the supervisor records whether delivery is held up.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use replication::LeaseProof;
use slot_manager::activity::{self, LastReply};
use slot_manager::health::{self, Observation, Thresholds, Viewer};
use slot_manager::publication::{self, CapturedTable, PublicationState};
use slot_manager::{DatabaseOrigin, Health, Slot, SlotName, slots};
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;
use tokio_postgres::types::PgLsn;

use crate::condition::{Condition, RelayState};
use crate::error::{Code, Error, Result};
use crate::metrics::Metrics;
use crate::postgres::{Sql, Target, connect};
use crate::store::relay_row;
use crate::throttled_log::ThrottledLog;

/// Time between two polls. Rows that are inserted while the publication is wrong must be read from the
/// table. A short interval keeps their number small.
const INTERVAL: Duration = Duration::from_secs(5);

/// The relay writes an unchanged condition again after this time, so that readers can tell a current
/// condition from a stale one.
pub(super) const SAID_AGAIN: Duration = Duration::from_secs(30);

/// Time limit for writing the condition, which must not delay the next poll.
const SAY_LIMIT: Duration = Duration::from_secs(1);

const STATEMENT_TIMEOUT: Duration = Duration::from_secs(4);
const POLL_TIMEOUT: Duration = Duration::from_secs(5);

/// The result of a poll.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Supervision {
    PublicationRight,
    /// The publication is wrong, or cannot be checked.
    PublicationUnsure,
    /// The server is shutting down: it takes no new sessions or writes, and waits for us to confirm.
    ServerStopping,
}

impl Supervision {
    pub(super) fn publication_is_right(self) -> bool {
        self == Supervision::PublicationRight
    }
}

/// The slot, publication and tables to watch, and the lease to renew.
#[derive(Debug, Clone)]
pub(super) struct WatchSubject {
    pub(super) target: Target,
    pub(super) slot: SlotName,
    pub(super) publication: String,
    pub(super) tables: Vec<CapturedTable>,
    pub(super) origin: DatabaseOrigin,
    /// The proof of our lease, which [`prove_lease`] renews, and our walsender's pid.
    pub(super) lease: (LeaseProof, i32),
    pub(super) wal_sender_timeout: Duration,
    /// The name of this relay.
    pub(super) instance: String,
    /// The phase of this relay.
    pub(super) state: Arc<RelayState>,
}

/// Starts the supervisor. `state` is the state of the publication, which has just passed its check. If
/// the publication or the partitions of a table change, the supervisor wakes the auditor through `audit`.
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
            // Begin with the current number, so that the first poll does not write to the relay's row:
            // the old content is needed until this session has taken the row.
            delivered: metrics.delivered(),
            lag: LagTrend::default(),
            said: None,
            metrics,
        };
        loop {
            let found = watcher.poll().await;
            watcher.say_what_holds_up().await;
            watcher
                .metrics
                .publication_ok
                .set(Some(f64::from(u8::from(found.publication_is_right()))));
            sender.send_if_modified(|known| std::mem::replace(known, found) != found);
            tokio::time::sleep(interval).await;
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

/// How fast the lag shrinks.
#[derive(Debug, Default)]
struct LagTrend {
    samples: VecDeque<(Instant, u64)>,
}

impl LagTrend {
    /// The trend is computed from this many polls, about half a minute.
    const SAMPLES: usize = 6;

    /// Adds a sample. Returns the time until the lag is gone, at the rate since the oldest sample.
    /// Returns `None` if the lag is unknown or has not shrunk.
    fn caught_up_in(&mut self, lag_bytes: Option<u64>, now: Instant) -> Option<Duration> {
        let lag = lag_bytes?;
        if self.samples.len() == Self::SAMPLES {
            self.samples.pop_front();
        }
        self.samples.push_back((now, lag));
        let (at, before) = self.samples.front()?;
        let shrunk = before.checked_sub(lag).filter(|shrunk| *shrunk > 0)?;
        let seconds = now.saturating_duration_since(*at).as_secs_f64();
        Duration::try_from_secs_f64(seconds * lag as f64 / shrunk as f64).ok()
    }
}

struct Watcher {
    subject: WatchSubject,
    sql: Option<Sql>,
    /// The publication at the last poll.
    state: PublicationState,
    metrics: Metrics,
    audit: Arc<Notify>,
    log: ThrottledLog,
    /// Number of delivered events when the relay's row was last written, or when the supervisor
    /// started.
    delivered: u64,
    lag: LagTrend,
    /// The condition in the relay's row, and when it was written.
    said: Option<(Condition, Instant)>,
}

impl Watcher {
    async fn poll(&mut self) -> Supervision {
        let had_session = self.sql.is_some();
        match self.poll_in_time().await {
            Ok(found) => found,
            // A broken session may mean a restart or a shutdown. A new session shows which it is.
            Err(_) if had_session => match self.poll_in_time().await {
                Ok(found) => found,
                Err(error) => self.unsure(&error),
            },
            Err(error) => self.unsure(&error),
        }
    }

    fn unsure(&mut self, error: &Error) -> Supervision {
        if let Some(since_last) = self.log.due(error.code()) {
            tracing::warn!(
                code = %error.code(), hint = error.hint_text(), since_last,
                "cannot check the publication, so idle positions are not confirmed: {error}"
            );
        }
        self.metrics.lag_bytes.set(None);
        self.metrics.retained_bytes.set(None);
        self.metrics.headroom_bytes.set(None);
        self.metrics.slot_health.set(None);
        self.metrics.troubles.set_publication(Some(error));
        if error.code() == Code::PostgresStopping {
            Supervision::ServerStopping
        } else {
            Supervision::PublicationUnsure
        }
    }

    /// One poll, with its own time limit: a dead server does not apply the statement timeout.
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
            None => self
                .sql
                .insert(connect(target, "postrider supervisor", STATEMENT_TIMEOUT).await?),
        };
        prove_lease(sql, proof, *walsender).await?;
        let state = publication::inspect(sql, publication, tables).await?;
        if let Some(slot) = slots::find(sql, slot).await? {
            self.metrics.lag_bytes.set(slot.lag_bytes.map(|n| n as f64));
            let caught_up_in = self.lag.caught_up_in(slot.lag_bytes, Instant::now());
            let caught_up_in = caught_up_in.map(|time| time.as_secs_f64());
            self.metrics.caught_up_in.set(caught_up_in);
            self.metrics
                .retained_bytes
                .set(slot.retained_bytes.map(|n| n as f64));
            let headroom = slot.safe_wal_size.map(|bytes| bytes.max(0) as f64);
            self.metrics.headroom_bytes.set(headroom);
            let oldest = self.metrics.oldest_pending.age_seconds();
            let health = health_of(&slot, self.subject.origin, oldest);
            self.metrics.slot_health.set(Some(health));
            let delivered = self.metrics.delivered();
            // Write only when something was delivered (an idle relay writes nothing), and only if
            // our walsender reads the slot. Otherwise somebody may have recreated the slot.
            let is_ours = slot.active_pid == Some(*walsender);
            if let Some(lsn) = slot
                .confirmed_flush_lsn
                .filter(|_| is_ours && delivered != self.delivered)
            {
                let written =
                    relay_row::update(sql, &self.subject.slot, PgLsn::from(lsn.as_u64())).await;
                match written {
                    Ok(()) => self.delivered = delivered,
                    Err(error) => tracing::warn!(code = %error.code(), "outbox.relay: {error}"),
                }
            }
        }
        Ok(self.judge(&state))
    }

    /// Records in the relay's row why delivery is held up or late, and clears that entry when delivery works
    /// again.
    async fn say_what_holds_up(&mut self) {
        let condition = self.metrics.condition(&self.subject.state);
        let condition = condition.is_written().then_some(condition);
        let is_known = match (&self.said, &condition) {
            (None, None) => true,
            (Some((said, at)), Some(now)) => said.is_like(now) && at.elapsed() < SAID_AGAIN,
            _ => false,
        };
        let Some(sql) = self.sql.as_ref().filter(|_| !is_known) else {
            return;
        };
        let WatchSubject { slot, instance, .. } = &self.subject;
        let writing = relay_row::write_condition(sql, slot, instance, condition.as_ref());
        match tokio::time::timeout(SAY_LIMIT, writing).await {
            Ok(Ok(())) => self.said = condition.map(|condition| (condition, Instant::now())),
            Ok(Err(error)) => tracing::debug!(code = %error.code(), "outbox.relay: {error}"),
            // This SQL session still waits for the answer, so the next poll opens a new SQL session.
            Err(_) => self.sql = None,
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
            self.log = ThrottledLog::default();
        } else if let Some(since_last) = self.log.due(Code::PublicationDrift) {
            for problem in &problems {
                tracing::error!(
                    code = "publication-drift",
                    hint = problem.remedy(),
                    since_last,
                    "rows are not streamed: {problem}"
                );
            }
        }
        if problems.is_empty() && state.has_changed_since(&self.state) {
            tracing::warn!(
                code = "publication-drift",
                "the publication or a captured table was altered or recreated: rows inserted \
                 in between may not have been streamed; comparing the tables with outbox.dispatch"
            );
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

/// The health of the slot that this relay streams from. The recorded position is compared only when a
/// session opens, because nobody else can move the slot while we hold it.
fn health_of(slot: &Slot, origin: DatabaseOrigin, oldest: Option<f64>) -> Health {
    let observation = Observation {
        slot: Some(slot),
        viewer: Viewer::Streaming,
        time_lag: oldest.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok()),
        origin,
        recorded: None,
    };
    health::judge(&observation, &Thresholds::default())
}

/// Renews the proof of our lease. PostgreSQL shows the time at which we sent the last status message
/// that it has processed.
async fn prove_lease(sql: &Sql, proof: &LeaseProof, walsender: i32) -> Result<()> {
    let asked_at = Instant::now();
    match activity::last_reply(sql, walsender).await? {
        LastReply::NoSlot => proof.give_up(),
        // PostgreSQL hides the time from our role, but shows that our walsender has the slot.
        LastReply::Hidden => proof.seen(asked_at),
        LastReply::SentAt(sent_at) => {
            // If our clock was set back in the meantime, the message seems newer than it is, but never
            // newer than now.
            let age = sent_at.elapsed().unwrap_or_default();
            if let Some(sent_at) = Instant::now().checked_sub(age) {
                proof.prove(sent_at);
            }
        }
    }
    Ok(())
}
