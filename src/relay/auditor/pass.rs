//! One comparison of a table, or of its end, with outbox.dispatch.
//!
//! A row that has no record may be on its way. So the comparison begins when the relay is up to
//! date, and a row counts as missing when it still has no record after everything up to the end
//! of the WAL of that moment is confirmed: then its transaction has passed, and it was not in it.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use decoder::Lsn;
use futures_util::{TryFutureExt, TryStreamExt};
use slot_manager::SlotName;
use tokio_postgres::SimpleQueryMessage;
use tokio_postgres::types::{PgLsn, ToSql};

use super::marks::Range;
use super::statements::{is_confirmed, wal_end};
use crate::dispatch::{Resolved, row_xid};
use crate::error::{Code, Error, Result};
use crate::postgres::PatientSql;
use crate::relay::from_table::{FromTable, SessionEnded, TableSender, last_ordinal, place_before};
use crate::table::{TableReader, altered_since};
use crate::watermark::CommitLsn;

/// Rows without a record that are looked at together.
const PAGE: usize = 10_000;

/// A relay that does not come up to date in this time is behind; the comparison waits for a
/// better moment, since its snapshot keeps vacuum from its work.
const PATIENCE: Duration = Duration::from_secs(30);
const LOOK_INTERVAL: Duration = Duration::from_millis(200);

/// Missing rows that one comparison finds; the next one goes on.
const MAX_FOUND: usize = 100_000;

/// Rows that are asked for at once, when they are small.
const MAX_ROWS: usize = 128;
/// A portion that is read at once is full when its messages have so many bytes; its last one may
/// go beyond.
const PORTION_BYTES: usize = 4 << 20;

const NOT_RECORDED: &str = "\
    select w.n::int from unnest($1::uuid[]) with ordinality as w (id, n) \
    where not exists (select from outbox.dispatch d where d.event_id = w.id) order by w.n";

const DISCARD: &str = "\
    insert into outbox.dispatch \
        (commit_lsn, ordinal, event_id, source_id, state, attempts, committed_at, error) \
    select $1, $2 + w.n::int, w.id, w.source_id, 'discarded', 0, now(), \
           'committed before the first start of the relay' \
    from unnest($3::uuid[], $4::text[]) with ordinality as w (id, source_id, n)";

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

/// What a comparison has found.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) outcome: Outcome,
    /// Rows that are being delivered.
    pub(super) published: u64,
    /// Rows from before the first start.
    pub(super) discarded: u64,
}

impl Found {
    fn nothing(outcome: Outcome) -> Self {
        Self {
            outcome,
            published: 0,
            discarded: 0,
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
    /// Whether it is from before the first start.
    is_old: bool,
}

/// Rows that were read at once.
struct Portion {
    rows: Vec<FromTable>,
    /// How many of those that were asked for are dealt with.
    done: usize,
    /// Whether the others did not fit.
    is_full: bool,
}

pub(super) struct Pass<'a> {
    pub(super) sql: &'a PatientSql,
    pub(super) slot: &'a SlotName,
    pub(super) walsender: i32,
    pub(super) reader: TableReader,
    /// Rows of older transactions are from before the first start, and recorded as discarded.
    pub(super) first_xid: Option<i64>,
    /// What else has an outcome than what has a record.
    pub(super) resolved: Resolved,
    pub(super) events: &'a mut TableSender,
}

impl Pass<'_> {
    /// Compares `range` of a leaf, or the whole table.
    pub(super) async fn run(mut self, range: Option<Range>) -> Result<Found> {
        let end = self.sql.answer(wal_end(self.sql)).await?;
        if !self.is_up_to_date(end).await? {
            return Ok(Found::nothing(Outcome::Behind));
        }
        let cursor = self.cursor(range.as_ref());
        let opening = self.sql.batch_execute(&cursor).map_err(altered_since);
        self.sql.answer(opening).await?;
        // An error ends the SQL session, too.
        let (found, missing, place) = self.pages().await?;
        // Before anything is sent: that may take long, and a snapshot keeps vacuum from its work.
        self.sql.answer(self.sql.batch_execute("commit")).await?;
        if !missing.is_empty() {
            self.publish(&missing, place).await?;
        }
        Ok(found)
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
        let is_old = match self.first_xid {
            Some(first_xid) => format!("{} < {first_xid}", row_xid("e")),
            None => "false".to_owned(),
        };
        format!(
            "begin; declare audit no scroll cursor for \
             select e.tableoid, e.ctid::text, {id}, {source_id}, {is_old} from {table} e \
             where {blocks} {} order by {}",
            self.resolved.lacks_outcome(id),
            self.reader.order_sql()
        )
    }

    /// Looks at the rows without a record, and gives those that are to be sent with the place
    /// that they get.
    async fn pages(&mut self) -> Result<(Found, Vec<Row>, CommitLsn)> {
        let mut page = self.page().await?;
        let end = self.sql.answer(wal_end(self.sql)).await?;
        let place = place_before(end);
        if page.is_empty() {
            return Ok((Found::nothing(Outcome::Complete), Vec::new(), place));
        }
        if !self.is_up_to_date(end).await? {
            return Ok((Found::nothing(Outcome::Behind), Vec::new(), place));
        }
        let mut found = Found::nothing(Outcome::Complete);
        let mut missing = Vec::new();
        while !page.is_empty() && missing.len() < MAX_FOUND {
            let (old, new): (Vec<Row>, Vec<Row>) = self
                .still_missing(page)
                .await?
                .into_iter()
                .partition(|row| row.is_old);
            found.discarded += old.len() as u64;
            self.discard(&old, place).await?;
            missing.extend(new);
            page = self.page().await?;
        }
        if !missing.is_empty() {
            found.outcome = Outcome::Found;
            found.published = missing.len() as u64;
        }
        Ok((found, missing, place))
    }

    async fn page(&self) -> Result<Vec<Row>> {
        let fetch = format!("fetch {PAGE} from audit");
        let rows = self.sql.answer(self.sql.query(&fetch, &[])).await?;
        let row = |row: &tokio_postgres::Row| Row {
            table: row.get(0),
            place: row.get(1),
            id: row.get(2),
            // Text that is not UTF-8 is no name for an event: its uuid is.
            source_id: row.try_get(3).ok().flatten(),
            is_old: row.get(4),
        };
        Ok(rows.iter().map(row).collect())
    }

    /// Waits until everything up to `end` is confirmed, unless that takes too long.
    async fn is_up_to_date(&self, end: Lsn) -> Result<bool> {
        let began = Instant::now();
        loop {
            let looking = is_confirmed(self.sql, self.slot, self.walsender, end);
            match self.sql.answer(looking).await? {
                true => return Ok(true),
                false if began.elapsed() >= PATIENCE => return Ok(false),
                false => tokio::time::sleep(LOOK_INTERVAL).await,
            }
        }
    }

    /// Those of a page that have no record now.
    async fn still_missing(&self, page: Vec<Row>) -> Result<Vec<Row>> {
        let ids: Vec<uuid::Uuid> = page.iter().map(|row| row.id).collect();
        let parameters: [&(dyn ToSql + Sync); 1] = [&ids];
        let looking = self.sql.query(NOT_RECORDED, &parameters);
        let rows = self.sql.answer(looking).await?;
        let missing: HashSet<i32> = rows.iter().map(|row| row.get(0)).collect();
        let numbered = (1..).zip(page);
        Ok(numbered
            .filter(|(n, _)| missing.contains(n))
            .map(|(_, row)| row)
            .collect())
    }

    /// Hands rows over in order, and waits until their outcome is recorded: only then can another
    /// comparison tell what is missing. So also when reading has failed: what was handed over
    /// before would be sent twice.
    async fn publish(&mut self, rows: &[Row], commit: CommitLsn) -> Result<()> {
        let handed_over = self.hand_over(rows, commit).await;
        let settled = self.events.settled().await;
        handed_over.and(settled.map_err(|SessionEnded| ended()))
    }

    async fn hand_over(&mut self, rows: &[Row], commit: CommitLsn) -> Result<()> {
        let sql = self.sql;
        let last = sql.answer(last_ordinal(sql, commit)).await?;
        let mut next_ordinal = last + 1;
        let mut rest = rows;
        let mut count = 1;
        while let Some(first) = rest.first() {
            let of_one_table = rest.iter().take_while(|row| row.table == first.table);
            let asked = &rest[..of_one_table.take(count).count()];
            let portion = sql
                .answer(self.read(asked, commit, &mut next_ordinal))
                .await?;
            for row in portion.rows {
                self.events
                    .send(row)
                    .await
                    .map_err(|SessionEnded| ended())?;
            }
            count = match portion.is_full {
                true => portion.done,
                false => (count * 2).min(MAX_ROWS),
            };
            rest = &rest[portion.done..];
        }
        Ok(())
    }

    /// Reads rows, but no more than fit into a portion; what the server sends of the others is
    /// passed over. Nothing is held on the server when this returns.
    async fn read(
        &mut self,
        asked: &[Row],
        commit: CommitLsn,
        next_ordinal: &mut u32,
    ) -> Result<Portion> {
        let mut portion = Portion {
            rows: Vec::with_capacity(asked.len()),
            done: asked.len(),
            is_full: false,
        };
        let mut bytes = 0;
        let reading = self.sql.simple_query_raw(&self.read_sql(asked)).await;
        let mut reading = std::pin::pin!(reading.map_err(altered_since)?);
        while let Some(message) = reading.try_next().await.map_err(altered_since)? {
            let SimpleQueryMessage::Row(row) = message else {
                continue;
            };
            let ordinal = *next_ordinal;
            *next_ordinal += 1;
            portion
                .rows
                .push(match self.reader.event(&row, commit, ordinal) {
                    Ok(event) => {
                        bytes += event.event.message.len();
                        FromTable::Event(event)
                    }
                    Err(error) => FromTable::Unmappable(error),
                });
            if bytes >= PORTION_BYTES {
                let place = self.reader.more(&row);
                let nth = asked.iter().position(|row| place == Some(&row.place));
                portion.done = nth.expect("invariant: what comes was asked for") + 1;
                portion.is_full = true;
                break;
            }
        }
        Ok(portion)
    }

    fn read_sql(&self, rows: &[Row]) -> String {
        let places: Vec<String> = rows
            .iter()
            .map(|row| format!("\"{}\"", row.place))
            .collect();
        let ids: Vec<String> = rows.iter().map(|row| row.id.to_string()).collect();
        // By their ids, too: a table that was rewritten meanwhile has other rows in those places.
        format!(
            "{} where e.tableoid = {} and e.ctid = any ('{{{}}}'::tid[]) \
             and {} = any ('{{{}}}'::uuid[]) order by {}",
            self.reader.select_more_sql("e.ctid::text"),
            rows[0].table,
            places.join(","),
            self.reader.event_id_sql(),
            ids.join(","),
            self.reader.order_sql()
        )
    }

    async fn discard(&self, rows: &[Row], commit: CommitLsn) -> Result<()> {
        if rows.is_empty() {
            return Ok(());
        }
        let ids: Vec<uuid::Uuid> = rows.iter().map(|row| row.id).collect();
        let source_ids: Vec<Option<&str>> =
            rows.iter().map(|row| row.source_id.as_deref()).collect();
        let last = self.sql.answer(last_ordinal(self.sql, commit)).await?;
        let last = i32::try_from(last).unwrap_or(i32::MAX);
        let place = PgLsn::from(commit.lsn().as_u64());
        let parameters: [&(dyn ToSql + Sync); 4] = [&place, &last, &ids, &source_ids];
        let discarding = self.sql.execute(DISCARD, &parameters);
        self.sql.answer(discarding).await?;
        Ok(())
    }
}

fn ended() -> Error {
    Error::new(Code::PostgresConnectionLost, "the session has ended")
}
