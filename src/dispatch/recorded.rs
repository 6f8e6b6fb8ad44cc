//! Finds out which events of the stream have an outcome already, by merging two ordered lists.
//!
//! The stream is ordered by (commit LSN, ordinal), and so is the primary key of the dispatch table.
//! So we read the rows after the slot's position page by page, just ahead of the stream, and hold
//! only one page in memory, however many rows there are.
//!
//! With `dispatch = exceptions`, published events have no row, so a restart publishes them again. If
//! events with a row lie between them, those must be published again too: a replay may not leave any
//! out. So in that mode only events in quarantine and discarded events are skipped.
//!
//! PostgreSQL may decode a transaction differently the next time. If the publication was altered
//! while the transaction was open, it can bring more rows or fewer, depending on what the same
//! session decoded before it. Then the ordinals shift, and the ids reveal it: we look an event up by
//! its id if the row at its place belongs to another event, or if its own row is at another place of
//! the page.
//!
//! The table may hold rows whose events the stream does not bring, for example events that were
//! published from their table. They are skipped.

use std::collections::{HashSet, VecDeque};

use decoder::Lsn;
use tokio_postgres::types::PgLsn;

use crate::error::Result;
use crate::postgres::Sql;
use crate::watermark::CommitLsn;

const PAGE: i64 = 5_000;

const SELECT_PAGE: &str = "\
    SELECT commit_lsn, ordinal, event_id, state = 'published' FROM outbox.dispatch \
    WHERE (commit_lsn, ordinal) > ($1, $2) AND commit_lsn <= $3 \
    ORDER BY commit_lsn, ordinal LIMIT $4";

const IS_PUBLISHED: &str = "\
    SELECT bool_and(state = 'published') FROM outbox.dispatch WHERE event_id = $1";

/// The answer of [`RecordedEvents::look_up`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lookup {
    /// The event has an outcome: do not send it again.
    Done,
    /// The event is published; it is sent again together with neighbours that have no row.
    Repeated,
    /// The event has no outcome yet.
    New,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct DispatchRow {
    commit: u64,
    ordinal: i32,
    event_id: [u8; 16],
    is_published: bool,
}

/// The rows that existed when the session began.
#[derive(Debug)]
pub(crate) struct RecordedEvents {
    page: VecDeque<DispatchRow>,
    /// Ids in the page that the stream has not brought yet.
    ids: HashSet<[u8; 16], foldhash::fast::RandomState>,
    /// Place of the last row read so far.
    read_to: (u64, i32),
    /// Commit LSN of the last row; `None` once all rows have been read.
    last: Option<u64>,
    /// Whether events may have been published without a row (`dispatch = exceptions`).
    repeats: bool,
}

impl RecordedEvents {
    /// Prepares to read the rows after `confirmed`. `repeats` says that events may have been
    /// published without a row.
    pub(crate) async fn after(sql: &Sql, confirmed: Lsn, repeats: bool) -> Result<Self> {
        let start = PgLsn::from(confirmed.as_u64());
        let row = sql
            .query_one(
                // Only commit LSNs divisible by 8: rows of events read from a table use LSNs in
                // between, where the stream cannot have a commit.
                "SELECT max(commit_lsn) FROM outbox.dispatch \
                 WHERE commit_lsn >= $1 AND mod(commit_lsn - '0/0'::pg_lsn, 8) = 0",
                &[&start],
            )
            .await?;
        let last: Option<PgLsn> = row.get(0);
        let read_to = (confirmed.as_u64().saturating_sub(1), i32::MAX);
        Ok(Self {
            page: VecDeque::new(),
            ids: HashSet::default(),
            read_to,
            last: last.map(u64::from),
            repeats,
        })
    }

    /// Whether a page must be read before this place can be looked up.
    pub(crate) fn needs_page(&self, commit: CommitLsn, ordinal: u32) -> bool {
        let place = (commit.lsn().as_u64(), ordinal as i32);
        self.last.is_some_and(|last| place.0 <= last)
            && self
                .page
                .back()
                .is_none_or(|row| (row.commit, row.ordinal) < place)
    }

    /// Reads the next page.
    pub(crate) async fn read_page(&mut self, sql: &Sql) -> Result<()> {
        let Some(last) = self.last else { return Ok(()) };
        // The stream is past every row of the previous page.
        self.page.clear();
        self.ids.clear();
        let (commit, ordinal) = self.read_to;
        let rows = sql
            .query(
                SELECT_PAGE,
                &[&PgLsn::from(commit), &ordinal, &PgLsn::from(last), &PAGE],
            )
            .await?;
        if (rows.len() as i64) < PAGE {
            self.last = None;
        }
        for row in rows {
            let commit: PgLsn = row.get(0);
            let event_id: uuid::Uuid = row.get(2);
            let row = DispatchRow {
                commit: commit.into(),
                ordinal: row.get(1),
                event_id: event_id.into_bytes(),
                is_published: row.get(3),
            };
            self.read_to = (row.commit, row.ordinal);
            self.ids.insert(row.event_id);
            self.page.push_back(row);
        }
        Ok(())
    }

    /// Looks an event up by its id alone, because its transaction was decoded differently.
    pub(crate) async fn look_up_by_id(&self, sql: &Sql, event_id: &[u8; 16]) -> Result<Lookup> {
        look_up_by_id(sql, event_id, self.repeats).await
    }

    /// The stream has brought every transaction committed before `wal_end`, so earlier rows are no
    /// longer needed. Otherwise trailing rows of events that were published from their table would
    /// keep [`is_over`](Self::is_over) false until the next event.
    pub(crate) fn passed(&mut self, wal_end: Lsn) {
        if self.last.is_some_and(|last| last < wal_end.as_u64()) {
            self.last = None;
        }
        while self
            .page
            .front()
            .is_some_and(|row| row.commit < wal_end.as_u64())
        {
            self.page.pop_front();
        }
    }

    /// Whether the stream is past all rows: every event from here on is new.
    pub(crate) fn is_over(&self) -> bool {
        self.last.is_none() && self.page.is_empty()
    }

    /// Looks up the next event of the stream by its place. `None` if its transaction was decoded
    /// differently from last time: then look it up by its id.
    pub(crate) fn look_up(
        &mut self,
        commit: CommitLsn,
        ordinal: u32,
        event_id: &[u8; 16],
    ) -> Option<Lookup> {
        let place = (commit.lsn().as_u64(), ordinal as i32);
        self.last = self.last.filter(|last| place.0 <= *last);
        while self
            .page
            .front()
            .is_some_and(|row| (row.commit, row.ordinal) < place)
        {
            self.page.pop_front();
        }
        let here = self.page.front().copied();
        match here.filter(|row| (row.commit, row.ordinal) == place) {
            Some(row) if row.event_id == *event_id => {
                self.page.pop_front();
                self.ids.remove(event_id);
                Some(standing(row.is_published, self.repeats))
            }
            Some(_) => None,
            None if self.ids.contains(event_id) => None,
            None => Some(Lookup::New),
        }
    }
}

/// Looks an event up by its id alone. `repeats` says that events may have been published without a
/// row.
///
/// # Errors
/// Database errors.
pub(crate) async fn look_up_by_id(sql: &Sql, event_id: &[u8; 16], repeats: bool) -> Result<Lookup> {
    let id = uuid::Uuid::from_bytes(*event_id);
    let row = sql.query_one(IS_PUBLISHED, &[&id]).await?;
    let is_published: Option<bool> = row.get(0);
    Ok(match is_published {
        None => Lookup::New,
        Some(is_published) => standing(is_published, repeats),
    })
}

fn standing(is_published: bool, repeats: bool) -> Lookup {
    if repeats && is_published {
        Lookup::Repeated
    } else {
        Lookup::Done
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn row(commit: u64, ordinal: i32) -> DispatchRow {
        DispatchRow {
            commit,
            ordinal,
            event_id: id((commit, ordinal as u32), true),
            is_published: true,
        }
    }

    fn recorded(rows: &[DispatchRow], last: Option<u64>) -> RecordedEvents {
        RecordedEvents {
            page: rows.to_vec().into(),
            ids: rows.iter().map(|row| row.event_id).collect(),
            read_to: (0, 0),
            last,
            repeats: false,
        }
    }

    fn look_up(recorded: &mut RecordedEvents, commit: u64, ordinal: u32) -> Option<Lookup> {
        recorded.look_up(
            CommitLsn::new(Lsn::new(commit)),
            ordinal,
            &id((commit, ordinal), true),
        )
    }

    #[test]
    fn only_recorded_events_are_skipped() {
        let mut recorded = recorded(&[row(10, 2), row(30, 1)], None);
        assert_eq!(look_up(&mut recorded, 10, 1), Some(Lookup::New));
        assert_eq!(look_up(&mut recorded, 10, 2), Some(Lookup::Done));
        assert_eq!(look_up(&mut recorded, 20, 1), Some(Lookup::New));
        assert_eq!(look_up(&mut recorded, 30, 1), Some(Lookup::Done));
        assert!(recorded.is_over());
        assert_eq!(look_up(&mut recorded, 30, 2), Some(Lookup::New));
    }

    #[test]
    fn rows_of_events_that_are_not_replayed_are_skipped() {
        let mut recorded = recorded(&[row(10, 1), row(10, 2), row(30, 1)], None);
        assert_eq!(look_up(&mut recorded, 30, 1), Some(Lookup::Done));
    }

    #[test]
    fn a_keepalive_after_the_last_row_ends_the_lookup_even_if_its_event_never_comes() {
        let mut recorded = recorded(&[row(10, 2), row(20, 3)], Some(50));
        assert_eq!(look_up(&mut recorded, 10, 2), Some(Lookup::Done));
        // A commit record that begins exactly at 20 is still to come.
        recorded.passed(Lsn::new(20));
        assert_eq!(recorded.page.len(), 1);
        recorded.passed(Lsn::new(50));
        assert!(!recorded.is_over());
        recorded.passed(Lsn::new(51));
        assert!(recorded.is_over());
    }

    #[test]
    fn a_transaction_decoded_with_more_or_fewer_rows_is_looked_up_by_id() {
        let commit = CommitLsn::new(Lsn::new(10));
        let rows = [row(10, 1), row(10, 4)];
        let mut more = recorded(&rows, None);
        assert_eq!(more.look_up(commit, 1, &[99; 16]), None);
        let mut fewer = recorded(&rows, None);
        let fourth = id((10, 4), true);
        assert_eq!(fewer.look_up(commit, 2, &[99; 16]), Some(Lookup::New));
        assert_eq!(fewer.look_up(commit, 3, &fourth), None);
    }

    #[test]
    fn an_id_used_in_two_tables_means_two_events() {
        let mut recorded = recorded(&[row(10, 1), row(20, 1)], None);
        assert_eq!(look_up(&mut recorded, 10, 1), Some(Lookup::Done));
        let commit = CommitLsn::new(Lsn::new(10));
        let found = recorded.look_up(commit, 2, &id((10, 1), true));
        assert_eq!(found, Some(Lookup::New));
    }

    #[test]
    fn with_dispatch_exceptions_published_events_repeat_and_quarantined_ones_do_not() {
        let aside = DispatchRow {
            is_published: false,
            ..row(20, 1)
        };
        let mut recorded = RecordedEvents {
            repeats: true,
            ..recorded(&[row(10, 1), aside], None)
        };
        assert_eq!(look_up(&mut recorded, 10, 1), Some(Lookup::Repeated));
        assert_eq!(look_up(&mut recorded, 20, 1), Some(Lookup::Done));
        assert!(recorded.is_over());
    }

    #[test]
    fn the_next_page_is_read_once_the_stream_is_past_this_one() {
        let recorded = recorded(&[row(10, 1), row(20, 5)], Some(50));
        let needs =
            |commit, ordinal| recorded.needs_page(CommitLsn::new(Lsn::new(commit)), ordinal);
        assert!(!needs(10, 1) && !needs(20, 5));
        assert!(needs(20, 6) && needs(50, 1));
        assert!(!needs(60, 1));
    }

    /// A table of rows, and a stream that is replayed from an earlier point.
    #[derive(Debug, Clone)]
    struct Restart {
        /// Place of each event, and its row: its own (`Some(true)`), another event's, or none.
        events: Vec<((u64, u32), Option<bool>)>,
        /// Rows whose events are not replayed, such as those of an aborted or filtered transaction.
        strangers: Vec<(u64, u32)>,
        page: usize,
    }

    fn restart() -> impl Strategy<Value = Restart> {
        let place = || (1u64..40, 1u32..6);
        let row = prop_oneof![
            3 => Just(Some(true)), 1 => Just(Some(false)), 2 => Just(None),
        ];
        (
            prop::collection::btree_map(place(), row, 0..80),
            prop::collection::btree_set(place(), 0..20),
            1usize..8,
        )
            .prop_map(|(events, mut strangers, page)| {
                strangers.retain(|place| !events.contains_key(place));
                Restart {
                    events: events.into_iter().collect(),
                    strangers: strangers.into_iter().collect(),
                    page,
                }
            })
    }

    fn id(place: (u64, u32), is_same: bool) -> [u8; 16] {
        let mut id = [0; 16];
        id[..8].copy_from_slice(&place.0.to_be_bytes());
        id[8..12].copy_from_slice(&place.1.to_be_bytes());
        id[15] = u8::from(!is_same);
        id
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1_000))]

        /// Reads pages as [`RecordedEvents::read_page`] does, from a list instead of a server.
        #[test]
        fn an_event_is_skipped_if_and_only_if_its_own_row_is_at_its_place(restart in restart()) {
            let mut table: Vec<DispatchRow> = restart
                .events
                .iter()
                .filter_map(|&(place, row)| Some((place, row?)))
                .chain(restart.strangers.iter().map(|&place| (place, true)))
                .map(|(place, is_same)| DispatchRow {
                    commit: place.0,
                    ordinal: place.1 as i32,
                    event_id: id(place, is_same),
                    is_published: true,
                })
                .collect();
            table.sort_by_key(|row| (row.commit, row.ordinal));
            let mut recorded = recorded(&[], table.last().map(|row| row.commit));
            for (place, row) in restart.events {
                let commit = CommitLsn::new(Lsn::new(place.0));
                while recorded.needs_page(commit, place.1) {
                    let read_to = recorded.read_to;
                    let rest = table.iter().filter(|row| (row.commit, row.ordinal) > read_to);
                    recorded.page = rest.take(restart.page).copied().collect();
                    recorded.ids = recorded.page.iter().map(|row| row.event_id).collect();
                    if recorded.page.len() < restart.page {
                        recorded.last = None;
                    }
                    if let Some(row) = recorded.page.back() {
                        recorded.read_to = (row.commit, row.ordinal);
                    }
                }
                let expected = match row {
                    Some(true) => Some(Lookup::Done),
                    Some(false) => None,
                    None => Some(Lookup::New),
                };
                prop_assert_eq!(recorded.look_up(commit, place.1, &id(place, true)), expected);
                prop_assert!(recorded.page.len() <= restart.page);
            }
        }
    }
}
