//! Reads the rows that a scan has found, in the order of the scan and in portions of bounded size.
//!
//! PostgreSQL cannot send some values: bytes that cannot be converted to UTF-8, more bytes than a protocol
//! message can hold, or a value that is damaged on disk. One such value makes the whole statement fail. So we
//! bisect the portion until the bad row is alone, and read that row column by column, without the bad value.

use std::collections::VecDeque;

use futures_util::TryStreamExt;
use tokio_postgres::error::{Error as PgError, SqlState};
use tokio_postgres::{SimpleQueryMessage, SimpleQueryRow};
use uuid::Uuid;

use super::candidate::{Candidate, DispatchState, ids_sql};
use super::table::{RowValues, TableReader, altered_since};
use crate::error::Result;
use crate::event::EventId;
use crate::postgres::Sql;

/// Maximum number of rows that one statement asks for. A portion with large rows ends earlier, see
/// [`PORTION_BYTES`].
const MAX_ROWS: usize = 512;
/// Size in bytes at which a portion ends, to bound memory. The relay drops the remaining rows of the server's
/// answer, and asks for these rows again in the next portion.
const PORTION_BYTES: usize = 4 << 20;
/// A value with at least this stored size may need more memory than the server has. A value of 64 MB can be
/// compressed to about this size, and PostgreSQL needs several copies of the uncompressed value.
const LARGE_VALUE_BYTES: u64 = 256 << 10;

/// A row as it was read, with the state of its event in outbox.dispatch.
#[derive(Debug)]
pub(crate) struct ReadRow {
    /// The event's id in outbox.dispatch.
    pub(crate) id: Uuid,
    /// The row's `seq`, if the scan has found the row by its `seq`.
    pub(crate) seq: Option<i64>,
    /// Empty if the event is set aside.
    pub(crate) values: RowValues,
    pub(crate) record: DispatchState,
}

/// Reads candidates, one portion after another.
#[derive(Debug)]
pub(crate) struct Rows {
    waiting: VecDeque<Candidate>,
    /// Maximum number of rows that the next statement asks for.
    count: usize,
}

enum Portion {
    /// The rows, and the number of candidates that have been processed. There may be fewer rows than
    /// candidates, because some may be gone from the table.
    Read(Vec<ReadRow>, usize),
    /// PostgreSQL cannot send one of the rows.
    Unreadable,
}

impl Rows {
    pub(crate) fn new() -> Self {
        Self {
            waiting: VecDeque::new(),
            count: 1,
        }
    }

    /// Queues rows to be read, behind all rows that are already waiting.
    pub(crate) fn add(&mut self, candidates: Vec<Candidate>) {
        self.waiting.extend(candidates);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Takes the rows at the front whose events are set aside. The relay does not read the values of these rows,
    /// because it makes no message of them.
    fn take_set_aside(&mut self, reader: &TableReader) -> Vec<ReadRow> {
        let mut taken = Vec::new();
        while let Some(candidate) = self
            .waiting
            .pop_front_if(|next| next.record == DispatchState::SetAside)
        {
            taken.push(ReadRow {
                id: candidate.id,
                seq: candidate.seq,
                values: RowValues::empty(reader),
                record: candidate.record,
            });
        }
        taken
    }

    /// Reads the next portion. The portion is empty if no rows wait, or if its rows were deleted in the
    /// meantime. When this function returns, the server holds no lock and no snapshot for this session.
    ///
    /// # Errors
    /// Database errors; `slot-busy` when the table was altered in the meantime.
    pub(crate) async fn portion(
        &mut self,
        sql: &Sql,
        reader: &TableReader,
    ) -> Result<Vec<ReadRow>> {
        loop {
            let set_aside = self.take_set_aside(reader);
            let asked = self.asked();
            if !set_aside.is_empty() || asked == 0 {
                return Ok(set_aside);
            }
            let candidates = &self.waiting.make_contiguous()[..asked];
            match read(sql, reader, candidates).await? {
                Portion::Read(rows, done) => {
                    self.count = if done < asked {
                        done.max(1)
                    } else {
                        (self.count * 2).min(MAX_ROWS)
                    };
                    self.waiting.drain(..done);
                    return Ok(rows);
                }
                Portion::Unreadable if asked > 1 => self.count = asked / 2,
                Portion::Unreadable => {
                    self.count = 1;
                    let candidate = self.waiting.pop_front();
                    let candidate = candidate.expect("invariant: one was asked for");
                    let condition = are(reader, std::slice::from_ref(&candidate));
                    let values = around(sql, reader, &condition).await?;
                    return Ok(Vec::from_iter(values.map(|values| ReadRow {
                        id: candidate.id,
                        seq: candidate.seq,
                        values,
                        record: candidate.record,
                    })));
                }
            }
        }
    }

    /// Returns how many of the next rows one statement can read. A statement finds all its rows by `seq`, or all of
    /// them by `ctid` in one partition. So the count ends before the first row that must be found in another way. It
    /// also ends before a row whose event is set aside.
    fn asked(&self) -> usize {
        let Some(first) = self.waiting.front() else {
            return 0;
        };
        let together = self.waiting.iter().take(self.count).take_while(|next| {
            next.record != DispatchState::SetAside
                && next.seq.is_some() == first.seq.is_some()
                && (next.seq.is_some() || next.leaf == first.leaf)
        });
        together.count()
    }
}

async fn read(sql: &Sql, reader: &TableReader, candidates: &[Candidate]) -> Result<Portion> {
    let order = match reader.seq_sql().filter(|_| candidates[0].seq.is_some()) {
        Some(seq) => format!("{seq}, e.tableoid, e.ctid"),
        None => format!(
            "pg_catalog.array_position({}, e.ctid)",
            ctids_sql(candidates)
        ),
    };
    let statement = format!(
        "{} and {} order by {order}",
        reader.select_sql(),
        are(reader, candidates),
    );
    match read_portion(sql, &statement, reader, candidates).await {
        Ok((rows, done)) => Ok(Portion::Read(rows, done)),
        Err(error) if is_of_a_value(&error) => Ok(Portion::Unreadable),
        Err(error) => Err(altered_since(error)),
    }
}

async fn read_portion(
    sql: &Sql,
    statement: &str,
    reader: &TableReader,
    candidates: &[Candidate],
) -> Result<(Vec<ReadRow>, usize), PgError> {
    let reading = sql.simple_query_raw(statement).await?;
    let mut reading = std::pin::pin!(reading);
    let (mut rows, mut bytes, mut done) = (Vec::with_capacity(candidates.len()), 0, 0);
    while let Some(message) = reading.try_next().await? {
        let SimpleQueryMessage::Row(row) = message else {
            continue;
        };
        let Some(nth) = index_of(&row, reader, &candidates[done..]) else {
            continue;
        };
        done += nth + 1;
        bytes += reader.bytes(&row);
        rows.push(ReadRow {
            id: candidates[done - 1].id,
            seq: candidates[done - 1].seq,
            values: RowValues::Whole(row),
            record: candidates[done - 1].record,
        });
        if bytes >= PORTION_BYTES {
            return Ok((rows, done));
        }
    }
    Ok((rows, candidates.len()))
}

/// Returns the index in `rest` of the candidate that matches this row. The query returns the rows in the order
/// of the candidates, so the candidates before this index no longer have a row. A match needs more than the id,
/// because ids might not be unique.
fn index_of(row: &SimpleQueryRow, reader: &TableReader, rest: &[Candidate]) -> Option<usize> {
    let (id, seq) = (reader.id_of(row)?, reader.seq_of(row));
    rest.iter().position(|candidate| {
        candidate.id == id
            && match candidate.seq {
                Some(_) => candidate.seq == seq,
                None => reader.ctid_of(row) == Some(candidate.ctid.as_str()),
            }
    })
}

/// Reads the row of one event. Returns `None` when the row is gone, or when the event cannot belong to
/// this table.
///
/// # Errors
/// The errors of [`Rows::portion`].
pub(crate) async fn find(
    sql: &Sql,
    reader: &TableReader,
    event_id: &EventId,
) -> Result<Option<RowValues>> {
    let Some(condition) = reader.is_sql(event_id) else {
        return Ok(None);
    };
    let statement = format!("{} and {condition}", reader.select_sql());
    match ask(sql, &statement).await? {
        Ok(row) => Ok(row.map(RowValues::Whole)),
        Err(_) => around(sql, reader, &condition).await,
    }
}

/// Whether the table has the row of this event. A table whose id column cannot have this id has no such row.
///
/// # Errors
/// `lock-wait` and other database errors.
pub(crate) async fn exists(sql: &Sql, reader: &TableReader, event_id: &EventId) -> Result<bool> {
    let Some(condition) = reader.is_sql(event_id) else {
        return Ok(false);
    };
    let statement = format!("select from {} and {condition} limit 1", reader.rows_sql());
    match sql.query_opt(&statement, &[]).await {
        Ok(row) => Ok(row.is_some()),
        // The id has another type, such as text instead of a number.
        Err(error)
            if error
                .code()
                .is_some_and(|code| code.code().starts_with("22")) =>
        {
            Ok(false)
        }
        Err(error) => Err(altered_since(error)),
    }
}

/// Reads the row for which `condition` is true, with one statement per column. The values that PostgreSQL
/// cannot send are marked as unreadable. Returns `None` when the row is gone.
async fn around(sql: &Sql, reader: &TableReader, condition: &str) -> Result<Option<RowValues>> {
    let mut values = RowValues::empty(reader);
    for column in reader.columns() {
        let statement = format!(
            "select {} from {} and {condition}",
            reader.column_sql(column),
            reader.rows_sql(),
        );
        match ask(sql, &statement).await? {
            Ok(Some(row)) => values.take(column, row),
            Ok(None) => return Ok(None),
            Err(error) if is_of_the_server(sql, reader, column, condition, &error).await? => {
                return Err(altered_since(error));
            }
            Err(error) => values.unreadable(column, reader, &error),
        }
    }
    Ok(Some(values))
}

/// Whether the state of the server caused this error, and not the value. A server that lacks memory or room for
/// locks reports the same SQLSTATEs as a value that is too large. The server is the cause if a statement
/// without the value fails too, or if memory ran out although the value is small.
async fn is_of_the_server(
    sql: &Sql,
    reader: &TableReader,
    column: usize,
    condition: &str,
    error: &PgError,
) -> Result<bool> {
    if error.code() != Some(&SqlState::OUT_OF_MEMORY)
        && error.code() != Some(&SqlState::INTERNAL_ERROR)
    {
        return Ok(false);
    }
    let statement = format!(
        "select {} from {} and {condition}",
        reader.stored_size_sql(column),
        reader.rows_sql(),
    );
    let Ok(row) = ask(sql, &statement).await? else {
        return Ok(true);
    };
    let size = row.and_then(|row| row.get(0).and_then(|size| size.parse::<u64>().ok()));
    let is_small = size.is_some_and(|bytes| bytes < LARGE_VALUE_BYTES);
    Ok(is_small && error.code() == Some(&SqlState::OUT_OF_MEMORY))
}

/// Runs a statement and returns its first row. The inner error means that PostgreSQL cannot send the
/// row.
async fn ask(sql: &Sql, statement: &str) -> Result<Result<Option<SimpleQueryRow>, PgError>> {
    let answer = match sql.simple_query(statement).await {
        Err(error) if !is_of_a_value(&error) => return Err(altered_since(error)),
        answer => answer,
    };
    Ok(answer.map(|messages| {
        messages.into_iter().find_map(|message| match message {
            SimpleQueryMessage::Row(row) => Some(row),
            _ => None,
        })
    }))
}

/// Returns the condition that a row of `e` is one of these candidates: it has the `seq` or `ctid` of a
/// candidate, and also the id of a candidate. The condition checks the id because after a rewrite of the
/// table, other rows may have the same `ctid`s.
fn are(reader: &TableReader, candidates: &[Candidate]) -> String {
    let seqs: Option<Vec<String>> = candidates
        .iter()
        .map(|candidate| candidate.seq.map(|seq| seq.to_string()))
        .collect();
    let found_by = match (seqs, reader.seq_sql()) {
        (Some(seqs), Some(column)) => {
            format!("{column} = any ('{{{}}}'::bigint[])", seqs.join(","))
        }
        _ => format!(
            "e.tableoid = {} and e.ctid = any ({})",
            candidates[0].leaf,
            ctids_sql(candidates)
        ),
    };
    let id = reader.event_id_sql();
    let ids = ids_sql(candidates.iter().map(|candidate| &candidate.id));
    format!("{found_by} and {id} = any ({ids})")
}

fn ctids_sql(candidates: &[Candidate]) -> String {
    let ctids = candidates.iter().map(|c| format!("\"{}\"", c.ctid));
    format!("'{{{}}}'::tid[]", ctids.collect::<Vec<_>>().join(","))
}

/// Whether a statement failed because of a value in one of the rows.
pub(crate) fn is_of_a_value(error: &PgError) -> bool {
    let Some(code) = error.code() else {
        return false;
    };
    // Class 22 contains data exceptions, such as bytes that cannot be converted to UTF-8. For a value that is
    // too large to send, PostgreSQL reports a program limit, an internal error or a lack of memory, depending
    // on its version. `DATA_CORRUPTED` means that a value stored out of line lacks some of its parts or cannot
    // be decompressed. `INDEX_CORRUPTED` is not in the list, because no value is bad: REINDEX repairs the index.
    code.code().starts_with("22")
        || [
            SqlState::PROGRAM_LIMIT_EXCEEDED,
            SqlState::OUT_OF_MEMORY,
            SqlState::INTERNAL_ERROR,
            SqlState::DATA_CORRUPTED,
        ]
        .contains(code)
}
