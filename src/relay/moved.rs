//! Rows that the stream brings as inserts, though another transaction wrote them first: a partition
//! key was updated, pg_partman moved them, a table was copied and swapped, a dump was restored.
//!
//! Such a row is an event only if it was never handled: it is looked up by its id. The usual row
//! costs no look-up.

use std::sync::Arc;
use std::time::Duration;

use crate::capture::Bounds;
use crate::dispatch::{Lookup, look_up_by_id};
use crate::error::Result;
use crate::map::EventId;
use crate::metrics::Metrics;
use crate::postgres::{Sql, Target, answer_within, connect};

const STATEMENT_TIMEOUT: Duration = Duration::from_secs(5);
/// Of a connection that leads nowhere; the server's own limit comes first.
const LOOK_UP_LIMIT: Duration = Duration::from_secs(8);

/// What makes an insert a moved row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Moved {
    /// Which of the captured tables it is in.
    pub(super) table: usize,
    /// The transaction that wrote it first.
    pub(super) inserted_xid: u64,
}

/// The look-up of one session.
pub(super) struct MovedRows {
    target: Target,
    bounds: Arc<[Bounds]>,
    repeats: bool,
    /// Opened for the first such row.
    sql: Option<Sql>,
    metrics: Metrics,
}

impl MovedRows {
    pub(super) fn new(
        target: Target,
        bounds: Arc<[Bounds]>,
        repeats: bool,
        metrics: Metrics,
    ) -> Self {
        Self {
            target,
            bounds,
            repeats,
            sql: None,
            metrics,
        }
    }

    /// What is known of a moved row.
    ///
    /// # Errors
    /// Those of the connection and of a statement.
    pub(super) async fn look_up(&mut self, moved: Moved, event_id: &EventId) -> Result<Lookup> {
        // A record is the better answer: a row may have been staged in another table for long.
        let is_handled = self.bounds.get(moved.table).is_some_and(|bounds| {
            bounds.is_from_before(moved.inserted_xid)
                || self.repeats && bounds.is_resolved(moved.inserted_xid)
        });
        let found = match is_handled {
            true => Lookup::Done,
            false => self.ask(event_id).await?,
        };
        if found == Lookup::Done {
            self.metrics.events_skipped.inc();
        }
        Ok(found)
    }

    async fn ask(&mut self, event_id: &EventId) -> Result<Lookup> {
        let sql = match &self.sql {
            Some(sql) => sql,
            None => {
                let connecting = connect(&self.target, "postrider", STATEMENT_TIMEOUT);
                self.sql.insert(connecting.await?)
            }
        };
        let asking = look_up_by_id(sql, &event_id.uuid, self.repeats);
        answer_within(LOOK_UP_LIMIT, asking).await
    }
}
