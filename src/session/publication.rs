//! Checks the publication while a session opens. While the session runs, `supervisor` checks it.

use std::sync::atomic::{AtomicBool, Ordering};

use slot_manager::publication::{self, CapturedTable, PublicationState};

use crate::error::{Code, Error, Result};
use crate::postgres::Sql;
use crate::settings::Settings;
use crate::store::relay_row::RecordKeeping;

/// Checks the publication, and remembers across sessions whether it was ever right.
#[derive(Debug)]
pub(super) struct PublicationCheck {
    publication: String,
    tables: Vec<CapturedTable>,
    records: RecordKeeping,
    /// Whether this process has ever found the publication right.
    was_right: AtomicBool,
}

impl PublicationCheck {
    pub(super) fn new(settings: &Settings) -> Self {
        Self {
            publication: settings.publication.clone(),
            tables: settings.captured(),
            records: RecordKeeping::of(settings.dispatch, None),
            was_right: AtomicBool::new(false),
        }
    }

    /// Whether this process has ever found the publication right.
    pub(super) fn was_right(&self) -> bool {
        self.was_right.load(Ordering::Relaxed)
    }

    /// Checks the publication.
    ///
    /// # Errors
    /// `publication-missing`, `publication-drift`.
    pub(super) async fn check(&self, sql: &Sql) -> Result<PublicationState> {
        let state = publication::inspect(sql, &self.publication, &self.tables).await?;
        if let Some(problem) = state.problems().first() {
            let error = Error::from(problem);
            // The publication was right before, so somebody is altering it or a table at the moment.
            let is_altered = error.code() != Code::PublicationMissing && self.was_right();
            return Err(if is_altered {
                Error::new(Code::PublicationDrift, error.what()).hint(problem.remedy())
            } else {
                error
            });
        }
        if self.records.needs_traces()
            && let Some(error) = untraced(&state)
        {
            return Err(error);
        }
        self.was_right.store(true, Ordering::Relaxed);
        Ok(state)
    }
}

/// Returns the error for a table that is published only through its schema. If published events get no
/// record, the relay would not notice if the publication left such a table out for a while.
pub(crate) fn untraced(state: &PublicationState) -> Option<Error> {
    let table = state.untraced().next()?;
    let publication = slot_manager::quoted_identifier(&state.name);
    let what = format!(
        "publication {publication} contains table {table} only through its schema, so taking the table \
         out for a while would leave no trace; dispatch = exceptions needs that trace"
    );
    let remedy =
        format!("run alter publication {publication} add table {table}, or set dispatch = full");
    Some(Error::new(Code::PublicationDrift, what).hint(remedy))
}
