//! Runs one session on the slot: opens the session, runs its pipeline, and ends it gracefully.

use std::time::Duration;

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

/// How long a broken session waits for its requests in flight, before the next session begins.
const BROKEN_SESSION_DRAIN: Duration = Duration::from_secs(10);

/// Time limit for recording the last position, so that a shutdown is not delayed for longer.
const WRITE_DOWN_LIMIT: Duration = Duration::from_secs(2);

impl SessionRunner {
    /// Runs one session until shutdown or an error. Calls `started` when the session has begun.
    pub(super) async fn run_session(
        &self,
        shutdown: &mut watch::Receiver<bool>,
        started: impl FnOnce(Phase),
    ) -> Result<PipelineEnd> {
        let (settings, metrics) = (&self.settings, &self.metrics);
        // Another relay may hold the slot now, so forget the measurements of the last attempt, even if
        // that attempt opened no session.
        metrics.forget_session();
        let (mut pipeline, beside) = tokio::select! {
            biased;
            _ = wait_for_stop(shutdown.clone()) => return Ok(PipelineEnd::Shutdown),
            opened = self.open() => opened?,
        };
        started(match pipeline.seam {
            Some(_) => Phase::Recovering,
            None => Phase::Streaming,
        });
        metrics.sessions.inc();
        metrics.holds_slot.set(1);
        let ended = pipeline.run(shutdown).await;
        metrics.holds_slot.set(0);
        metrics.oldest_pending.forget();
        let confirmed = pipeline.watermark.confirmable().lsn();
        let target = pipeline.source.target().clone();
        match &ended {
            Ok(PipelineEnd::Shutdown) => {
                let confirmed = pipeline.drain(settings.shutdown_timeout).await;
                write_down(&target, settings, &self.instance, confirmed).await;
            }
            // Another relay has the slot, or may soon have it. Drop everything at once, including
            // requests in flight.
            Err(error) if error.code() == Code::LeaseLost => drop(pipeline),
            // The server waits for this session to end, and nothing can be recorded.
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
            Err(error) if stuck::is_of_this_place(&error) => {
                Err(self.stuck(&target, confirmed, error).await)
            }
            ended => ended,
        }
    }

    /// Handles the end of a session whose stream cannot get past `confirmed`, and returns the error with
    /// which the session ends.
    pub(super) async fn stuck(&self, target: &Target, confirmed: Lsn, ended: Error) -> Error {
        if self.stuck_places.is_new(&ended, confirmed) {
            return stuck::retry(&ended);
        }
        let (settings, instance) = (&self.settings, &self.instance);
        stuck::what_to_do(target, settings, instance, &self.publication, ended).await
    }
}

/// Records the last confirmed position at a clean stop. If the slot is ahead of this position at the
/// next start, somebody has recreated or advanced the slot. If this write fails, the next start only
/// audits more rows.
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
