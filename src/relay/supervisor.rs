//! Looks at the database from beside the stream, every few seconds.
//!
//! pgoutput reads the publication as it was at the position in the WAL that is being decoded, and
//! PostgreSQL 18 skips rows without an error when it was not there. Looking at it over SQL is the
//! only protection: while it is wrong, or unknown, no keepalive may be confirmed. The same look
//! brings the figures of the slot, and writes down who serves it.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use slot_manager::publication::{self, CapturedTable, PublicationState};
use slot_manager::{Origin, SlotName, slots};
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;
use tokio_postgres::types::PgLsn;

use super::record;
use crate::error::{Code, Error, Result};
use crate::metrics::{Kind, Metrics};
use crate::postgres::{Sql, Target, connect};
use crate::source::LeaseProof;

/// Between two looks. Rows that come while the publication is wrong must be fetched from the
/// table: the shorter, the fewer.
const INTERVAL: Duration = Duration::from_secs(5);

const STATEMENT_TIMEOUT: Duration = Duration::from_secs(4);
const LOOK_LIMIT: Duration = Duration::from_secs(5);

/// What the supervisor has found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Supervision {
    PublicationRight,
    /// Wrong, or not to be seen.
    PublicationUnsure,
    /// The server takes no new sessions: it waits for us to confirm, and cannot be written to.
    ServerStopping,
}

impl Supervision {
    pub(super) fn publication_is_right(self) -> bool {
        self == Supervision::PublicationRight
    }
}

/// What to look at.
#[derive(Debug, Clone)]
pub(super) struct Subject {
    pub(super) target: Target,
    pub(super) slot: SlotName,
    pub(super) publication: String,
    pub(super) tables: Vec<CapturedTable>,
    pub(super) origin: Origin,
    /// What it is told by [`prove_lease`], and our walsender's pid.
    pub(super) lease: (LeaseProof, i32),
    pub(super) wal_sender_timeout: Duration,
}

/// Starts to look; just now all was well, with `state`. A change hastens the audit.
pub(super) fn start(
    subject: Subject,
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
            // Before this session has taken the row, what stands there is still to be compared.
            delivered: metrics.delivered(),
            metrics,
        };
        loop {
            let found = watcher.look().await;
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

/// The running task; ends when dropped.
#[derive(Debug)]
pub(super) struct Supervisor(JoinHandle<()>);

impl Drop for Supervisor {
    fn drop(&mut self) {
        self.0.abort();
    }
}

struct Watcher {
    subject: Subject,
    sql: Option<Sql>,
    /// How the publication looked when the session began.
    state: PublicationState,
    metrics: Metrics,
    audit: Arc<Notify>,
    /// Events delivered when the relay's row was written last, or when this began.
    delivered: u64,
}

impl Watcher {
    async fn look(&mut self) -> Supervision {
        let had_session = self.sql.is_some();
        match self.look_in_time().await {
            Ok(found) => found,
            // A session that was cut may mean a restart or a shutdown: a new one tells.
            Err(_) if had_session => match self.look_in_time().await {
                Ok(found) => found,
                Err(error) => self.unsure(&error),
            },
            Err(error) => self.unsure(&error),
        }
    }

    fn unsure(&mut self, error: &Error) -> Supervision {
        tracing::warn!(
            code = %error.code(), hint = error.hint_text(),
            "cannot look at the publication, so idle positions are not confirmed: {error}"
        );
        self.metrics.lag_bytes.set(None);
        self.metrics.retained_bytes.set(None);
        match error.code() == Code::PostgresStopping {
            true => Supervision::ServerStopping,
            false => Supervision::PublicationUnsure,
        }
    }

    /// One look with a limit of its own, since a server that is gone does not keep to its own.
    async fn look_in_time(&mut self) -> Result<Supervision> {
        let looked = tokio::time::timeout(LOOK_LIMIT, self.try_look()).await;
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

    async fn try_look(&mut self) -> Result<Supervision> {
        let Subject {
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
            self.metrics
                .retained_bytes
                .set(slot.retained_bytes.map(|n| n as f64));
            let health = super::health_of(&slot, self.subject.origin);
            self.metrics.slot_health.clear();
            self.metrics
                .slot_health
                .get_or_create(&Kind {
                    kind: health.name(),
                })
                .set(1);
            let delivered = self.metrics.delivered();
            // Only when something was delivered: an idle relay writes nothing.
            // And only of the slot that this session reads, not of one made anew since.
            let is_ours = slot.active_pid == Some(*walsender);
            if let Some(lsn) = slot
                .confirmed_flush_lsn
                .filter(|_| is_ours && delivered != self.delivered)
            {
                let written =
                    record::update(sql, &self.subject.slot, PgLsn::from(lsn.as_u64())).await;
                match written {
                    Ok(()) => self.delivered = delivered,
                    Err(error) => tracing::warn!(code = %error.code(), "outbox.relay: {error}"),
                }
            }
        }
        Ok(self.judge(&state))
    }

    fn judge(&mut self, state: &PublicationState) -> Supervision {
        let problems = state.problems();
        for problem in &problems {
            tracing::error!(
                code = "publication-drift",
                hint = problem.remedy(),
                "rows are not streamed: {problem}"
            );
        }
        if problems.is_empty() && state.has_changed_since(&self.state) {
            tracing::warn!(
                code = "publication-drift",
                "the publication or a captured table was altered or made anew: rows inserted \
                 meanwhile may not have been streamed; comparing the tables with outbox.dispatch"
            );
            self.audit.notify_one();
        }
        self.state = state.clone();
        match problems.is_empty() {
            true => Supervision::PublicationRight,
            false => Supervision::PublicationUnsure,
        }
    }
}

/// Asks which of our status messages PostgreSQL has taken in last: it shows our own time of
/// sending.
async fn prove_lease(sql: &Sql, proof: &LeaseProof, walsender: i32) -> Result<()> {
    const REPLY_TIME: &str = "\
        SELECT (SELECT reply_time FROM pg_stat_replication WHERE pid = $1) \
        FROM pg_replication_slots WHERE active_pid = $1";
    let asked_at = Instant::now();
    let Some(row) = sql.query_opt(REPLY_TIME, &[&walsender]).await? else {
        proof.give_up();
        return Ok(());
    };
    let sent_at: Option<SystemTime> = row.get(0);
    if sent_at.is_none() {
        // Without the rights of pg_read_all_stats the time is hidden; that our walsender has the
        // slot is not.
        proof.seen(asked_at);
        return Ok(());
    }
    // A clock that was set back since makes it look newer than it is, at most as new as now.
    let age = sent_at.map(|sent_at| sent_at.elapsed().unwrap_or_default());
    if let Some(sent_at) = age.and_then(|age| Instant::now().checked_sub(age)) {
        proof.prove(sent_at);
    }
    Ok(())
}
