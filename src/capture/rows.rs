//! Reads the rows that a scan has found, in their order and in portions of bounded size.
//!
//! PostgreSQL cannot send some values: bytes that cannot be converted to UTF-8, more bytes than a
//! protocol message can hold, or a value that is damaged on disk. One such value fails the whole
//! statement. So we bisect the portion until the bad row is alone, and read that row column by column,
//! without the bad value.

use std::collections::VecDeque;

use futures_util::TryStreamExt;
use tokio_postgres::error::{Error as PgError, SqlState};
use tokio_postgres::{SimpleQueryMessage, SimpleQueryRow};
use uuid::Uuid;

use super::scan::{Candidate, DispatchState};
use super::table::{RowValues, TableReader, altered_since};
use crate::error::Result;
use crate::event::EventId;
use crate::postgres::Sql;

/// Maximum number of rows per statement. Large rows end a portion earlier.
const MAX_ROWS: usize = 512;
/// A portion ends with the row that reaches this size. We drop the rest of the server's answer.
const PORTION_BYTES: usize = 4 << 20;

/// A row as it was read, with the state of its event in outbox.dispatch.
#[derive(Debug)]
pub(crate) struct ReadRow {
    /// The event's id in outbox.dispatch.
    pub(crate) id: Uuid,
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
    /// The rows, and how many candidates they cover. Some candidates may be gone from the table.
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

    /// Adds rows to read, after all rows that wait already.
    pub(crate) fn add(&mut self, candidates: Vec<Candidate>) {
        self.waiting.extend(candidates);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Reads the next portion. The portion is empty if no rows wait, and may be empty if its rows were
    /// deleted in the meantime. When this returns, the server holds no lock and no snapshot for us.
    ///
    /// # Errors
    /// Errors of a statement; `slot-busy` when the table was altered in the meantime.
    pub(crate) async fn portion(
        &mut self,
        sql: &Sql,
        reader: &TableReader,
    ) -> Result<Vec<ReadRow>> {
        loop {
            let asked = self.asked();
            if asked == 0 {
                return Ok(Vec::new());
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
                        values,
                        record: candidate.record,
                    })));
                }
            }
        }
    }

    /// How many of the next rows one statement asks for. Rows that are found by `ctid` must be in the
    /// same partition.
    fn asked(&self) -> usize {
        let Some(first) = self.waiting.front() else {
            return 0;
        };
        let together = self.waiting.iter().take(self.count).take_while(|next| {
            next.seq.is_some() == first.seq.is_some()
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
            places_sql(candidates)
        ),
    };
    let statement = format!(
        "{} where {} order by {order}",
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
        let Some(nth) = place_of(&row, reader, &candidates[done..]) else {
            continue;
        };
        done += nth + 1;
        bytes += reader.bytes(&row);
        rows.push(ReadRow {
            id: candidates[done - 1].id,
            values: RowValues::Whole(row),
            record: candidates[done - 1].record,
        });
        if bytes >= PORTION_BYTES {
            return Ok((rows, done));
        }
    }
    Ok((rows, candidates.len()))
}

/// Returns the index in `rest` of the candidate that matches this row. The candidates before that index
/// were deleted in the meantime. The id alone is not enough for a match, because ids may not be unique.
fn place_of(row: &SimpleQueryRow, reader: &TableReader, rest: &[Candidate]) -> Option<usize> {
    let (id, seq) = (reader.id_of(row)?, reader.seq_of(row));
    rest.iter().position(|candidate| {
        candidate.id == id
            && match candidate.seq {
                Some(_) => candidate.seq == seq,
                None => reader.place_of(row) == Some(candidate.place.as_str()),
            }
    })
}

/// Reads the row of one event; `None` when the row is gone, or when the event cannot be of this table.
///
/// # Errors
/// Those of [`Rows::portion`].
pub(crate) async fn find(
    sql: &Sql,
    reader: &TableReader,
    event_id: &EventId,
) -> Result<Option<RowValues>> {
    let Some(condition) = reader.is_sql(event_id) else {
        return Ok(None);
    };
    let statement = format!("{} where {condition}", reader.select_sql());
    match ask(sql, &statement).await? {
        Ok(row) => Ok(row.map(RowValues::Whole)),
        Err(_) => around(sql, reader, &condition).await,
    }
}

/// Reads the row that meets `condition` column by column, without the values that PostgreSQL cannot
/// send; `None` when the row is gone.
async fn around(sql: &Sql, reader: &TableReader, condition: &str) -> Result<Option<RowValues>> {
    let mut values = RowValues::empty(reader);
    for column in reader.columns() {
        let statement = format!(
            "select {} from {} e where {condition}",
            reader.column_sql(column),
            reader.table_sql(),
        );
        match ask(sql, &statement).await? {
            Ok(Some(row)) => values.take(column, row),
            Ok(None) => return Ok(None),
            Err(error) => values.unreadable(column, reader, &error),
        }
    }
    Ok(Some(values))
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
/// candidate, and the id of one. The id is needed because after a rewrite of the table, other rows may
/// have the same `ctid`s.
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
            places_sql(candidates)
        ),
    };
    let id = reader.event_id_sql();
    format!("{found_by} and {id} = any ({})", ids_sql(candidates))
}

fn places_sql(candidates: &[Candidate]) -> String {
    let places = candidates.iter().map(|c| format!("\"{}\"", c.place));
    format!("'{{{}}}'::tid[]", places.collect::<Vec<_>>().join(","))
}

fn ids_sql(candidates: &[Candidate]) -> String {
    let ids = candidates.iter().map(|candidate| candidate.id.to_string());
    format!("'{{{}}}'::uuid[]", ids.collect::<Vec<_>>().join(","))
}

/// Whether a statement failed because of a value in one of the rows.
pub(crate) fn is_of_a_value(error: &PgError) -> bool {
    let Some(code) = error.code() else {
        return false;
    };
    // Data exceptions, such as bytes that cannot be converted to UTF-8. A value that is too large
    // to send is a program limit, an internal error or a lack of memory, depending on the version.
    // A value stored out of line may have lost some of its parts, or no longer decompress: the data are
    // corrupted. A corrupted index is not of a value, because REINDEX repairs it without any loss.
    code.code().starts_with("22")
        || [
            SqlState::PROGRAM_LIMIT_EXCEEDED,
            SqlState::OUT_OF_MEMORY,
            SqlState::INTERNAL_ERROR,
            SqlState::DATA_CORRUPTED,
        ]
        .contains(code)
}
