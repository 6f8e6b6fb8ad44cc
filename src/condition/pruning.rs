//! Keeps the results of the relay's latest pruning runs, for `/status`, the metrics and
//! `outbox.relay`.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

/// How one run of pruning ended.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PruneRun {
    /// Number of deleted rows of the outbox tables.
    pub rows: u64,
    /// Number of deleted rows of `outbox.dispatch`.
    pub records: u64,
    /// Number of daily partitions that the run dropped. Their rows are included in `rows`.
    #[serde(default)]
    pub days: u64,
    /// Why a daily partition could not be added or dropped.
    #[serde(default)]
    pub notes: Vec<String>,
    /// Why some old records could not be deleted yet. `None` if there are no such records.
    pub postponed: Option<String>,
    /// The code of the error that ended the run; `None` if the run succeeded.
    pub code: Option<String>,
    /// The text of this error.
    pub what: Option<String>,
    /// What to do about this error.
    pub hint: Option<String>,
}

/// The latest runs, shared between the task that prunes and the views that show them.
#[derive(Debug, Clone, Default)]
pub struct PruneRuns(Arc<Mutex<LatestRuns>>);

#[derive(Debug, Default)]
struct LatestRuns {
    latest: Option<(PruneRun, Instant)>,
    succeeded: Option<Instant>,
}

impl PruneRuns {
    fn lock(&self) -> MutexGuard<'_, LatestRuns> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stores the result of a run that has just ended.
    pub fn ended(&self, run: PruneRun) {
        let (mut runs, now) = (self.lock(), Instant::now());
        if run.code.is_none() {
            runs.succeeded = Some(now);
        }
        runs.latest = Some((run, now));
    }

    /// The latest run of this session, and how long ago it ended. `None` if no run has ended.
    pub fn latest(&self) -> Option<(PruneRun, Duration)> {
        let runs = self.lock();
        let (run, at) = runs.latest.as_ref()?;
        Some((run.clone(), at.elapsed()))
    }

    /// How long ago a run of this session last ended without an error. `None` if none has.
    pub fn success_age(&self) -> Option<Duration> {
        self.lock().succeeded.map(|at| at.elapsed())
    }

    /// Forgets the runs, when the session ends.
    pub fn forget(&self) {
        *self.lock() = LatestRuns::default();
    }
}
