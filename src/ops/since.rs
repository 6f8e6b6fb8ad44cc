//! Parses a point in time that an operator gives (`--since`), and finds the first rows at or after it.
//!
//! Neither `seq` nor a commit position is a time, but both grow with time and have an index. A binary search
//! along the index finds the first row at or after the time. The search takes about 60 look-ups, and does not
//! read the earlier rows.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;
use std::time::Duration;

use slot_manager::{quoted_identifier, quoted_literal};
use tokio_postgres::types::PgLsn;

use crate::capture::claim::Captured;
use crate::capture::shape::LOWEST_SEQ;
use crate::capture::table::TableReader;
use crate::capture::table::altered_since;
use crate::error::{Code, Error, Result};
use crate::postgres::Sql;
use crate::settings::parse_duration;
use crate::store::dispatch::history;

/// This margin is subtracted from the given time, because the order of rows may differ a little from the order of
/// their times.
const MARGIN: &str = "interval '1 minute'";

/// A point in time: a duration before now, or a time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Since {
    Ago(Duration),
    At(String),
}

/// A point in time by the server's clock, as an SQL expression.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SinceTime(String);

impl Since {
    /// Computes the time with the server's clock.
    ///
    /// # Errors
    /// `setting-invalid` for a time that does not exist; connection errors.
    pub(crate) async fn resolve(&self, sql: &Sql) -> Result<SinceTime> {
        let row = match self {
            Since::Ago(ago) => {
                let statement = "select (clock_timestamp() - make_interval(secs => $1))::text";
                sql.query_one(statement, &[&ago.as_secs_f64()]).await
            }
            Since::At(time) => {
                let statement = "select ($1::text::timestamptz)::text";
                sql.query_one(statement, &[time]).await
            }
        };
        match row {
            Ok(row) => Ok(SinceTime(format!(
                "{}::timestamptz",
                quoted_literal(row.get(0))
            ))),
            Err(error)
                if error
                    .code()
                    .is_some_and(|code| code.code().starts_with("22")) =>
            {
                let what = format!("`{self}` is not a point in time");
                Err(Error::new(Code::SettingInvalid, what).hint(HINT))
            }
            Err(error) => Err(error.into()),
        }
    }
}

impl Since {
    /// Returns the point in time in absolute form (UTC), so that it means the same when it is read later.
    ///
    /// # Errors
    /// The errors of [`resolve`](Self::resolve).
    pub(crate) async fn fixed(&self, sql: &Sql) -> Result<String> {
        let time = self.resolve(sql).await?;
        let utc = format!(
            "select to_char({} at time zone 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"')",
            time.sql()
        );
        Ok(sql.query_one(&utc, &[]).await?.get(0))
    }
}

const HINT: &str = "write a duration such as 10min or 2d, or a time such as 2026-11-27T08:30:00Z";

impl fmt::Display for Since {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Since::Ago(ago) => write!(f, "{}s", ago.as_secs()),
            Since::At(time) => f.write_str(time),
        }
    }
}

impl FromStr for Since {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Ok(ago) = parse_duration(text) {
            return Ok(Since::Ago(ago));
        }
        let is_time = |c: char| c.is_ascii_digit() || "-:.+TZtz ".contains(c);
        let begins_with_date = text.len() >= 10 && text.as_bytes()[4] == b'-';
        if begins_with_date && text.chars().all(is_time) {
            return Ok(Since::At(text.to_owned()));
        }
        Err(HINT.to_owned())
    }
}

impl SinceTime {
    pub(crate) fn sql(&self) -> &str {
        &self.0
    }

    /// Returns the lowest `seq` of the rows whose time is at or after this time minus [`MARGIN`]. `None`
    /// means all rows: the table is empty, has no index on `seq`, or does not record when events happened.
    pub(crate) async fn first_seq(
        &self,
        sql: &Sql,
        captured: &Captured,
        reader: &TableReader,
    ) -> Result<Option<i64>> {
        let before = self.seqs_before(sql, captured, reader).await?;
        Ok(before.map(|seqs| seqs.end))
    }

    /// Returns the range of `seq` from the first row of the table to the row of [`first_seq`](Self::first_seq). Returns
    /// `None` if `first_seq` does.
    pub(crate) async fn seqs_before(
        &self,
        sql: &Sql,
        captured: &Captured,
        reader: &TableReader,
    ) -> Result<Option<Range<i64>>> {
        let numbered = captured.shape.numbered();
        let Some((seq, at)) = numbered.zip(reader.happened_at_sql()) else {
            return Ok(None);
        };
        let column = format!("e.{}", quoted_identifier(&seq.column));
        let rows = reader.rows_sql();
        // Do not use `min` and `max`, because with old statistics PostgreSQL reads the whole index for them.
        let seqs = format!("select {column}::bigint from {rows} and {column} >= {LOWEST_SEQ}");
        let ends = format!(
            "select ({seqs} order by {column} limit 1), ({seqs} order by {column} desc limit 1)"
        );
        let ends = sql.query_one(&ends, &[]).await.map_err(altered_since)?;
        let (low, high): (Option<i64>, Option<i64>) = (ends.get(0), ends.get(1));
        let Some((lowest, high)) = low.zip(high) else {
            return Ok(None);
        };
        let probe = format!(
            "select coalesce({at} >= {} - {MARGIN}, true) from {rows} \
             and {column} >= $1::bigint order by {column} limit 1",
            self.0
        );
        let (mut low, mut above) = (lowest, high.saturating_add(1));
        while low < above {
            let middle = low + (above.abs_diff(low) / 2).cast_signed();
            let row = sql.query_opt(&probe, &[&middle]).await;
            let row = row.map_err(altered_since)?;
            if row.is_none_or(|row| row.get(0)) {
                above = middle;
            } else {
                low = middle + 1;
            }
        }
        Ok(Some(lowest..low))
    }

    /// Returns the first position in outbox.dispatch whose commit time is at or after this time minus
    /// [`MARGIN`].
    pub(crate) async fn first_commit(&self, sql: &Sql) -> Result<PgLsn> {
        history::first_commit(sql, &format!("{} - {MARGIN}", self.0)).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn since_is_a_duration_or_a_time() {
        let parse = |text: &str| text.parse::<Since>();
        assert_eq!(parse("1h"), Ok(Since::Ago(Duration::from_secs(3_600))));
        let time = "2026-11-27T08:30:00Z";
        assert_eq!(parse(time), Ok(Since::At(time.to_owned())));
        for refused in ["yesterday", "2026", "2026-11-27'; drop", "now"] {
            assert!(parse(refused).is_err(), "{refused}");
        }
    }
}
