//! Finds out which events of the stream already have an outcome, by merging two ordered lists.
//!
//! The stream and the primary key of the dispatch table have the same order: (commit LSN, ordinal). So we
//! read the rows after the slot's position page by page, just ahead of the stream. Only one page is in
//! memory, however many rows there are.
//!
//! Which events the relay skips depends on whether every published event has a row ([`RecordKeeping`]):
//!
//! - Every published event has a row: the relay skips all events with a row.
//! - Published events may lack a row: the relay skips only quarantined, released and discarded events. It cannot tell
//!   a published event without a row from a new event, so it publishes such events again after a restart. The repeated
//!   events of a key must be complete and in order. So the relay also repeats the published events that have a row.
//!
//! A later session may receive more or fewer rows of a transaction than an earlier session did. This happens if
//! somebody altered the publication while the transaction was open. The events have other ordinals in this case, and a
//! dispatch row may be at the position of another event. We look an event up by its id in two cases:
//!
//! - The row at the event's position belongs to another event.
//! - The page contains the event's row at another position.
//!
//! The table may have rows of events that the stream does not contain, for example events that were
//! published from their table. The merge ignores these rows.

use std::collections::{HashSet, VecDeque};

use decoder::Lsn;
use replication::CommitLsn;
use slot_manager::cluster;
use tokio_postgres::types::PgLsn;

use super::predecessor::PredecessorGone;
use crate::error::Result;
use crate::event::EventPosition;
use crate::postgres::Sql;
use crate::store::position;
use crate::store::relay_row::RecordKeeping;

const PAGE: i64 = 5_000;

const SELECT_PAGE: &str = "\
    SELECT commit_lsn, ordinal, event_id, state = 'published' FROM outbox.dispatch \
    WHERE (commit_lsn, ordinal) > ($1, $2) AND commit_lsn <= $3 \
    ORDER BY commit_lsn, ordinal LIMIT $4";

const IS_PUBLISHED: &str = "\
    SELECT bool_and(state = 'published') FROM outbox.dispatch WHERE event_id = $1";

/// The answer of [`EarlierOutcomes::look_up`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lookup {
    /// The event has an outcome: do not send it again.
    Done,
    /// The event is published, but must be sent again. Other published events may lack a row, so the relay repeats
    /// all published events of a key, to keep them complete and in order.
    Repeated,
    /// The event has no outcome yet.
    New,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct DispatchRow {
    position: EventPosition,
    event_id: [u8; 16],
    is_published: bool,
}

/// The dispatch rows after the slot's position that existed when the session began, read page by page.
#[derive(Debug)]
pub(crate) struct EarlierOutcomes {
    page: VecDeque<DispatchRow>,
    /// Ids of the page's rows whose events the stream has not delivered yet.
    ids: HashSet<[u8; 16], foldhash::fast::RandomState>,
    /// Position of the last row that was read.
    read_to: EventPosition,
    /// Commit LSN of the last row to read. `None` once all rows have been read.
    last: Option<Lsn>,
    /// The end of the WAL when the session began. Before this position, the stream may contain events that an earlier
    /// session has published from their table. For example, a recovery keeps the slot, and publishes rows from the
    /// tables. Then the server crashes, and returns to an older position of the slot, from which the slot streams these
    /// rows.
    ///
    /// The dispatch row of such an event has a commit LSN that no commit can have, so the relay looks the event up by
    /// its id. `None` if there are no such dispatch rows after the slot's position.
    from_tables_before: Option<Lsn>,
    records: RecordKeeping,
}

impl EarlierOutcomes {
    /// Prepares to read the dispatch rows from the position `confirmed` on.
    pub(crate) async fn after(
        sql: &Sql,
        confirmed: Lsn,
        records: RecordKeeping,
        _nobody_adds_rows: &PredecessorGone,
    ) -> Result<Self> {
        let start = PgLsn::from(confirmed.as_u64());
        let row = sql
            .query_one(
                // Find the last row that the stream can reach. Commit LSNs in the stream are multiples of 8. Events
                // that were published from their table have other commit LSNs, so leave out their rows.
                "SELECT max(commit_lsn) FROM outbox.dispatch \
                 WHERE commit_lsn >= $1 AND mod(commit_lsn - '0/0'::pg_lsn, 8) = 0",
                &[&start],
            )
            .await?;
        let last: Option<PgLsn> = row.get(0);
        let from_tables = sql
            .query_opt(
                "SELECT FROM outbox.dispatch \
                 WHERE commit_lsn >= $1 AND mod(commit_lsn - '0/0'::pg_lsn, 8) = 7 LIMIT 1",
                &[&start],
            )
            .await?;
        let from_tables_before = match from_tables {
            Some(_) => Some(cluster::wal_end(sql).await?),
            None => None,
        };
        let read_to = EventPosition {
            commit: CommitLsn::new(Lsn::new(confirmed.as_u64().saturating_sub(1))),
            ordinal: i32::MAX.cast_unsigned(),
        };
        Ok(Self {
            page: VecDeque::new(),
            ids: HashSet::default(),
            read_to,
            last: last.map(|last| Lsn::new(last.into())),
            from_tables_before,
            records,
        })
    }

    /// Whether a page must be read before the event at this position can be looked up.
    pub(crate) fn needs_page(&self, at: EventPosition) -> bool {
        self.last.is_some_and(|last| at.commit.lsn() <= last)
            && self.page.back().is_none_or(|row| row.position < at)
    }

    /// Reads the next page. Does nothing if all rows have been read.
    pub(crate) async fn read_page(&mut self, sql: &Sql) -> Result<()> {
        let Some(last) = self.last else { return Ok(()) };
        // The stream has passed every row of the previous page, so drop them.
        self.page.clear();
        self.ids.clear();
        let (commit, ordinal) = position::columns(self.read_to);
        let last = PgLsn::from(last.as_u64());
        let rows = sql
            .query(SELECT_PAGE, &[&commit, &ordinal, &last, &PAGE])
            .await?;
        if (rows.len() as i64) < PAGE {
            self.last = None;
        }
        for row in rows {
            let event_id: uuid::Uuid = row.get(2);
            let row = DispatchRow {
                position: position::read(&row, 0),
                event_id: event_id.into_bytes(),
                is_published: row.get(3),
            };
            self.read_to = row.position;
            self.ids.insert(row.event_id);
            self.page.push_back(row);
        }
        Ok(())
    }

    /// Whether an earlier session may have published the event at `at` from its table. The dispatch row of such an
    /// event is not at `at`, but at a position that no commit can have. So if the caller has found no row at `at`, and
    /// this function returns true, the caller must look the event up by its id.
    pub(crate) fn may_be_from_a_table(&self, at: EventPosition) -> bool {
        self.from_tables_before
            .is_some_and(|end| at.commit.lsn() < end)
    }

    /// Looks an event up by its id alone. The caller needs this if PostgreSQL has decoded the transaction
    /// differently from the last time, or if the event may have been published from its table.
    pub(crate) async fn look_up_by_id(&self, sql: &Sql, event_id: &[u8; 16]) -> Result<Lookup> {
        look_up_by_id(sql, event_id, self.records).await
    }

    /// Notes that the stream has delivered every transaction before `wal_end`. Drops the rows before this position.
    ///
    /// A row may still be there because the stream never delivers its event: the event was published from its table.
    /// [`look_up`](Self::look_up) drops such rows too, but only when the next event arrives. Until then they would
    /// keep [`is_over`](Self::is_over) false.
    pub(crate) fn passed(&mut self, wal_end: Lsn) {
        if self.last.is_some_and(|last| last < wal_end) {
            self.last = None;
        }
        self.from_tables_before = self.from_tables_before.filter(|end| wal_end < *end);
        while self
            .page
            .front()
            .is_some_and(|row| row.position.commit.lsn() < wal_end)
        {
            self.page.pop_front();
        }
    }

    /// Whether the stream has passed all rows. If so, every later event is new.
    pub(crate) fn is_over(&self) -> bool {
        self.last.is_none() && self.page.is_empty() && self.from_tables_before.is_none()
    }

    /// Looks up the next event of the stream by its position. Returns `None` if PostgreSQL has decoded
    /// the event's transaction differently from the last time. The caller then looks the event up by its
    /// id.
    pub(crate) fn look_up(&mut self, at: EventPosition, event_id: &[u8; 16]) -> Option<Lookup> {
        self.last = self.last.filter(|last| at.commit.lsn() <= *last);
        self.from_tables_before = self.from_tables_before.filter(|end| at.commit.lsn() < *end);
        while self.page.front().is_some_and(|row| row.position < at) {
            self.page.pop_front();
        }
        let here = self.page.front().copied();
        match here.filter(|row| row.position == at) {
            Some(row) if row.event_id == *event_id => {
                self.page.pop_front();
                self.ids.remove(event_id);
                Some(standing(row.is_published, self.records))
            }
            Some(_) => None,
            None if self.ids.contains(event_id) => None,
            None => Some(Lookup::New),
        }
    }
}

/// Looks an event up by its id alone.
///
/// # Errors
/// Database errors.
pub(crate) async fn look_up_by_id(
    sql: &Sql,
    event_id: &[u8; 16],
    records: RecordKeeping,
) -> Result<Lookup> {
    let id = uuid::Uuid::from_bytes(*event_id);
    let row = sql.query_one(IS_PUBLISHED, &[&id]).await?;
    let is_published: Option<bool> = row.get(0);
    Ok(match is_published {
        None => Lookup::New,
        Some(is_published) => standing(is_published, records),
    })
}

fn standing(is_published: bool, records: RecordKeeping) -> Lookup {
    if is_published && records.repeats_published() {
        Lookup::Repeated
    } else {
        Lookup::Done
    }
}

/// Returns the highest ordinal that is used with one of these commit LSNs, or 0 if there is none.
pub(crate) async fn last_ordinal(
    sql: &Sql,
    commits: impl IntoIterator<Item = CommitLsn>,
) -> Result<u32> {
    // Search the index once per commit LSN, because many rows may have the same commit LSN.
    const STATEMENT: &str = "\
        SELECT coalesce(max((SELECT max(ordinal) FROM outbox.dispatch WHERE commit_lsn = c)), 0) \
        FROM unnest($1::pg_lsn[]) c";
    let commits: HashSet<CommitLsn> = commits.into_iter().collect();
    let commits = commits
        .iter()
        .map(|commit| PgLsn::from(commit.lsn().as_u64()));
    let commits: Vec<PgLsn> = commits.collect();
    let last: i32 = sql.query_one(STATEMENT, &[&commits]).await?.get(0);
    Ok(last.unsigned_abs())
}

#[cfg(test)]
mod tests;
