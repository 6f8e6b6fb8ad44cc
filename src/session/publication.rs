//! Checks the publication while a session opens. While the session runs, `supervisor` checks it.

use std::sync::atomic::{AtomicBool, Ordering};

use slot_manager::SlotName;
use slot_manager::publication::{self, CapturedTable, PublicationState};

use crate::error::{Code, Error, Result};
use crate::postgres::Sql;
use crate::settings::Settings;
use crate::store::relay_row::{RecordKeeping, audits};

/// Checks the publication, and remembers across sessions whether it was ever right.
#[derive(Debug)]
pub(super) struct PublicationCheck {
    publication: String,
    slot: SlotName,
    tables: Vec<CapturedTable>,
    records: RecordKeeping,
    was_right: AtomicBool,
}

impl PublicationCheck {
    pub(super) fn new(settings: &Settings) -> Self {
        Self {
            publication: settings.publication.clone(),
            slot: settings.slot.clone(),
            tables: settings.captured(),
            records: RecordKeeping::of(settings.dispatch, None),
            was_right: AtomicBool::new(false),
        }
    }

    /// Whether this process has ever found the publication right.
    pub(super) fn was_right(&self) -> bool {
        self.was_right.load(Ordering::Relaxed)
    }

    /// Checks the publication, and returns its state. If the publication is wrong, notes this in the relay's
    /// row.
    ///
    /// # Errors
    /// `publication-missing`, `publication-drift`; `schema-missing` when a table is missing; `column-missing`.
    pub(super) async fn check(&self, sql: &Sql) -> Result<PublicationState> {
        let state = publication::inspect(sql, &self.publication, &self.tables).await?;
        if let Some(problem) = state.problems().first() {
            if let Err(error) = audits::note_wrong_publication(sql, &self.slot, None).await {
                tracing::debug!(code = %error.code(), "outbox.relay: {error}");
            }
            let error = Error::from(problem);
            // If this process has ever found the publication right, somebody is probably altering the publication or
            // a table at the moment. In this case the relay tries again after `publication-drift`. A code such as
            // `column-missing` would stop the relay.
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

/// Returns an error if a table is published only through its schema. If somebody removes the schema from the
/// publication and adds it again, the catalogue keeps no trace of the table's absence.
///
/// The relay needs such traces if published events get no record (`dispatch = exceptions`). In this case it cannot
/// compare rows with records. Only a trace in the catalogue shows that the stream may have left out rows.
pub(crate) fn untraced(state: &PublicationState) -> Option<Error> {
    let table = state.untraced().next()?;
    let publication = slot_manager::quoted_identifier(&state.name);
    let what = format!(
        "publication {publication} publishes table {table} only through its schema, so the relay could not \
         detect that the schema left the publication for a while; dispatch = exceptions relies on detecting it"
    );
    let remedy =
        format!("run alter publication {publication} add table {table}, or set dispatch = full");
    Some(Error::new(Code::PublicationDrift, what).hint(remedy))
}
