//! The seam between the tables and the stream. A background task carries out the recovery, and tells the
//! pipeline when it may read the stream, when it may confirm positions, and when the recovery is over.

use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::read_rows::RowsFromTables;
use crate::error::{Code, Error, Result};

/// Number of steps that a recovery reports. The channel has room for all of them, so the task never waits.
const STEPS: usize = 3;

/// The channel through which a recovery reports its steps. An error ends the session.
pub(super) type StepSender = mpsc::Sender<Result<SeamStep>>;

/// The seam of a running recovery. The pipeline reads the stream once the seam is open. Dropping the seam ends the
/// recovery task.
#[derive(Debug)]
pub(crate) struct Seam {
    is_open: bool,
    is_settled: bool,
    steps: mpsc::Receiver<Result<SeamStep>>,
    task: JoinHandle<()>,
}

/// A step of the recovery that the pipeline has to know about.
#[derive(Debug)]
pub(crate) enum SeamStep {
    /// All rows from the tables are queued for their keys, so the stream may be read. If the slot was kept, the stream
    /// contains some of these rows too; the value says which.
    Opened(Option<RowsFromTables>),
    /// All rows from the tables have their outcome.
    Settled,
    /// The recovery is over.
    Over,
}

impl Seam {
    /// Starts the recovery task with `start`.
    pub(super) fn new(start: impl FnOnce(StepSender) -> JoinHandle<()>) -> Self {
        let (sender, steps) = mpsc::channel(STEPS);
        Self {
            is_open: false,
            is_settled: false,
            steps,
            task: start(sender),
        }
    }

    pub(crate) fn is_open(&self) -> bool {
        self.is_open
    }

    /// Whether all rows from the tables have their outcome.
    pub(crate) fn is_settled(&self) -> bool {
        self.is_settled
    }

    /// Waits for the next step. Cancel-safe.
    ///
    /// # Errors
    /// An error of the recovery task. It ends the session, and the next session continues the recovery or begins it
    /// again.
    pub(crate) async fn next_step(&mut self) -> Result<SeamStep> {
        let step = self.steps.recv().await;
        let step = step.unwrap_or_else(|| {
            let what = "the recovery task ended";
            Err(Error::new(Code::Internal, what))
        })?;
        match step {
            SeamStep::Opened(_) => self.is_open = true,
            SeamStep::Settled => self.is_settled = true,
            SeamStep::Over => {}
        }
        Ok(step)
    }
}

impl Drop for Seam {
    fn drop(&mut self) {
        self.task.abort();
    }
}
