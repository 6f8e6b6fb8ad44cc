//! Looks up the outcomes that earlier sessions have recorded for the events that PostgreSQL sends again.
//!
//! Usually such an event has the same position (commit LSN and ordinal) as before, and its dispatch row
//! has that position. But whether pgoutput considers a table part of the publication depends on what
//! pgoutput has decoded before. So after a restart, a transaction that was open while the publication
//! was altered may bring more rows or fewer, and its ordinals shift. From the first event that does not
//! match the dispatch row at its position, we look up the events of the transaction by their ids, and
//! give them ordinals above all ordinals that are in use.

use decoder::Lsn;
use replication::CommitLsn;

use crate::error::Result;
use crate::event::EventId;
use crate::metrics::Metrics;
use crate::postgres::Sql;
use crate::store::dispatch::{Lookup, RecordedEvents, last_ordinal};

/// Looks up the outcomes of one session's events.
pub(crate) struct OutcomeLookup {
    recorded: RecordedEvents,
    /// The SQL session for lookups. `None` once the stream is past every dispatch row: from then on every
    /// event is new.
    sql: Option<Sql>,
    moved: Option<ShiftedTransaction>,
    metrics: Metrics,
}

/// A transaction whose ordinals have shifted.
#[derive(Debug, Clone, Copy)]
struct ShiftedTransaction {
    commit: CommitLsn,
    /// The ordinal for the next event of the transaction.
    next_ordinal: u32,
}

/// The event to look up.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LookupKey<'a> {
    pub(crate) commit: CommitLsn,
    pub(crate) ordinal: u32,
    pub(crate) event_id: &'a EventId,
}

impl OutcomeLookup {
    pub(crate) fn new(recorded: RecordedEvents, sql: Sql, metrics: Metrics) -> Self {
        Self {
            recorded,
            sql: Some(sql),
            moved: None,
            metrics,
        }
    }

    /// Whether every event from here on is new.
    pub(crate) fn is_over(&self) -> bool {
        self.recorded.is_over() && self.moved.is_none()
    }

    /// See [`RecordedEvents::passed`].
    pub(crate) fn passed(&mut self, wal_end: Lsn) {
        self.recorded.passed(wal_end);
        self.moved = self.moved.filter(|moved| moved.commit.lsn() >= wal_end);
    }

    /// Looks up the next event of the stream. Also returns the ordinal to use for this event.
    ///
    /// # Errors
    /// Database errors.
    pub(crate) async fn look_up(&mut self, event: LookupKey<'_>) -> Result<(Lookup, u32)> {
        let Some(sql) = &self.sql else {
            return Ok((Lookup::New, event.ordinal));
        };
        let LookupKey {
            commit,
            ordinal,
            event_id,
        } = event;
        self.moved = self.moved.filter(|moved| moved.commit == commit);
        let mut by_place = None;
        if self.moved.is_none() {
            while self.recorded.needs_page(commit, ordinal) {
                self.recorded.read_page(sql).await?;
            }
            by_place = self.recorded.look_up(commit, ordinal, &event_id.uuid);
        }
        let (found, place) = match by_place {
            Some(found) => (found, ordinal),
            None => {
                let moved = match &mut self.moved {
                    Some(moved) => moved,
                    none => none.insert(begin(sql, event).await?),
                };
                let found = self.recorded.look_up_by_id(sql, &event_id.uuid).await?;
                let place = moved.next_ordinal;
                moved.next_ordinal += 1;
                (found, place)
            }
        };
        if self.is_over() {
            self.sql = None;
        }
        if found == Lookup::Done {
            self.metrics.events_skipped.inc();
        }
        Ok((found, place))
    }
}

/// Starts to look up the events of a transaction by their ids. The new ordinals begin above the recorded
/// ordinals of the transaction and above the ordinal of `event`.
async fn begin(sql: &Sql, event: LookupKey<'_>) -> Result<ShiftedTransaction> {
    let recorded = last_ordinal(sql, event.commit).await?;
    let last = recorded.max(event.ordinal);
    tracing::warn!(
        commit_lsn = %event.commit.lsn(), ordinal = event.ordinal,
        "a transaction was decoded with other rows than last time, because the publication was \
         altered while it was open: looking up its events by their ids"
    );
    Ok(ShiftedTransaction {
        commit: event.commit,
        next_ordinal: last + 1,
    })
}
