//! Runs one session on the slot: opens the session, runs its pipeline, and ends it gracefully.

use std::time::{Duration, Instant};

use decoder::Lsn;
use replication::Confirmable;
use tokio::sync::watch;
use tokio_postgres::types::PgLsn;

use super::pipeline::PipelineEnd;
use super::{STATEMENT_TIMEOUT, SessionRunner, stuck};
use crate::condition::Phase;
use crate::error::{Code, Error, Result};
use crate::postgres::{Target, connect};
use crate::settings::Settings;
use crate::store::relay_row;

/// Maximum time that a broken session waits for its requests in flight before the next session begins. The
/// next session again publishes the events of requests that got no answer.
const BROKEN_SESSION_DRAIN: Duration = Duration::from_secs(10);

/// Maximum time for recording the last position, so that recording never delays a shutdown for long.
const WRITE_DOWN_LIMIT: Duration = Duration::from_secs(2);

/// Time between two checks whether a session on probation has delivered an event.
const PROBATION_LOOK: Duration = Duration::from_millis(50);

/// A session that lasts less than this time and confirms nothing counts as having failed at once.
const LONG_SESSION: Duration = Duration::from_secs(10);

/// Shortest probation of a session. It applies after a session that failed at once, and to the first session if the
/// previous relay stopped with an error.
pub(super) const SHORTEST_PROBATION: Duration = Duration::from_secs(2);

/// The facts about an ended session on which [`SessionRunner::run`] depends.
#[derive(Debug, Default)]
pub(super) struct SessionLife {
    /// How long the session streamed or recovered, without the time for ending it. `None` if the session
    /// ended while it was opening.
    pub(super) lived: Option<Duration>,
    /// Whether the session has confirmed a later position than the one from which it started.
    pub(super) has_advanced: bool,
}

impl SessionLife {
    /// Returns the probation of the next session: how long that session must last before the relay says that
    /// it streams. The probation is zero if this session lasted long or made progress. Otherwise the
    /// probation is twice the time that this session lasted, and at least [`SHORTEST_PROBATION`], because the
    /// next session will probably fail after the same time. For example, the server cannot decode the next
    /// record of the WAL while its disk is full. Returns `None` if this session ended while it was opening.
    pub(super) fn next_probation(&self) -> Option<Duration> {
        let lived = self.lived?;
        if self.has_advanced || lived >= LONG_SESSION {
            return Some(Duration::ZERO);
        }
        Some(SHORTEST_PROBATION.max(lived * 2))
    }

    pub(super) fn was_long(&self) -> bool {
        self.lived.is_some_and(|lived| lived >= LONG_SESSION)
    }
}

impl SessionRunner {
    /// Runs one session until shutdown or an error. Writes to `life` how long the session lasts, and whether
    /// it makes progress. The relay's phase shows the session only after `probation`, or as soon as the
    /// session has delivered an event.
    pub(super) async fn run_session(
        &self,
        shutdown: &mut watch::Receiver<bool>,
        probation: Duration,
        life: &mut SessionLife,
    ) -> Result<PipelineEnd> {
        let (settings, metrics) = (&self.settings, &self.metrics);
        // Another relay may hold the slot by now, so forget the metrics of the last attempt, even if that
        // attempt opened no session.
        metrics.forget_session();
        let (mut pipeline, beside) = tokio::select! {
            biased;
            _ = wait_for_stop(shutdown.clone()) => return Ok(PipelineEnd::Shutdown),
            opened = self.open() => opened?,
        };
        let phase = match pipeline.seam {
            Some(_) => Phase::Recovering,
            None => Phase::Streaming,
        };
        let start = pipeline.confirmable().lsn();
        let began = Instant::now();
        metrics.sessions.inc();
        metrics.holds_slot.set(1);
        let ended = tokio::select! {
            biased;
            () = self.show(phase, probation) => unreachable!("`show` does not return"),
            ended = pipeline.run(shutdown) => ended,
        };
        life.lived = Some(began.elapsed());
        metrics.holds_slot.set(0);
        metrics.oldest_pending.forget();
        let confirmed = pipeline.confirmable().lsn();
        life.has_advanced = confirmed > start;
        let target = pipeline.source.target().clone();
        match &ended {
            Ok(PipelineEnd::Shutdown) => {
                let confirmed = pipeline.drain(settings.shutdown_timeout).await;
                write_down(&target, settings, &self.instance, confirmed).await;
            }
            // Another relay has the slot or may soon have it, so drop everything at once, including
            // requests in flight. Otherwise both relays would publish.
            Err(error) if error.code() == Code::LeaseLost => drop(pipeline),
            // The server waits for this session to end before it shuts down, and accepts no more writes.
            // So do not wait for requests in flight.
            Err(error) if error.code() == Code::PostgresStopping => {
                pipeline.drain(Duration::ZERO).await;
            }
            Err(_) => tokio::select! {
                _ = pipeline.drain(BROKEN_SESSION_DRAIN) => {}
                () = stop_is_due(shutdown.clone(), settings.shutdown_timeout) => {}
            },
        }
        drop(beside);
        metrics.forget_session();
        match ended {
            Err(error) if stuck::recurs_at_its_position(&error) => {
                Err(self.stuck(&target, confirmed, error).await)
            }
            ended => ended,
        }
    }

    /// Sets the phase of the relay as soon as the session has delivered an event, or has lasted for `probation`. Does
    /// not return.
    async fn show(&self, phase: Phase, probation: Duration) {
        let (end, delivered) = (Instant::now() + probation, self.metrics.delivered());
        while Instant::now() < end && self.metrics.delivered() == delivered {
            tokio::time::sleep(PROBATION_LOOK).await;
        }
        // If the recovery has ended in the meantime, the phase is already `Streaming`, so do not set it back.
        if self.state.phase() != Phase::Streaming {
            self.state.set(phase);
        }
        std::future::pending().await
    }

    /// Handles the end of a session whose stream cannot get past `confirmed`, and returns the error with
    /// which the session ends.
    pub(super) async fn stuck(&self, target: &Target, confirmed: Lsn, ended: Error) -> Error {
        if self.stuck_positions.is_new(&ended, confirmed) {
            return stuck::retry(&ended);
        }
        let (settings, instance) = (&self.settings, &self.instance);
        stuck::mark_for_recovery(target, settings, instance, &self.publication, ended).await
    }
}

/// Records the last confirmed position at a clean stop. If the slot is ahead of this position at the next
/// start, the relay knows that somebody has recreated or advanced the slot. If this write fails, the next
/// start audits more rows than necessary, but loses nothing.
async fn write_down(target: &Target, settings: &Settings, instance: &str, confirmed: Confirmable) {
    let writing = async {
        let sql = connect(target, "postrider", STATEMENT_TIMEOUT).await?;
        let position = PgLsn::from(confirmed.lsn().as_u64());
        relay_row::write_final(&sql, &settings.slot, position, instance).await
    };
    if !matches!(
        tokio::time::timeout(WRITE_DOWN_LIMIT, writing).await,
        Ok(Ok(()))
    ) {
        tracing::debug!("could not write the last position to outbox.relay");
    }
}

/// Returns when `shutdown_timeout` has passed since the request to shut down.
async fn stop_is_due(shutdown: watch::Receiver<bool>, shutdown_timeout: Duration) {
    wait_for_stop(shutdown).await;
    tokio::time::sleep(shutdown_timeout).await;
}

async fn wait_for_stop(mut shutdown: watch::Receiver<bool>) {
    if shutdown.wait_for(|stop| *stop).await.is_err() {
        std::future::pending::<()>().await;
    }
}
