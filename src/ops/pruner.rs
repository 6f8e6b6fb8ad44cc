//! Prunes in the background of a running relay, by the setting `prune_after`.
//!
//! The task uses the rules and statements of the command ([`prune`]), and decides only *when* to prune:
//!
//! - It prunes while this relay holds the slot. A standby does not prune, and a relay that loses its session
//!   stops within [`LOOK`]. During a takeover, two relays may prune at the same time for a moment. This is as
//!   safe as running `postrider prune` next to a relay.
//! - Delivery comes first. So the task stops while the relay is catching up, and it has a connection of its
//!   own.
//! - An error ends one run, never the session. The next run follows after a pause that grows with each
//!   error.
//!
//! A run needs no state of the previous run: deleted rows are gone, so each run begins where the previous one
//! stopped.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::prune::{self, PruneReport, PruneRequest, PruneStep};
use crate::condition::{PruneRun, RelayState, State};
use crate::error::{Error, Result};
use crate::metrics::{KindLabel, Metrics};
use crate::postgres::connect;
use crate::settings::Settings;
use crate::store::relay_row;

/// Statement timeout, and so the maximum duration of one chunk.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(60);

/// How often the task checks whether it may prune.
const LOOK: Duration = Duration::from_secs(1);

/// Minimum pause between two runs. The pause is a tenth of the retention, but at least this long and at most
/// [`LONGEST_PAUSE`].
const SHORTEST_PAUSE: Duration = Duration::from_secs(1);
/// Maximum pause between two runs, also after errors.
const LONGEST_PAUSE: Duration = Duration::from_secs(600);

/// Pause after an error. Each further error in a row doubles it, up to [`LONGEST_PAUSE`].
const FIRST_ERROR_PAUSE: Duration = Duration::from_secs(10);

struct Pruner {
    settings: Arc<Settings>,
    request: PruneRequest,
    metrics: Metrics,
    state: Arc<RelayState>,
}

/// Prunes until the future is dropped. Returns at once if `prune_after` is off.
pub(crate) async fn run(settings: Arc<Settings>, metrics: Metrics, state: Arc<RelayState>) {
    let Some(older_than) = settings.prune_after else {
        return;
    };
    let pruner = Pruner {
        request: PruneRequest::of_relay(older_than),
        settings,
        metrics,
        state,
    };
    let mut noted = Vec::new();
    let between_runs = (older_than / 10).clamp(SHORTEST_PAUSE, LONGEST_PAUSE);
    let (mut after_error, mut failures) = (FIRST_ERROR_PAUSE, 0_u64);
    loop {
        while !pruner.may_prune() {
            tokio::time::sleep(LOOK).await;
        }
        let ended = tokio::select! {
            ended = pruner.prune() => ended,
            // Dropping the run closes its connection, so the server finishes at most one more chunk.
            () = pruner.has_to_stop() => continue,
        };
        let pause = match ended {
            Ok(report) => {
                pruner.log(&report, &mut noted);
                (after_error, failures) = (FIRST_ERROR_PAUSE, 0);
                between_runs
            }
            Err(error) => {
                failures += 1;
                tracing::warn!(
                    code = %error.code(), hint = error.hint_text(), failures,
                    "cannot prune, retrying in {after_error:?}; delivery continues: {error}"
                );
                let pause = after_error;
                after_error = (after_error * 2).min(LONGEST_PAUSE);
                pause
            }
        };
        pruner.pause(pause).await;
    }
}

impl Pruner {
    /// Whether this relay holds the slot, and either keeps up or is only held up by Pub/Sub. A relay that
    /// recovers, catches up or waits for PostgreSQL does not prune.
    fn may_prune(&self) -> bool {
        let state = self.metrics.condition(&self.state).state;
        self.metrics.holds_slot.get() == 1
            && matches!(state, State::Streaming | State::BlockedOnPubsub)
    }

    /// Waits for the given time, or until the next session begins.
    async fn pause(&self, pause: Duration) {
        let (began, session) = (Instant::now(), self.metrics.sessions.get());
        while self.metrics.sessions.get() == session {
            let left = pause.saturating_sub(began.elapsed());
            if left.is_zero() {
                return;
            }
            tokio::time::sleep(left.min(LOOK)).await;
        }
    }

    async fn has_to_stop(&self) {
        while self.may_prune() {
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Prunes until no more rows can be deleted. Stores the result in the metrics and in `outbox.relay`.
    async fn prune(&self) -> Result<PruneReport> {
        let opened = connect(
            self.settings.database()?,
            "postrider pruner",
            STATEMENT_TIMEOUT,
        );
        let sql = match opened.await {
            Ok(sql) => sql,
            Err(error) => {
                self.metrics.prune_runs.ended(failed(&error));
                return Err(error);
            }
        };
        let mut counted = (String::new(), 0);
        let mut on_step = |step: &PruneStep<'_>| {
            self.count(step, &mut counted);
            true
        };
        let ended = prune::run(&sql, &self.settings, &self.request, &mut on_step).await;
        let run = match &ended {
            Ok(report) => PruneRun {
                rows: report.tables.iter().map(|table| table.rows).sum(),
                records: report.dispatch.rows,
                days: report
                    .tables
                    .iter()
                    .map(|table| table.days.len() as u64)
                    .sum(),
                notes: notes(report).cloned().collect(),
                postponed: report.dispatch.postponed.clone(),
                ..PruneRun::default()
            },
            Err(error) => failed(error),
        };
        self.metrics.prune_runs.ended(run.clone());
        if let Err(error) = relay_row::write_pruning(&sql, &self.settings.slot, &run).await {
            tracing::debug!(code = %error.code(), "outbox.relay: {error}");
        }
        ended
    }

    /// Adds the rows that were deleted since the previous step to the metrics. Each step contains a
    /// total for its table.
    fn count(&self, step: &PruneStep<'_>, counted: &mut (String, u64)) {
        if counted.0 != step.what {
            *counted = (step.what.to_owned(), 0);
        }
        let kind = match step.what {
            prune::RECORDS => "dispatch",
            _ => "outbox",
        };
        let rows = step.deleted.saturating_sub(counted.1);
        counted.1 = step.deleted;
        let counters = &self.metrics.rows_pruned;
        counters.get_or_create(&KindLabel { kind }).inc_by(rows);
    }

    /// Logs the result of a run. `noted` are the notes of the previous run, which are not logged again.
    fn log(&self, report: &PruneReport, noted: &mut Vec<String>) {
        let rows: u64 = report.tables.iter().map(|table| table.rows).sum();
        let records = report.dispatch.rows;
        if rows + records > 0 {
            let days: usize = report.tables.iter().map(|table| table.days.len()).sum();
            tracing::info!(rows, days, records, older_than = ?self.request.older_than, "pruned");
        }
        for note in notes(report).filter(|note| !noted.contains(*note)) {
            tracing::info!("pruning: {note}");
        }
        *noted = notes(report).cloned().collect();
    }
}

fn notes(report: &PruneReport) -> impl Iterator<Item = &String> {
    let of_tables = report.tables.iter().flat_map(|table| &table.notes);
    of_tables.chain(&report.dispatch.notes)
}

fn failed(error: &Error) -> PruneRun {
    PruneRun {
        code: Some(error.code().name().to_owned()),
        what: Some(error.to_string()),
        hint: Some(error.hint_text().to_owned()),
        ..PruneRun::default()
    }
}
