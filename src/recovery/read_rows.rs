//! Remembers the event ids of rows that a recovery has read from the tables, so that the relay does not publish them
//! twice. The relay may find such a row again in two places:
//!
//! - In a captured table, if somebody has copied the row there from a former partition.
//! - In the stream, if the recovery has kept its slot.
//!
//! The number of remembered ids is bounded. If there are more rows, the effect depends on the records:
//!
//! - With full records, the relay still publishes no row twice. It recognises a published row by its record. A row
//!   without a record is still among the unresolved events in memory (`TableRows`).
//! - Without full records, the relay may publish a row twice, but leaves out no row.

use std::collections::HashSet;

use decoder::Lsn;

use crate::capture::claim::Captured;
use crate::capture::from_table::TableRows;
use crate::capture::session_records::SessionRecords;
use crate::event::EventId;
use crate::postgres::Snapshot;
use crate::store::capture_record::CaptureRecord;

/// Maximum number of event ids in one set. A hash table with 2^20 buckets is at most seven eighths full, so it holds
/// exactly this number of ids. A set takes at most 18 MB, and 27 MB for a moment while it grows.
const MAX_REMEMBERED: usize = (1 << 20) / 8 * 7;

/// A bounded set of event ids.
#[derive(Debug, Default)]
struct RememberedIds {
    ids: HashSet<[u8; 16], foldhash::fast::RandomState>,
    /// Whether some id did not fit into the set. If so, the set no longer recognises every id.
    lacks_some: bool,
}

impl RememberedIds {
    /// Adds an id, unless the set already has `limit` ids. Returns whether the id was not in the set before.
    fn add(&mut self, id: [u8; 16], limit: usize) -> bool {
        if self.ids.len() < limit {
            return self.ids.insert(id);
        }
        let is_new = !self.ids.contains(&id);
        self.lacks_some |= is_new;
        is_new
    }
}

/// Returns one transaction number for each capture record in `known`. All rows of older transactions are resolved: the
/// rows of the table, of its partitions and of its former partitions.
pub(super) fn resolved_below(captured: &[Captured], known: &SessionRecords) -> Vec<u64> {
    let of_table = |captured: &Captured| {
        let of_partitions = captured.with_own_floors(captured.record.floor);
        all_resolved_below(&captured.record, of_partitions.map(|(_, own)| own))
    };
    let others = known.iter().skip(captured.len());
    let of_other =
        |record: &CaptureRecord| all_resolved_below(record, record.uncaptured.values().copied());
    let of_tables = captured.iter().map(of_table);
    of_tables.chain(others.map(of_other)).collect()
}

fn all_resolved_below(record: &CaptureRecord, of_partitions: impl Iterator<Item = u64>) -> u64 {
    // A floor that was never raised still has its value from the start of capturing. Such a floor does not prove that
    // the rows of older transactions in the stream are resolved.
    let begins_at = record.since.as_ref().map(Snapshot::xmin);
    if Some(record.floor) == begins_at {
        return 0;
    }
    let of_former = record.unread.values().copied();
    of_partitions.chain(of_former).fold(record.floor, u64::min)
}

/// The rows that a recovery has read from the tables.
#[derive(Debug)]
pub(super) struct ReadRows {
    /// The rows of former partitions.
    former: RememberedIds,
    /// Whether the recovery is reading a former partition now. If so, `add` also stores the ids in `former`.
    reads_former: bool,
    /// All rows that the recovery has read, if it has kept its slot. The stream of a kept slot may contain these rows
    /// too. `None` if the slot is new, because the stream of a new slot contains none of these rows.
    again: Option<RowsFromTables>,
}

impl ReadRows {
    /// Returns an empty value for a recovery that begins to read the tables.
    ///
    /// - `repeated_before`: `None` if the slot is new. If the recovery has kept its slot, the stream may contain rows
    ///   that the recovery reads from the tables, but only before this WAL position.
    /// - `recorded`: the recovery's snapshot if every published event has a record, otherwise `None`.
    /// - `resolved_below`: a transaction number for each capture record; all rows of older transactions are resolved.
    ///   0 if no such number is known. Has no effect if every published event has a record, because the records show
    ///   which rows are resolved.
    pub(super) fn new(
        repeated_before: Option<Lsn>,
        recorded: Option<&Snapshot>,
        resolved_below: &[u64],
    ) -> Self {
        let below =
            |xid: &u64| (*xid > 0 && recorded.is_none()).then(|| Snapshot::of_all_below(*xid));
        let resolved = resolved_below.iter().map(below).collect();
        Self {
            former: RememberedIds::default(),
            reads_former: false,
            again: repeated_before.map(|end| RowsFromTables {
                ids: RememberedIds::default(),
                end,
                recorded: recorded.cloned(),
                is_recorded: false,
                resolved,
                xid: 0,
            }),
        }
    }

    /// Sets whether the recovery reads former partitions from now on.
    pub(super) fn reads_former(&mut self, reads_former: bool) {
        self.reads_former = reads_former;
    }

    /// Remembers a row. Returns whether the recovery must send the row. Returns false for a copy of a row
    /// that the recovery has read from a former partition.
    pub(super) fn add(&mut self, id: [u8; 16]) -> bool {
        if let Some(again) = &mut self.again {
            again.ids.add(id, MAX_REMEMBERED);
        }
        if self.reads_former {
            self.former.add(id, MAX_REMEMBERED)
        } else {
            !self.former.ids.contains(&id)
        }
    }

    /// Whether there are more rows of former partitions than the set can hold.
    pub(super) fn lacks_some_former(&self) -> bool {
        self.former.lacks_some
    }

    /// Returns the rows that the stream may contain too, for the reader of the stream. `None` if the slot is new,
    /// because the stream of a new slot contains none of these rows.
    pub(super) fn take_repeated(&mut self) -> Option<RowsFromTables> {
        let sent = self.again.take()?;
        if sent.ids.lacks_some && sent.recorded.is_none() {
            tracing::warn!(
                remembered = sent.ids.ids.len(),
                "recovering: there are more rows than the relay remembers, so it may publish some of \
                 them a second time from the stream"
            );
        }
        Some(sent)
    }
}

/// The rows that the recovery has read from the tables and that the stream of a kept slot may contain too. The relay
/// skips them in the stream.
#[derive(Debug)]
pub(crate) struct RowsFromTables {
    ids: RememberedIds,
    /// A WAL position. From this position on, the stream contains none of the rows.
    end: Lsn,
    /// With full records: the snapshot of the recovery. `None` with `dispatch = exceptions`.
    recorded: Option<Snapshot>,
    /// The result of [`may_be_recorded`](Self::may_be_recorded) for the current transaction.
    is_recorded: bool,
    /// For each capture record, a snapshot that shows only transactions whose rows are all resolved. These are the
    /// transactions below the lowest floor of its table, the partitions and the former partitions. `None` if no floor is
    /// known. Also `None` with full records, because the records then show which events are resolved.
    ///
    /// The recovery does not read resolved rows from the table, but the stream of a kept slot may contain them. The
    /// relay must skip them there. Otherwise it would publish an old row again, after newer rows of the same key that
    /// the recovery has published from the table.
    resolved: Vec<Option<Snapshot>>,
    /// The id of the current transaction in the WAL.
    xid: u32,
}

impl RowsFromTables {
    /// Notes that a transaction of the stream begins. `xid` is its id in the WAL.
    pub(crate) fn begin(&mut self, xid: u32) {
        let recorded = self.recorded.as_ref();
        self.is_recorded = recorded.is_some_and(|it| it.shows_recent(xid));
        self.xid = xid;
    }

    /// Whether the relay must skip this event of the current transaction. `record` is the index of its table's record
    /// in [`SessionRecords`]. `rows` has the events from the tables that have no outcome yet. The relay skips the event
    /// in these cases:
    ///
    /// - The event is resolved, because its transaction is below the floor of the table.
    /// - The set of remembered ids contains the event, so this session has read it from the table.
    /// - `rows` contains the event, so this session is publishing it from the table. The set may lack the event's id,
    ///   because the number of remembered ids is limited.
    pub(crate) fn has(&self, record: usize, event_id: &EventId, rows: &TableRows) -> bool {
        let resolved = self.resolved.get(record).and_then(Option::as_ref);
        let is_resolved = resolved.is_some_and(|it| it.shows_recent(self.xid));
        is_resolved || self.ids.ids.contains(&event_id.uuid) || rows.is_unresolved(event_id)
    }

    /// Whether an earlier session may have published rows of the current transaction from a table. The
    /// positions in their records differ from the positions in the stream, so the relay must look them up by
    /// event id.
    pub(crate) fn may_be_recorded(&self) -> bool {
        self.is_recorded
    }

    /// Whether the stream contains none of the rows at `position` or later. If so, the relay can forget the
    /// rows.
    pub(crate) fn ends_before(&self, position: Lsn) -> bool {
        self.end <= position
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capture::from_table;
    use crate::capture::positions::commit_before;
    use crate::event::EventPosition;

    fn id(n: u32) -> [u8; 16] {
        u128::from(n).to_be_bytes()
    }

    fn event_id(n: u32) -> EventId {
        EventId {
            uuid: id(n),
            source_id: None,
        }
    }

    #[test]
    fn a_full_set_still_knows_its_ids_and_treats_all_others_as_new() {
        let mut ids = RememberedIds::default();
        assert!(ids.add(id(1), 2) && ids.add(id(2), 2));
        assert!(!ids.add(id(1), 2) && !ids.add(id(2), 2));
        assert!(!ids.lacks_some);
        assert!(ids.add(id(3), 2) && ids.add(id(3), 2));
        assert!(ids.lacks_some);
        assert!(!ids.add(id(1), 2));
    }

    #[test]
    fn a_full_set_of_ids_has_exactly_the_documented_capacity() {
        let mut ids = RememberedIds::default();
        for n in 0..=u32::try_from(MAX_REMEMBERED).unwrap() {
            assert!(ids.add(id(n), MAX_REMEMBERED));
        }
        assert_eq!(ids.ids.len(), MAX_REMEMBERED);
        assert_eq!(ids.ids.capacity(), MAX_REMEMBERED);
        assert!(ids.lacks_some);
    }

    #[test]
    fn only_rows_of_former_partitions_count_as_sent_when_tables_are_read() {
        let mut rows = ReadRows::new(Some(Lsn::new(80)), None, &[]);
        rows.reads_former(true);
        assert!(rows.add(id(1)));
        assert!(!rows.add(id(1)));
        rows.reads_former(false);
        assert!(!rows.add(id(1)));
        assert!(rows.add(id(2)) && rows.add(id(2)));
        let sent = rows.take_repeated().unwrap();
        let (_sender, rows) = from_table::channel();
        let has = |n| sent.has(0, &event_id(n), &rows);
        assert!(has(1) && has(2) && !has(3));
        assert!(!sent.ends_before(Lsn::new(79)) && sent.ends_before(Lsn::new(80)));
    }

    #[test]
    fn a_new_slots_stream_repeats_no_row_so_no_ids_are_remembered() {
        let mut rows = ReadRows::new(None, None, &[]);
        assert!(rows.add(id(1)) && rows.add(id(1)));
        assert!(rows.take_repeated().is_none());
    }

    #[test]
    fn only_transactions_that_the_snapshot_shows_may_have_records_with_other_positions() {
        let snapshot = "100:110:103".parse().unwrap();
        let mut rows = ReadRows::new(Some(Lsn::new(80)), Some(&snapshot), &[]);
        let mut sent = rows.take_repeated().unwrap();
        for (xid, expected) in [(99, true), (103, false), (104, true), (110, false)] {
            sent.begin(xid);
            assert_eq!(sent.may_be_recorded(), expected, "{xid}");
        }
        let mut sent = ReadRows::new(Some(Lsn::new(80)), None, &[])
            .take_repeated()
            .unwrap();
        sent.begin(99);
        assert!(!sent.may_be_recorded());
    }

    #[test]
    fn without_records_transactions_below_the_floor_of_their_table_are_resolved() {
        let mut rows = ReadRows::new(Some(Lsn::new(80)), None, &[100, 0]);
        let mut sent = rows.take_repeated().unwrap();
        let (_sender, rows) = from_table::channel();
        for (xid, expected) in [(99, true), (100, false), (u32::MAX, true)] {
            sent.begin(xid);
            assert_eq!(sent.has(0, &event_id(1), &rows), expected, "{xid}");
            assert!(
                !sent.has(1, &event_id(1), &rows),
                "the floor of another table"
            );
        }
    }

    #[test]
    fn an_event_beyond_the_bound_is_recognised_as_long_as_it_has_no_outcome() {
        let mut read = ReadRows::new(
            Some(Lsn::new(80)),
            Some(&"100:110:103".parse().unwrap()),
            &[],
        );
        let (_sender, mut rows) = from_table::channel();
        let last = u32::try_from(MAX_REMEMBERED).unwrap();
        for n in 0..=last {
            assert!(read.add(id(n)));
        }
        let at = EventPosition {
            commit: commit_before(Lsn::new(80)),
            ordinal: last,
        };
        rows.taken(at, &event_id(last));
        let sent = read.take_repeated().unwrap();
        assert!(sent.has(0, &event_id(0), &rows) && sent.has(0, &event_id(last), &rows));
        // From now on, the record of the event shows that it was published.
        rows.resolve(&[at]);
        assert!(!sent.has(0, &event_id(last), &rows));
    }
}
