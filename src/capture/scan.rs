//! Walks a captured table and returns the rows that still have to be published, in their order.
//!
//! Every statement reads a bounded number of rows, and holds no lock and no snapshot afterwards. The
//! walk reads rows with a `seq` page by page along the index on `seq`. Rows without a `seq` exist if
//! the table has no such column, or if the rows are older than the column. The walk finds these rows in
//! ranges of blocks. It collects up to [`MAX_COLLECTED`] of these rows at a time, and sorts them in
//! memory.

use std::collections::BTreeMap;

use slot_manager::quoted_identifier;
use uuid::Uuid;

use super::captured::Captured;
use super::table::{TableReader, altered_since};
use super::window::ScanWindow;
use crate::error::Result;
use crate::postgres::Sql;
use crate::store::dispatch::{has_no_row_sql, state_sql};

/// Rows that one statement walks over.
const PAGE_ROWS: usize = 5_000;
/// Blocks that one statement reads when there is no `seq`: 16 MB.
const RANGE_BLOCKS: u32 = 2_048;
/// Maximum number of rows without `seq` that one pass collects and sorts, about 100 bytes each. The next
/// pass continues after these rows.
const MAX_COLLECTED: usize = 100_000;

/// Planner settings that keep the cost of a statement proportional to the rows it reads, even with
/// wrong statistics: PostgreSQL reads the rows along the index, and looks up their records one by one.
const PLAN: &str = "\
    SET enable_seqscan = off; SET enable_hashjoin = off; SET enable_mergejoin = off; \
    SET enable_sort = on; SET jit = off";

/// A row that may have to be published, and its location in the table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Candidate {
    /// The OID of the table or partition that holds the row.
    pub(crate) leaf: u32,
    /// The row's `ctid` in that table or partition.
    pub(crate) place: String,
    pub(crate) seq: Option<i64>,
    pub(crate) id: Uuid,
    pub(crate) record: DispatchState,
}

/// The state of a row's event in outbox.dispatch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DispatchState {
    /// The event has no record.
    Nothing,
    /// The event was published, and may have to be published again because events around it have no
    /// record.
    Published,
    /// The event is in quarantine, or discarded.
    SetAside,
}

/// The order of rows without `seq`: version, transaction, partition, block and line.
type UnnumberedKey = (i64, u64, u32, u32, u32);

/// The progress of a walk.
#[derive(Debug)]
enum Walk {
    /// Next come the rows without a `seq`: from the row after this key on, or from the first row.
    Unnumbered(Option<UnnumberedKey>),
    /// Next come the rows that have a `seq`, from the row after this one on (`seq`, partition, `ctid`).
    Numbered(i64, u32, String),
    Done,
}

/// Which rows of its window a walk returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wanted {
    /// Rows that may have to be published.
    Unresolved,
    /// Rows whose event is set aside.
    SetAside,
}

/// One walk over a table.
pub(crate) struct Scan<'a> {
    window: ScanWindow<'a>,
    wanted: Wanted,
    table: String,
    event_id: String,
    walk: Walk,
}

/// Sets up a session for walks.
///
/// # Errors
/// Those of the connection.
pub(crate) async fn prepare(sql: &Sql) -> Result<()> {
    Ok(sql.batch_execute(PLAN).await?)
}

impl<'a> Scan<'a> {
    /// A walk that returns the rows that may have to be published.
    pub(crate) fn new(window: ScanWindow<'a>, reader: &TableReader) -> Self {
        Self::of(window, reader, Wanted::Unresolved)
    }

    /// A walk over the same rows that returns only the rows whose event is set aside.
    pub(crate) fn set_aside(window: ScanWindow<'a>, reader: &TableReader) -> Self {
        Self::of(window, reader, Wanted::SetAside)
    }

    fn of(window: ScanWindow<'a>, reader: &TableReader, wanted: Wanted) -> Self {
        let has_seq = window.captured.shape.numbered().is_some();
        let mut scan = Self {
            window,
            wanted,
            table: reader.table_sql().to_owned(),
            event_id: reader.event_id_sql().to_owned(),
            walk: Walk::Unnumbered(None),
        };
        if has_seq && !window.with_unnumbered {
            scan.walk = scan.first_numbered();
        }
        scan
    }

    fn first_numbered(&self) -> Walk {
        match self.window.captured.shape.numbered() {
            Some(_) => {
                let from = self.window.from_seq.unwrap_or(i64::MIN);
                Walk::Numbered(from, u32::MAX, "(0,0)".to_owned())
            }
            None => Walk::Done,
        }
    }

    /// Returns the next rows, possibly an empty list. Returns `None` at the end of the walk.
    ///
    /// # Errors
    /// Errors of a statement; `slot-busy` when the table was altered in the meantime.
    pub(crate) async fn next(&mut self, sql: &Sql) -> Result<Option<Vec<Candidate>>> {
        match std::mem::replace(&mut self.walk, Walk::Done) {
            Walk::Unnumbered(after) => {
                let found = self.collect(sql, after).await?;
                self.walk = match found.last_key_value() {
                    Some((last, _)) if found.len() >= MAX_COLLECTED => {
                        Walk::Unnumbered(Some(*last))
                    }
                    _ => self.first_numbered(),
                };
                Ok(Some(found.into_values().collect()))
            }
            Walk::Numbered(seq, leaf, place) => self.page(sql, seq, leaf, &place).await.map(Some),
            Walk::Done => Ok(None),
        }
    }

    /// Returns two SQL expressions about a row of `w`: the state of its event in outbox.dispatch, and
    /// whether the scan returns the row.
    fn recorded_sql(&self) -> (String, String) {
        let state = state_sql("w.id");
        match self.wanted {
            Wanted::SetAside => (state.clone(), format!("{state} = 'aside'")),
            Wanted::Unresolved if self.window.records.may_lack_records() => {
                (state, "true".to_owned())
            }
            Wanted::Unresolved => ("null::text".to_owned(), has_no_row_sql("w.id")),
        }
    }

    /// Reads one page of rows along the index of `seq`, and returns the rows that may have to be
    /// published.
    async fn page(
        &mut self,
        sql: &Sql,
        seq: i64,
        leaf: u32,
        place: &str,
    ) -> Result<Vec<Candidate>> {
        let column = self.window.captured.shape.seq.as_ref();
        let column = column.map_or_else(String::new, |seq| quoted_identifier(&seq.column));
        let (state, is_wanted) = self.recorded_sql();
        let statement = format!(
            "with w as materialized ( \
                 select e.{column}::bigint as seq, e.tableoid as leaf, e.ctid as place, \
                     case when {condition} then {id} end as id \
                 from {table} e \
                 where e.{column} >= '{seq}'::bigint and (e.{column}, e.tableoid, e.ctid) \
                     > ('{seq}'::bigint, '{leaf}'::oid, '{place}'::tid) \
                 order by e.{column}, e.tableoid, e.ctid limit {PAGE_ROWS}) \
             (select seq, leaf, place::text, id, {state}, 0::bigint from w \
              where id is not null and {is_wanted} order by w.seq, w.leaf, w.place) \
             union all \
             (select seq, leaf, place::text, null, null, (select count(*) from w) from w \
              order by w.seq desc, w.leaf desc, w.place desc limit 1)",
            condition = self.window.condition(),
            id = self.event_id,
            table = self.table,
        );
        let rows = sql.query_typed(&statement, &[]);
        let rows = rows.await.map_err(altered_since)?;
        let mut found = Vec::with_capacity(rows.len());
        for row in rows {
            let (seq, leaf, place): (i64, u32, String) = (row.get(0), row.get(1), row.get(2));
            let id: Option<Uuid> = row.get(3);
            match id {
                Some(id) => found.push(Candidate {
                    leaf,
                    place,
                    seq: Some(seq),
                    id,
                    record: recorded(row.get(4)),
                }),
                None => {
                    let walked: i64 = row.get(5);
                    if walked >= PAGE_ROWS as i64 {
                        self.walk = Walk::Numbered(seq, leaf, place);
                    }
                }
            }
        }
        Ok(found)
    }

    /// Reads the first [`MAX_COLLECTED`] rows without `seq` after the key `after`, in their order.
    async fn collect(
        &self,
        sql: &Sql,
        after: Option<UnnumberedKey>,
    ) -> Result<BTreeMap<UnnumberedKey, Candidate>> {
        let mut found = BTreeMap::new();
        for range in block_ranges(self.window.captured.shape.blocks) {
            let statement = self.range_sql(&range, after);
            let rows = sql.query_typed(&statement, &[]);
            for row in rows.await.map_err(altered_since)? {
                let place: String = row.get(1);
                let (block, line) = block_and_line(&place);
                let xid: String = row.get(2);
                let key = (
                    row.get(3),
                    xid.parse().unwrap_or_default(),
                    row.get(0),
                    block,
                    line,
                );
                if after.is_some_and(|after| key <= after) {
                    continue;
                }
                let candidate = Candidate {
                    leaf: row.get(0),
                    place,
                    seq: None,
                    id: row.get(4),
                    record: recorded(row.get(5)),
                };
                found.insert(key, candidate);
                if found.len() > MAX_COLLECTED {
                    found.pop_last();
                }
            }
        }
        Ok(found)
    }

    fn range_sql(&self, range: &str, after: Option<UnnumberedKey>) -> String {
        let Captured { record, shape } = self.window.captured;
        let xid = shape.inserted_xid_sql(&record.added_xids);
        let by = match (&shape.seq, shape.numbered()) {
            // This statement reads only rows without a `seq`, and orders them by their transaction alone.
            (Some(_), Some(_)) => None,
            (Some(seq), None) => Some(&seq.column),
            (None, _) => shape.version.as_ref(),
        };
        let version = match by {
            Some(column) => {
                let column = quoted_identifier(column);
                format!("coalesce(e.{column}::bigint, '{}'::bigint)", i64::MIN)
            }
            None => "'0'::bigint".to_owned(),
        };
        let unnumbered = shape.numbered().map_or_else(String::new, |seq| {
            format!("and e.{} is null", quoted_identifier(&seq.column))
        });
        // Skip the rows that earlier passes have returned.
        let after = after.map_or_else(String::new, |(by, by_xid, ..)| {
            format!("and ({version}, {xid}) >= ('{by}'::bigint, '{by_xid}'::xid8)")
        });
        let (state, is_wanted) = self.recorded_sql();
        format!(
            "with w as materialized ( \
                 select e.tableoid as leaf, e.ctid as place, {xid} as xid, {version} as version, \
                     {id} as id \
                 from {table} e \
                 where {range} {unnumbered} and {condition} {after}) \
             select leaf, place::text, xid::text, version, id, {state} from w \
             where id is not null and {is_wanted}",
            id = self.event_id,
            table = self.table,
            condition = self.window.condition(),
        )
    }
}

/// Returns SQL conditions that divide the rows of `e`, a table of this many blocks, into ranges of a bounded
/// number of blocks.
pub(crate) fn block_ranges(blocks: u32) -> impl Iterator<Item = String> {
    let starts = (0..=blocks).step_by(RANGE_BLOCKS as usize);
    starts.map(move |from| {
        let begin = format!("e.ctid >= '({from},0)'");
        // The last range is open-ended, because the table grows.
        match from.checked_add(RANGE_BLOCKS).filter(|to| *to <= blocks) {
            Some(to) => format!("{begin} and e.ctid < '({to},0)'"),
            None => begin,
        }
    })
}

fn recorded(state: Option<&str>) -> DispatchState {
    match state {
        None => DispatchState::Nothing,
        Some("published") => DispatchState::Published,
        Some(_) => DispatchState::SetAside,
    }
}

fn block_and_line(place: &str) -> (u32, u32) {
    let numbers = place.trim_matches(['(', ')']).split_once(',');
    let numbers = numbers.and_then(|(block, line)| Some((block.parse().ok()?, line.parse().ok()?)));
    numbers.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_a_block_and_a_line() {
        assert_eq!(block_and_line("(4294967295,17)"), (u32::MAX, 17));
    }

    #[test]
    fn ranges_of_blocks_cover_a_table_of_any_size() {
        let ranges = |blocks| block_ranges(blocks).collect::<Vec<_>>();
        assert_eq!(ranges(2_047), ["e.ctid >= '(0,0)'"]);
        assert_eq!(
            ranges(2_048),
            [
                "e.ctid >= '(0,0)' and e.ctid < '(2048,0)'",
                "e.ctid >= '(2048,0)'"
            ]
        );
        let last = block_ranges(u32::MAX).last();
        assert_eq!(last.unwrap(), "e.ctid >= '(4294965248,0)'");
    }
}
