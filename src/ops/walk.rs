//! Walks all rows of a captured table in pages, compares each row with outbox.dispatch, and gives the
//! row a verdict. `audit` counts the verdicts; `prune` also deletes the rows with the verdict [`GO`].
//!
//! Each page is one short statement. The statement reads a bounded number of rows, and leaves no lock
//! and no snapshot behind. Rows with a `seq` are read along its index. Rows without a `seq` are read by
//! ranges of blocks, as in `capture::scan`.

use slot_manager::quoted_identifier;
use tokio_postgres::error::Error as PgError;

use crate::capture::ScanWindow;
use crate::capture::claim::Captured;
use crate::capture::table::TableReader;
use crate::error::Result;
use crate::postgres::Sql;
use crate::store::dispatch::pruning::GO;
use crate::store::dispatch::{RECORD_OF_ROW, check_readable};

/// Maximum number of event names that one page returns for each verdict.
pub(crate) const NAMED: usize = 10;

/// Maximum length of an event name, in characters.
const NAME_CHARS: usize = 200;

/// Assumed number of rows in a block, from which the number of blocks in a page is computed.
const ROWS_IN_A_BLOCK: u32 = 50;

/// Makes the cost of a page proportional to its rows, even if PostgreSQL's statistics are wrong. With these options
/// PostgreSQL finds the rows along an index, looks up the record of each row, and finds the rows to delete with a hash
/// join.
///
/// With `enable_sort = off`, it does not sort the whole table. With `enable_incremental_sort = on`, it reads the rows
/// by `seq`, and sorts only rows that have the same `seq`.
const PLAN: &str = "\
    SET enable_seqscan = off; SET enable_mergejoin = off; SET enable_nestloop = off; \
    SET enable_hashjoin = on; SET enable_sort = off; SET enable_incremental_sort = on; \
    SET jit = off";

/// What a walk does in addition to counting the rows of each verdict.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WalkAction {
    /// Also returns the names of some events.
    Read,
    /// Only counts.
    Count,
    /// Also deletes the rows with the verdict [`GO`].
    Delete,
}

/// The rows of one page that have the same verdict.
#[derive(Debug)]
pub(super) struct VerdictGroup {
    pub(super) verdict: String,
    pub(super) rows: u64,
    /// Names of the events of the group's first rows, at most [`NAMED`]. Only [`WalkAction::Read`] returns
    /// names.
    pub(super) names: Vec<String>,
    /// The time of the oldest event of the group (RFC 3339): its `occurred_at`, or the time of its commit if the row
    /// has no such time.
    pub(super) oldest: Option<String>,
    /// Events that Pub/Sub may have stored with more than one request. Replayed events do not count.
    pub(super) sent_again: NamedCount,
    /// Events with more than one `published` record.
    pub(super) recorded_twice: NamedCount,
}

/// A number of events, and the names of the first of them, at most [`NAMED`].
#[derive(Debug, Default)]
pub(super) struct NamedCount {
    pub(super) events: u64,
    pub(super) names: Vec<String>,
}

#[derive(Debug, Default)]
pub(super) struct WalkedPage {
    pub(super) groups: Vec<VerdictGroup>,
    pub(super) rows: u64,
    pub(super) deleted: u64,
}

impl WalkedPage {
    pub(super) fn count(&self, verdict: &str) -> u64 {
        let groups = self.groups.iter().filter(|group| group.verdict == verdict);
        groups.map(|group| group.rows).sum()
    }
}

/// The position of a walk in its table.
#[derive(Debug, Clone, PartialEq, Eq)]
enum WalkPosition {
    /// Among the rows with `seq`, after the row with this `seq`, table OID and ctid.
    Numbered(i64, u32, String),
    /// Among the rows without an indexed `seq`: the block that the next page begins with.
    Blocks(u32),
    Done,
}

#[derive(Debug)]
pub(super) struct TableWalk<'a> {
    captured: &'a Captured,
    reader: &'a TableReader,
    /// Number of rows in a page.
    rows: u32,
    verdict: String,
    /// An SQL condition on the row `e`, followed by `and`; empty if the walk covers all rows.
    only: String,
    action: WalkAction,
    position: WalkPosition,
}

/// Checks that our own tables and functions exist, and sets the planner options for walks. Without the check, the
/// error for a missing table of ours would say that a captured table was altered.
pub(super) async fn prepare(sql: &Sql) -> Result<()> {
    check_readable(sql).await?;
    Ok(sql.batch_execute(PLAN).await?)
}

impl<'a> TableWalk<'a> {
    /// Creates a walk over all rows. `verdict` is an SQL expression over the columns of a row with
    /// its record; see [`row_sql`](Self::row_sql).
    pub(super) fn new(
        captured: &'a Captured,
        reader: &'a TableReader,
        rows: u32,
        verdict: String,
        action: WalkAction,
    ) -> Self {
        let position = match captured.shape.numbered() {
            Some(_) => WalkPosition::Numbered(i64::MIN, 0, "(0,0)".to_owned()),
            None => WalkPosition::Blocks(0),
        };
        Self {
            captured,
            reader,
            rows,
            verdict,
            only: String::new(),
            action,
            position,
        }
    }

    /// Restricts the walk to the rows `e` that meet this SQL condition. Only for walks that do not delete.
    pub(super) fn restrict_to(&mut self, condition: &str) {
        self.only = format!("{condition} and ");
    }

    /// Begins the walk at this `seq`, without the rows that have a lower `seq`.
    pub(super) fn skip_to_seq(&mut self, seq: i64) {
        self.position = WalkPosition::Numbered(seq, 0, "(0,0)".to_owned());
    }

    /// Whether the walk now reads ranges of blocks. It reads the whole table in this way if the table has no
    /// `seq` column with an index, and otherwise only the rows whose `seq` is null.
    pub(super) fn is_by_blocks(&self) -> bool {
        matches!(self.position, WalkPosition::Blocks(_))
    }

    /// The `seq` of the last row of the pages so far. `None` before the first page, and when the rows with a `seq`
    /// have ended.
    pub(super) fn last_seq(&self) -> Option<i64> {
        match self.position {
            WalkPosition::Numbered(seq, ..) if seq > i64::MIN => Some(seq),
            _ => None,
        }
    }

    /// Ends the part with the rows that have a `seq`. Continues with the rows without a `seq`, if
    /// there may be any.
    pub(super) fn end_numbered(&mut self) {
        let nullable = self
            .captured
            .shape
            .numbered()
            .is_some_and(|s| s.is_nullable);
        self.position = match (&self.position, nullable) {
            (WalkPosition::Numbered(..), true) => WalkPosition::Blocks(0),
            _ => WalkPosition::Done,
        };
    }

    /// Returns the next page, which may have no rows; `None` at the end.
    ///
    /// # Errors
    /// Database errors. The next call then reads the same page again.
    pub(super) async fn next(&mut self, sql: &Sql) -> Result<Option<WalkedPage>, PgError> {
        let (statement, next) = match &self.position {
            WalkPosition::Done => {
                sql.query_typed(&self.reader.check_sql(), &[]).await?;
                return Ok(None);
            }
            WalkPosition::Numbered(seq, leaf, ctid) => (self.numbered_sql(*seq, *leaf, ctid), None),
            WalkPosition::Blocks(from) => {
                let to = from.saturating_add((self.rows / ROWS_IN_A_BLOCK).max(1));
                // The last range is open-ended, because the table may have grown since its size was
                // read.
                let to = Some(to).filter(|to| *to <= self.captured.shape.blocks);
                let next = to.map_or(WalkPosition::Done, WalkPosition::Blocks);
                (self.blocks_sql(*from, to), Some(next))
            }
        };
        let rows = sql.query_typed(&statement, &[]).await?;
        let mut page = WalkedPage::default();
        let mut last = None;
        for row in &rows {
            let count = |n| u64::try_from(row.get::<_, i64>(n)).unwrap_or_default();
            page.rows = count(7);
            page.deleted = count(8);
            last = Some((row.get::<_, Option<i64>>(4), row.get(5), row.get(6)));
            let named = |n| NamedCount {
                events: count(n),
                names: row.get(n + 1),
            };
            page.groups.push(VerdictGroup {
                verdict: row.get(0),
                rows: count(1),
                names: row.get(2),
                oldest: row.get(3),
                sent_again: named(9),
                recorded_twice: named(11),
            });
        }
        match (next, last) {
            (Some(next), _) => self.position = next,
            (None, Some((Some(seq), leaf, ctid))) if page.rows >= u64::from(self.rows) => {
                self.position = WalkPosition::Numbered(seq, leaf, ctid);
            }
            (None, _) => self.end_numbered(),
        }
        Ok(Some(page))
    }

    fn seq_sql(&self) -> Option<String> {
        let seq = self.captured.shape.numbered()?;
        Some(format!("e.{}", quoted_identifier(&seq.column)))
    }

    fn numbered_sql(&self, seq: i64, leaf: u32, ctid: &str) -> String {
        let column = self.seq_sql().unwrap_or_default();
        let which = format!(
            "{only}{column} >= '{seq}'::bigint and ({column}, e.tableoid, e.ctid) \
                 > ('{seq}'::bigint, '{leaf}'::oid, '{ctid}'::tid) \
             order by {column}, e.tableoid, e.ctid limit {}",
            self.rows,
            only = self.only,
        );
        let again =
            format!("{column} >= '{seq}'::bigint and {column} <= (select max(seq) from judged)");
        self.page_sql(&format!("{column}::bigint"), &which, &again)
    }

    fn blocks_sql(&self, from: u32, to: Option<u32>) -> String {
        let end = to.map_or_else(String::new, |to| format!("and e.ctid < '({to},0)'"));
        let unnumbered = self
            .seq_sql()
            .map_or_else(String::new, |seq| format!("and {seq} is null"));
        let range = format!("e.ctid >= '({from},0)' {end} {unnumbered}");
        self.page_sql("null::bigint", &format!("{}{range}", self.only), &range)
    }

    /// Returns the statement of one page. `which` selects the rows to compare. `again` is a wider condition
    /// with which the delete finds these rows again without reading the whole table.
    fn page_sql(&self, seq: &str, which: &str, again: &str) -> String {
        let delete = match self.action {
            WalkAction::Read | WalkAction::Count => "select 1 where false".to_owned(),
            WalkAction::Delete => format!(
                "delete from {table} e using judged j \
                 where j.verdict = '{GO}' and {again} and e.tableoid = j.leaf and e.ctid = j.place \
                 returning 1",
                table = self.reader.table_sql(),
            ),
        };
        format!(
            "with looked as materialized ({row} and {which}), \
             recorded as materialized (select w.*, d.* from looked w cross join lateral ({RECORD_OF_ROW}) d), \
             judged as materialized (select r.*, {verdict} as verdict from recorded r), \
             gone as ({delete}) \
             select j.verdict, count(*), \
                 {names}, \
                 to_char(min(coalesce(j.at, j.committed_at)) at time zone 'UTC', \
                     'YYYY-MM-DD\"T\"HH24:MI:SS\"Z\"'), \
                 last.seq, last.leaf, last.place, \
                 (select count(*) from looked), (select count(*) from gone), \
                 count(*) filter (where j.is_sent_again), {sent_again}, \
                 count(*) filter (where j.is_recorded_twice), {recorded_twice} \
             from judged j cross join \
                 (select seq, leaf, place::text from looked \
                  order by looked.seq desc, looked.leaf desc, looked.place desc limit 1) last \
             group by j.verdict, last.seq, last.leaf, last.place order by j.verdict",
            row = self.row_sql(seq),
            names = self.names_sql("true"),
            sent_again = self.names_sql("j.is_sent_again"),
            recorded_twice = self.names_sql("j.is_recorded_twice"),
            verdict = self.verdict,
        )
    }

    /// Returns an SQL expression for the names of the first [`NAMED`] rows of the page that meet the SQL condition
    /// `which`. The expression and the condition refer to a row and its verdict as `j`.
    fn names_sql(&self, which: &str) -> String {
        let name = self.name_sql();
        format!(
            "coalesce((array_agg({name} order by j.seq) filter (where {name} is not null and {which}))\
                 [1:{NAMED}], '{{}}')"
        )
    }

    /// Returns an SQL expression for the name under which the report shows the row `j`. The expression is
    /// null unless the action is `Read`. If a name is not plain ASCII, the server may be unable to send the
    /// name, so the report shows the event id instead.
    fn name_sql(&self) -> String {
        match self.action {
            WalkAction::Count | WalkAction::Delete => "null::text".to_owned(),
            WalkAction::Read => format!(
                "case when octet_length(j.name) = length(j.name) and j.name ~ '^[ -~]*$' \
                 then left(j.name, {NAME_CHARS}) else j.id::text end"
            ),
        }
    }

    /// Returns the query for the columns that a verdict may use, in addition to the columns of
    /// [`RECORD_OF_ROW`].
    fn row_sql(&self, seq: &str) -> String {
        format!(
            "select {seq} as seq, e.tableoid as leaf, e.ctid as place, {id} as id, {name} as name, \
                 {xid} as xid, ({ours}) as is_ours, ({new}) as is_uncompared, {at} as at \
             from {rows}",
            id = self.reader.event_id_sql(),
            name = self.reader.name_sql(),
            xid = self.captured.inserted_xid_sql(),
            ours = ours_sql(self.captured),
            new = uncompared_sql(self.captured),
            at = self
                .reader
                .happened_at_sql()
                .unwrap_or_else(|| "null::timestamptz".to_owned()),
            rows = self.reader.rows_sql(),
        )
    }
}

/// Returns the SQL condition that the relay must publish the row `e`. The condition excludes rows that were
/// inserted before the capture of the table began.
pub(super) fn ours_sql(captured: &Captured) -> String {
    let ours = ScanWindow {
        from_xid: 0,
        ..ScanWindow::whole(captured)
    };
    ours.condition()
}

/// Returns the SQL condition that the row `e` is in a table or partition that the relay has not compared with
/// its records yet. The floor does not cover the rows of this partition: an old row, which came with the
/// partition when it was attached, may still be unresolved.
pub(super) fn uncompared_sql(captured: &Captured) -> String {
    let Captured { record, shape } = captured;
    match &record.partitions {
        Some(known) if record.oid == shape.oid => {
            format!("e.tableoid <> all ('{{{known}}}'::oid[])")
        }
        _ => "true".to_owned(),
    }
}
