//! What an earlier session has made of the events that come again.
//!
//! As a rule an event comes again at its place, and its row in outbox.dispatch stands there. But
//! pgoutput decides by what it has decoded before whether the publication carries a row: a
//! transaction that was open while the publication was altered may come with more rows after a
//! restart, or with fewer, and its places have moved. From the first event that shows it, the rest of
//! the transaction is looked up by ids, and what is new there gets places behind all that are taken.

use std::time::Duration;

use decoder::Lsn;

use super::from_table::last_ordinal;
use crate::dispatch::{Lookup, Recorded};
use crate::error::Result;
use crate::map::EventId;
use crate::metrics::Metrics;
use crate::postgres::{Sql, answer_within};
use crate::watermark::CommitLsn;

/// Of a connection that leads nowhere; the server's own limit comes first.
const LOOK_UP_LIMIT: Duration = Duration::from_secs(8);

/// The look-up of one session.
pub(super) struct Earlier {
    recorded: Recorded,
    /// Closed when everything has been passed.
    sql: Option<Sql>,
    moved: Option<Moved>,
    metrics: Metrics,
}

/// A transaction whose places have moved.
#[derive(Debug, Clone, Copy)]
struct Moved {
    commit: CommitLsn,
    /// The ordinal of its next event.
    next_ordinal: u32,
}

/// An event of the stream as it is looked for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Looked<'a> {
    pub(super) commit: CommitLsn,
    pub(super) ordinal: u32,
    pub(super) event_id: &'a EventId,
}

impl Earlier {
    pub(super) fn new(recorded: Recorded, sql: Sql, metrics: Metrics) -> Self {
        Self {
            recorded,
            sql: Some(sql),
            moved: None,
            metrics,
        }
    }

    /// Whether from here on every event is new.
    pub(super) fn is_over(&self) -> bool {
        self.recorded.is_over() && self.moved.is_none()
    }

    /// See [`Recorded::passed`].
    pub(super) fn passed(&mut self, wal_end: Lsn) {
        self.recorded.passed(wal_end);
        self.moved = self.moved.filter(|moved| moved.commit.lsn() >= wal_end);
    }

    /// What is known of the next event of the stream, and the ordinal that it has from here on.
    ///
    /// # Errors
    /// Those of a statement.
    pub(super) async fn look_up(&mut self, event: Looked<'_>) -> Result<(Lookup, u32)> {
        let Some(sql) = &self.sql else {
            return Ok((Lookup::New, event.ordinal));
        };
        let Looked {
            commit,
            ordinal,
            event_id,
        } = event;
        self.moved = self.moved.filter(|moved| moved.commit == commit);
        let mut by_place = None;
        if self.moved.is_none() {
            while self.recorded.needs_page(commit, ordinal) {
                answer_within(LOOK_UP_LIMIT, self.recorded.read_page(sql)).await?;
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
                let asking = self.recorded.look_up_by_id(sql, &event_id.uuid);
                let found = answer_within(LOOK_UP_LIMIT, asking).await?;
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

/// Places behind those that are recorded, and behind those that were given for it in this session.
async fn begin(sql: &Sql, event: Looked<'_>) -> Result<Moved> {
    let recorded = answer_within(LOOK_UP_LIMIT, last_ordinal(sql, event.commit)).await?;
    let last = recorded.max(event.ordinal);
    tracing::warn!(
        commit_lsn = %event.commit.lsn(), ordinal = event.ordinal,
        "a transaction comes with other rows than last time, as the publication was altered \
         while it was open: its events are looked up by their ids"
    );
    Ok(Moved {
        commit: event.commit,
        next_ordinal: last + 1,
    })
}
