//! Walks a captured table. Returns the rows that may have to be published, or the rows whose events are set
//! aside. The rows of each key are returned in the order of their inserts.
//!
//! Every statement reads a bounded number of rows, and holds no lock and no snapshot afterwards. The walk has
//! two parts:
//!
//! 1. Rows without a `seq`: the table has no such column, or the rows are older than the column. The walk
//!    reads ranges of blocks, collects up to [`MAX_COLLECTED`] rows at a time, and sorts them in memory. All rows
//!    of a table without an index on `seq` are read in this way.
//! 2. Rows with a `seq`: the walk reads page by page along the index on `seq`.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use slot_manager::quoted_identifier;
use uuid::Uuid;

use super::candidate::{Candidate, DispatchState, ids_sql};
use super::captured::Captured;
use super::table::{TableReader, altered_since};
use super::window::ScanWindow;
use crate::error::Result;
use crate::postgres::Sql;
use crate::store::dispatch::{check_readable, has_no_row_sql, state_sql};

/// Maximum number of rows that one statement walks over along the index on `seq`.
const PAGE_ROWS: usize = 5_000;
/// Maximum number of blocks that one statement reads to find rows without a `seq`: 16 MB.
const RANGE_BLOCKS: u32 = 2_048;
/// Maximum number of rows without `seq` that one pass collects and sorts. A row takes about 100 bytes, so
/// a pass needs at most about 10 MB. The next pass continues after these rows.
const MAX_COLLECTED: usize = 100_000;

/// Planner settings that keep the cost of a statement proportional to the rows it reads, even if the planner's
/// statistics are wrong:
///
/// - PostgreSQL reads a page along the index on `seq`. It sorts only rows with the same `seq`
///   (`enable_incremental_sort`), and at the end the rows of the page. With `enable_sort`, PostgreSQL might first
///   read and sort all later rows of the table.
/// - PostgreSQL looks up the records of the rows one by one. With a hash join or a merge join, it might read all of
///   `outbox.dispatch`.
const PLAN: &str = "\
    SET enable_seqscan = off; SET enable_hashjoin = off; SET enable_mergejoin = off; \
    SET enable_sort = off; SET enable_incremental_sort = on; SET jit = off";

/// The sort key of a row that the walk reads in ranges of blocks. Its parts are, in this order:
///
/// 1. the row's `seq` if the table has a column `seq` without an index, otherwise the row's version;
/// 2. the transaction that inserted the row;
/// 3. the OID of the table or partition that holds the row;
/// 4. the block of the row, from its `ctid`;
/// 5. the line of the row in the block, from its `ctid`.
type UnnumberedKey = (i64, u64, u32, u32, u32);

/// The progress of a walk.
#[derive(Debug)]
enum Walk {
    /// The next step returns rows without a `seq`, beginning after this key. `None`: beginning at the first
    /// row.
    Unnumbered(Option<UnnumberedKey>),
    /// The next step returns rows that have a `seq`, beginning after this row (`seq`, partition, `ctid`).
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
    /// SQL array of the ids of events that are returned as set aside.
    set_aside: Option<String>,
    /// See [`TableReader::rows_sql`].
    rows: String,
    /// See [`TableReader::check_sql`].
    check: String,
    event_id: String,
    walk: Walk,
}

/// Sets the planner settings of an SQL session that walks over tables. First checks that our own schema is
/// complete. Without this check, a walk would report a missing object of our schema as an altered captured table.
///
/// # Errors
/// `schema-missing`, `privilege-missing`; connection errors.
pub(crate) async fn prepare(sql: &Sql) -> Result<()> {
    check_readable(sql).await?;
    Ok(sql.batch_execute(PLAN).await?)
}

impl<'a> Scan<'a> {
    /// A walk that returns the rows that may have to be published. It also returns the rows of the events in
    /// `set_aside`, and marks them as set aside.
    pub(crate) fn new(window: ScanWindow<'a>, reader: &TableReader, set_aside: &[Uuid]) -> Self {
        Self {
            set_aside: (!set_aside.is_empty()).then(|| ids_sql(set_aside.iter())),
            ..Self::of(window, reader, Wanted::Unresolved)
        }
    }

    /// A walk that returns only the rows of the window whose event is set aside.
    pub(crate) fn set_aside(window: ScanWindow<'a>, reader: &TableReader) -> Self {
        Self::of(window, reader, Wanted::SetAside)
    }

    fn of(window: ScanWindow<'a>, reader: &TableReader, wanted: Wanted) -> Self {
        let has_seq = window.captured.shape.numbered().is_some();
        let mut scan = Self {
            window,
            wanted,
            set_aside: None,
            rows: reader.rows_sql().to_owned(),
            check: reader.check_sql(),
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
    /// Database errors; `slot-busy` when the table was altered in the meantime, or when another table has its name.
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
            Walk::Numbered(seq, leaf, ctid) => self.page(sql, seq, leaf, &ctid).await.map(Some),
            Walk::Done => {
                let check = sql.query_typed(&self.check, &[]);
                check.await.map_err(altered_since)?;
                Ok(None)
            }
        }
    }

    /// Returns two SQL expressions about a row of `w`: the state of its event, and whether the scan
    /// returns the row.
    fn recorded_sql(&self) -> (String, String) {
        let state = state_sql("w.id");
        match self.wanted {
            Wanted::SetAside => (state.clone(), format!("{state} = 'aside'")),
            Wanted::Unresolved if self.window.records.may_lack_records() => {
                let state = format!("case when w.is_recovered then 'aside' else {state} end");
                (state, "true".to_owned())
            }
            Wanted::Unresolved => match &self.set_aside {
                None => ("null::text".to_owned(), has_no_row_sql("w.id")),
                Some(ids) => (
                    format!("case when w.id = any ({ids}) then 'aside' end"),
                    // Not `has_no_row_sql`: for an `exists` in an `or`, PostgreSQL may read all of outbox.dispatch.
                    format!("(w.id = any ({ids}) or {state} is null)"),
                ),
            },
        }
    }

    /// Reads one page of rows along the index on `seq`, and returns the wanted rows of the page.
    async fn page(&mut self, sql: &Sql, seq: i64, leaf: u32, ctid: &str) -> Result<Vec<Candidate>> {
        let column = self.window.captured.shape.seq.as_ref();
        let column = column.map_or_else(String::new, |seq| quoted_identifier(&seq.column));
        let (state, is_wanted) = self.recorded_sql();
        let statement = format!(
            "with w as materialized ( \
                 select e.{column}::bigint as seq, e.tableoid as leaf, e.ctid as row_ctid, \
                     {recovered} as is_recovered, case when {condition} then {id} end as id \
                 from {rows} and e.{column} >= '{seq}'::bigint and (e.{column}, e.tableoid, e.ctid) \
                     > ('{seq}'::bigint, '{leaf}'::oid, '{ctid}'::tid) \
                 order by e.{column}, e.tableoid, e.ctid limit {PAGE_ROWS}) \
             (select seq, leaf, row_ctid::text, id, {state}, 0::bigint from w \
              where id is not null and {is_wanted} order by w.seq, w.leaf, w.row_ctid) \
             union all \
             (select seq, leaf, row_ctid::text, null, null, (select count(*) from w) from w \
              order by w.seq desc, w.leaf desc, w.row_ctid desc limit 1)",
            recovered = self.window.recovered().as_deref().unwrap_or("false"),
            condition = self.window.condition(),
            id = self.event_id,
            rows = self.rows,
        );
        let rows = sql.query_typed(&statement, &[]);
        let rows = rows.await.map_err(altered_since)?;
        let mut found = Vec::with_capacity(rows.len());
        for row in rows {
            let (seq, leaf, ctid): (i64, u32, String) = (row.get(0), row.get(1), row.get(2));
            let id: Option<Uuid> = row.get(3);
            match id {
                Some(id) => found.push(Candidate {
                    leaf,
                    ctid,
                    seq: Some(seq),
                    id,
                    record: recorded(row.get(4)),
                }),
                None => {
                    let walked: i64 = row.get(5);
                    if walked >= PAGE_ROWS as i64 {
                        self.walk = Walk::Numbered(seq, leaf, ctid);
                    }
                }
            }
        }
        Ok(found)
    }

    /// Scans the table for rows without `seq`. Returns the first [`MAX_COLLECTED`] of them after the key `after`,
    /// sorted by [`UnnumberedKey`].
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
                let ctid: String = row.get(1);
                let (block, line) = block_and_line(&ctid);
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
                    ctid,
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
        // In rows that are older than the column `inserted_xid`, its value is the transaction of the `ALTER TABLE`
        // that added the column. This value does not give the order of the rows, so sort by their `xmin` instead.
        let added = [&*record.added_xids, &*shape.missing_xids].concat();
        let xid = shape.inserted_xid_sql(&added, record.is_adopted);
        let by = match (&shape.seq, shape.numbered()) {
            // `seq` has no index, so the scan reads all rows in ranges of blocks, and then sorts them by `seq`.
            (Some(seq), None) => Some(&seq.column),
            // The statement reads only rows without a `seq`, so the scan sorts them by their version.
            (Some(_), Some(_)) | (None, _) => shape.version.as_ref(),
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
        // Skip most of the rows that earlier passes have returned. The caller drops the others, which have
        // the same version and transaction as the last returned row.
        let after = after.map_or_else(String::new, |(by, by_xid, ..)| {
            format!("and ({version}, {xid}) >= ('{by}'::bigint, '{by_xid}'::xid8)")
        });
        let recovered = self.window.recovered();
        let is_left_out = self.window.without_recovered && self.wanted == Wanted::Unresolved;
        let others = recovered.as_deref().filter(|_| is_left_out);
        let others = others.map_or_else(String::new, |recovered| format!("and not ({recovered})"));
        let (state, is_wanted) = self.recorded_sql();
        format!(
            "with w as materialized ( \
                 select e.tableoid as leaf, e.ctid as row_ctid, {xid} as xid, {version} as version, \
                     {recovered} as is_recovered, {id} as id \
                 from {rows} and {range} {unnumbered} and {condition} {others} {after}) \
             select leaf, row_ctid::text, xid::text, version, id, {state} from w \
             where id is not null and {is_wanted}",
            id = self.event_id,
            rows = self.rows,
            recovered = recovered.as_deref().unwrap_or("false"),
            condition = self.window.condition(),
        )
    }
}

/// Returns SQL conditions that divide the rows of `e`, a table of `blocks` blocks, into ranges of at most
/// [`RANGE_BLOCKS`] blocks.
pub(crate) fn block_ranges(blocks: u32) -> impl Iterator<Item = String> {
    let starts = (0..=blocks).step_by(RANGE_BLOCKS as usize);
    starts.map(move |from| {
        let begin = format!("e.ctid >= '({from},0)'");
        // The last range is open-ended, because the table may have grown.
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

fn block_and_line(ctid: &str) -> (u32, u32) {
    let numbers = ctid.trim_matches(['(', ')']).split_once(',');
    let numbers = numbers.and_then(|(block, line)| Some((block.parse().ok()?, line.parse().ok()?)));
    numbers.unwrap_or_default()
}
