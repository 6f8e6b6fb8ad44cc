//! One comparison of a table, or of its end, with outbox.dispatch.
//!
//! A row that has no record may be on its way. So the comparison begins when the relay is up to
//! date, and a row counts as missing when it still has no record after everything up to the end
//! of the WAL of that moment is confirmed: then its transaction has passed, and it was not in it.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use decoder::Lsn;
use slot_manager::SlotName;
use tokio_postgres::SimpleQueryMessage;
use tokio_postgres::types::PgLsn;

use super::marks::Range;
use crate::error::{Code, Error, Result};
use crate::postgres::Sql;
use crate::relay::from_table::{FromTable, SessionEnded, TableSender, place_before};
use crate::table::TableReader;
use crate::watermark::CommitLsn;

/// Rows without a record that are looked at together.
const PAGE: usize = 10_000;

/// A relay that does not come up to date in this time is behind; the comparison waits for a
/// better moment, since its snapshot keeps vacuum from its work.
const PATIENCE: Duration = Duration::from_secs(30);
const LOOK_INTERVAL: Duration = Duration::from_millis(200);

/// Rows that are read at once, when they are small.
const MAX_ROWS: usize = 128;
/// Bytes of rows read at once, from which on fewer are read the next time.
const MANY_BYTES: usize = 4 << 20;

/// Headers of a WAL page and of a segment's first page, bytes: right behind one the end of the WAL
/// seems further on than the end of the last record.
const PAGE_HEADERS: [u64; 2] = [24, 40];
const WAL_PAGE: u64 = 8_192;

const NOT_RECORDED: &str = "\
    select w.n::int from unnest($1::uuid[]) with ordinality as w (id, n) \
    where not exists (select from outbox.dispatch d where d.event_id = w.id) order by w.n";

const DISCARD: &str = "\
    insert into outbox.dispatch \
        (commit_lsn, ordinal, event_id, source_id, state, attempts, committed_at, error) \
    select $1, $2 + w.n::int, w.id, w.source_id, 'discarded', 0, now(), \
           'committed before the first start of the relay' \
    from unnest($3::uuid[], $4::text[]) with ordinality as w (id, source_id, n)";

/// What becomes of rows that are missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Missing {
    /// They are delivered.
    Publish,
    /// They are recorded as discarded: they are from before the first start.
    Discard,
}

/// How a comparison ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    /// Every row has a record.
    Complete,
    /// Some had none, and are being delivered.
    Found,
    /// The relay is behind: nothing can be told.
    Behind,
}

impl Outcome {
    /// The outcome of two comparisons together.
    pub(super) fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::Behind, _) | (_, Self::Behind) => Self::Behind,
            (Self::Found, _) | (_, Self::Found) => Self::Found,
            (Self::Complete, Self::Complete) => Self::Complete,
        }
    }
}

/// A row without a record.
#[derive(Debug)]
struct Row {
    table: u32,
    place: String,
    id: uuid::Uuid,
    source_id: Option<String>,
}

pub(super) struct Pass<'a> {
    pub(super) sql: &'a Sql,
    pub(super) slot: &'a SlotName,
    pub(super) reader: TableReader,
    pub(super) missing: Missing,
    pub(super) events: &'a mut TableSender,
    pub(super) sent: &'a mut HashSet<uuid::Uuid>,
}

impl Pass<'_> {
    /// Compares `range` of a leaf, or the whole table; tells how many missing rows were found.
    pub(super) async fn run(mut self, range: Option<Range>) -> Result<(Outcome, u64)> {
        if !self.is_up_to_date(self.wal_end().await?).await? {
            return Ok((Outcome::Behind, 0));
        }
        let cursor = self.cursor(range.as_ref());
        self.sql.batch_execute(&cursor).await?;
        let ended = self.pages().await;
        let end = if ended.is_ok() { "commit" } else { "rollback" };
        self.sql.batch_execute(end).await?;
        ended
    }

    fn cursor(&self, range: Option<&Range>) -> String {
        let (id, source_id) = (self.reader.event_id_sql(), self.reader.source_id_sql());
        let (table, blocks) = match range {
            Some(Range { leaf, from, to }) => (
                format!("only {leaf}"),
                format!("e.ctid >= '({from},0)' and e.ctid < '({to},0)' and"),
            ),
            None => (self.reader.table_sql().to_owned(), String::new()),
        };
        // Rows of before the first start may be many, and are not sent: their order is nothing.
        let order = match self.missing {
            Missing::Publish => format!("order by {}", self.reader.order_sql()),
            Missing::Discard => String::new(),
        };
        format!(
            "begin; declare audit no scroll cursor for \
             select e.tableoid, e.ctid::text, {id}, {source_id} from {table} e \
             where {blocks} {id} is not null \
               and not exists (select from outbox.dispatch d where d.event_id = {id}) {order}"
        )
    }

    async fn pages(&mut self) -> Result<(Outcome, u64)> {
        let mut page = self.page().await?;
        if page.is_empty() {
            return Ok((Outcome::Complete, 0));
        }
        let end = self.wal_end().await?;
        if !self.is_up_to_date(end).await? {
            return Ok((Outcome::Behind, 0));
        }
        let commit = place_before(end);
        let mut ordinal = self.last_ordinal(commit).await?;
        let (mut found, mut waiting) = (0, HashSet::new());
        while !page.is_empty() {
            let missing = self.still_missing(page).await?;
            let (again, new): (Vec<Row>, Vec<Row>) = missing
                .into_iter()
                .partition(|row| self.sent.contains(&row.id));
            found += new.len() as u64;
            waiting.extend(again.iter().chain(&new).map(|row| row.id));
            match self.missing {
                Missing::Publish => self.publish(&new, commit, &mut ordinal).await?,
                Missing::Discard => self.discard(&new, commit, &mut ordinal).await?,
            }
            page = self.page().await?;
        }
        let is_complete = waiting.is_empty() || self.missing == Missing::Discard;
        *self.sent = match self.missing {
            Missing::Publish => waiting,
            Missing::Discard => HashSet::new(),
        };
        let outcome = match is_complete {
            true => Outcome::Complete,
            false => Outcome::Found,
        };
        Ok((outcome, found))
    }

    async fn page(&self) -> Result<Vec<Row>> {
        let rows = self
            .sql
            .query(&format!("fetch {PAGE} from audit"), &[])
            .await?;
        let row = |row: &tokio_postgres::Row| Row {
            table: row.get(0),
            place: row.get(1),
            id: row.get(2),
            source_id: row.get(3),
        };
        Ok(rows.iter().map(row).collect())
    }

    /// Where the WAL ends; each transaction that is visible lies before it.
    async fn wal_end(&self) -> Result<Lsn> {
        let row = self
            .sql
            .query_one("select pg_catalog.pg_current_wal_insert_lsn()", &[])
            .await?;
        let end = u64::from(row.get::<_, PgLsn>(0));
        let header = PAGE_HEADERS.into_iter().find(|h| end % WAL_PAGE == *h);
        Ok(Lsn::new(end - header.unwrap_or(0)))
    }

    /// Waits until everything up to `end` is confirmed, unless that takes too long.
    async fn is_up_to_date(&self, end: Lsn) -> Result<bool> {
        let began = Instant::now();
        loop {
            let row = self
                .sql
                .query_opt(
                    "select confirmed_flush_lsn >= $2 from pg_catalog.pg_replication_slots \
                     where slot_name = $1",
                    &[&self.slot.as_str(), &PgLsn::from(end.as_u64())],
                )
                .await?;
            match row {
                Some(row) if row.get(0) => return Ok(true),
                Some(_) | None if began.elapsed() >= PATIENCE => return Ok(false),
                Some(_) | None => tokio::time::sleep(LOOK_INTERVAL).await,
            }
        }
    }

    /// Those of a page that have no record now.
    async fn still_missing(&self, page: Vec<Row>) -> Result<Vec<Row>> {
        let ids: Vec<uuid::Uuid> = page.iter().map(|row| row.id).collect();
        let rows = self.sql.query(NOT_RECORDED, &[&ids]).await?;
        let missing: HashSet<i32> = rows.iter().map(|row| row.get(0)).collect();
        let numbered = (1..).zip(page);
        Ok(numbered
            .filter(|(n, _)| missing.contains(n))
            .map(|(_, row)| row)
            .collect())
    }

    async fn last_ordinal(&self, commit: CommitLsn) -> Result<u32> {
        let row = self
            .sql
            .query_one(
                "select coalesce(max(ordinal), 0) from outbox.dispatch where commit_lsn = $1",
                &[&PgLsn::from(commit.lsn().as_u64())],
            )
            .await?;
        Ok(row.get::<_, i32>(0).unsigned_abs())
    }

    /// Reads rows in small portions, since each may be large, and hands them over in order.
    async fn publish(&mut self, rows: &[Row], commit: CommitLsn, ordinal: &mut u32) -> Result<()> {
        let mut rest = rows;
        let mut portion = MAX_ROWS;
        while let Some(first) = rest.first() {
            let of_one_table = rest.iter().take_while(|row| row.table == first.table);
            let count = of_one_table.take(portion).count();
            let (now, later) = rest.split_at(count);
            let mut bytes = 0;
            for message in self.sql.simple_query(&self.read_sql(now)).await? {
                let SimpleQueryMessage::Row(row) = message else {
                    continue;
                };
                *ordinal += 1;
                let row = match self.reader.event(&row, commit, *ordinal) {
                    Ok(event) => {
                        bytes += event.event.message.len();
                        FromTable::Event(event)
                    }
                    Err(error) => FromTable::Unmappable(error),
                };
                self.events
                    .send(row)
                    .await
                    .map_err(|SessionEnded| ended())?;
            }
            portion = match bytes > MANY_BYTES {
                true => (portion / 8).max(1),
                false => (portion * 2).min(MAX_ROWS),
            };
            self.sent.extend(now.iter().map(|row| row.id));
            rest = later;
        }
        let flushed = self.events.flush().await;
        flushed.map_err(|SessionEnded| ended())
    }

    fn read_sql(&self, rows: &[Row]) -> String {
        let places: Vec<String> = rows
            .iter()
            .map(|row| format!("\"{}\"", row.place))
            .collect();
        format!(
            "{} where e.tableoid = {} and e.ctid = any ('{{{}}}'::tid[]) order by {}",
            self.reader.select_sql(),
            rows[0].table,
            places.join(","),
            self.reader.order_sql()
        )
    }

    async fn discard(&self, rows: &[Row], commit: CommitLsn, ordinal: &mut u32) -> Result<()> {
        let ids: Vec<uuid::Uuid> = rows.iter().map(|row| row.id).collect();
        let source_ids: Vec<Option<&str>> =
            rows.iter().map(|row| row.source_id.as_deref()).collect();
        let last = i32::try_from(*ordinal).unwrap_or(i32::MAX);
        self.sql
            .execute(
                DISCARD,
                &[
                    &PgLsn::from(commit.lsn().as_u64()),
                    &last,
                    &ids,
                    &source_ids,
                ],
            )
            .await?;
        *ordinal += u32::try_from(rows.len()).unwrap_or(u32::MAX);
        Ok(())
    }
}

fn ended() -> Error {
    Error::new(Code::PostgresConnectionLost, "the session has ended")
}
