//! Looks up the outcomes that earlier sessions have recorded for the events that PostgreSQL sends again.
//!
//! Usually such an event has the same position (commit LSN and ordinal) as before, so its dispatch row is found
//! by its position. The exception is a transaction that was open while the publication was altered. Which of
//! its rows pgoutput sends depends on what the session has decoded before. So after a restart, pgoutput may
//! send more or fewer rows of the transaction, and the ordinals shift. From the first event that does not match
//! the dispatch row at its position, we look up the events of the transaction by their ids. These events get
//! new ordinals above all ordinals that are in use.

use decoder::Lsn;

use crate::error::Result;
use crate::event::{EventId, EventPosition};
use crate::metrics::Metrics;
use crate::postgres::Sql;
use crate::store::dispatch::{EarlierOutcomes, Lookup, last_ordinal};

/// The result of looking up an event of the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LookedUp {
    pub(crate) found: Lookup,
    /// The position to use for the event.
    pub(crate) position: EventPosition,
    /// Whether the event was looked up by its id. Only a look-up by id finds a record at another position.
    pub(crate) by_id: bool,
}

/// Looks up the outcomes of one session's events.
pub(crate) struct OutcomeLookup {
    recorded: EarlierOutcomes,
    /// The SQL session for look-ups. `None` once the stream is past every dispatch row, because every
    /// later event is new.
    sql: Option<Sql>,
    moved: Option<ShiftedTransaction>,
    metrics: Metrics,
}

/// A transaction whose ordinals have shifted.
#[derive(Debug, Clone, Copy)]
struct ShiftedTransaction {
    /// The position for the next event of the transaction.
    next: EventPosition,
}

impl OutcomeLookup {
    pub(crate) fn new(recorded: EarlierOutcomes, sql: Sql, metrics: Metrics) -> Self {
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

    /// Notes that the stream has delivered every transaction before `wal_end`. The dispatch rows of these
    /// transactions are no longer needed.
    pub(crate) fn passed(&mut self, wal_end: Lsn) {
        self.recorded.passed(wal_end);
        self.moved = self
            .moved
            .filter(|moved| moved.next.commit.lsn() >= wal_end);
    }

    /// Looks up whether the next event of the stream has a record.
    ///
    /// # Errors
    /// Database errors.
    pub(crate) async fn look_up(
        &mut self,
        at: EventPosition,
        event_id: &EventId,
    ) -> Result<LookedUp> {
        let new = LookedUp {
            found: Lookup::New,
            position: at,
            by_id: false,
        };
        let Some(sql) = &self.sql else {
            return Ok(new);
        };
        self.moved = self.moved.filter(|moved| moved.next.commit == at.commit);
        let mut by_position = None;
        if self.moved.is_none() {
            while self.recorded.needs_page(at) {
                self.recorded.read_page(sql).await?;
            }
            by_position = self.recorded.look_up(at, &event_id.uuid);
        }
        let looked_up = match by_position {
            Some(Lookup::New) if self.recorded.may_be_from_a_table(at) => LookedUp {
                found: self.recorded.look_up_by_id(sql, &event_id.uuid).await?,
                by_id: true,
                ..new
            },
            Some(found) => LookedUp { found, ..new },
            None => {
                let moved = match &mut self.moved {
                    Some(moved) => moved,
                    none => none.insert(begin(sql, at).await?),
                };
                let position = moved.next;
                moved.next.ordinal += 1;
                LookedUp {
                    found: self.recorded.look_up_by_id(sql, &event_id.uuid).await?,
                    position,
                    by_id: true,
                }
            }
        };
        if self.is_over() {
            self.sql = None;
        }
        if looked_up.found == Lookup::Done {
            self.metrics.events_skipped.inc();
        }
        Ok(looked_up)
    }
}

/// Starts to look up the events of a transaction by their ids, from the event at the position `at` on. These events get
/// new ordinals. The first new ordinal is one above the highest ordinal in use: the highest recorded ordinal of the
/// transaction, or the ordinal of `at` if that is higher.
async fn begin(sql: &Sql, at: EventPosition) -> Result<ShiftedTransaction> {
    let recorded = last_ordinal(sql, [at.commit]).await?;
    let last = recorded.max(at.ordinal);
    tracing::warn!(
        commit_lsn = %at.commit.lsn(), ordinal = at.ordinal,
        "a transaction was decoded with different rows than last time: looking up its events by their ids. Usually \
         the publication was altered while the transaction was open, or the server was set back to an earlier state"
    );
    Ok(ShiftedTransaction {
        next: EventPosition {
            commit: at.commit,
            ordinal: last + 1,
        },
    })
}
