//! Adds and drops the daily partitions of `outbox.events`, with the functions of migration 19.
//!
//! The functions find a partition by its bounds, and accept only partitions of `outbox.events`. They run
//! with the privileges of the table's owner, which the relay does not have. `ops::prune` decides which
//! days may be dropped.

use tokio_postgres::error::Error as PgError;
use tokio_postgres::{Row, SimpleQueryMessage};

use crate::postgres::Sql;

/// The only table that can have daily partitions.
pub(crate) const TABLE: &str = "outbox.events";

/// The functions that need a grant, because they add and drop days with the privileges of the table's
/// owner.
pub(crate) const FUNCTIONS: [&str; 3] = [
    "outbox.add_day(date)",
    "outbox.lock_day(oid, date)",
    "outbox.drop_day(oid, date)",
];

/// Selects the days that need a partition. The days are text, so that their format does not depend on the
/// settings of the SQL session.
const MISSING: &str = "\
    select to_char(m.day, 'YYYY-MM-DD') from outbox.missing_days() m (day) order by m.day";

/// The functions that only read, with the privileges of their caller.
pub(super) const READERS: [&str; 2] = ["outbox.days()", "outbox.missing_days()"];

/// A day that has its own partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DayPartition {
    partition: u32,
    /// The day in UTC, such as 2026-11-27.
    pub(crate) day: String,
    from_time: String,
    to_time: String,
}

impl DayPartition {
    fn from_row(row: &Row) -> Self {
        Self {
            partition: row.get(0),
            day: row.get(1),
            from_time: row.get(2),
            to_time: row.get(3),
        }
    }

    /// Returns an SQL condition that a row `e` is in this partition. The condition includes the bounds, so
    /// PostgreSQL reads no other partition.
    pub(crate) fn has_row_sql(&self) -> String {
        let Self {
            partition,
            from_time,
            to_time,
            ..
        } = self;
        format!(
            "(e.tableoid = '{partition}'::oid and e.occurred_at >= '{from_time}'::timestamptz \
             and e.occurred_at < '{to_time}'::timestamptz)"
        )
    }
}

/// Returns the days that were over at `cutoff`, which is an SQL expression.
///
/// # Errors
/// Database errors.
pub(crate) async fn before(sql: &Sql, cutoff: &str) -> Result<Vec<DayPartition>, PgError> {
    let utc = |time: &str| {
        format!("to_char(d.{time} at time zone 'UTC', 'YYYY-MM-DD HH24:MI:SS') || '+00'")
    };
    let statement = format!(
        "select d.partition, to_char(d.day, 'YYYY-MM-DD'), {}, {} from outbox.days() d \
         where d.day is not null and d.to_time <= {cutoff} order by d.day",
        utc("from_time"),
        utc("to_time")
    );
    let rows = sql.query_typed(&statement, &[]).await?;
    Ok(rows.iter().map(DayPartition::from_row).collect())
}

/// Whether the table is partitioned by `occurred_at`, and has a partition.
///
/// # Errors
/// Database errors.
pub(crate) async fn exist(sql: &Sql) -> Result<bool, PgError> {
    const STATEMENT: &str = "select exists (select from outbox.days())";
    Ok(sql.query_one(STATEMENT, &[]).await?.get(0))
}

/// Returns the days from today to seven days ahead that no partition covers. Returns none if the table is not
/// partitioned by `occurred_at`, or if another program creates its partitions.
///
/// # Errors
/// Database errors.
pub(crate) async fn missing(sql: &Sql) -> Result<Vec<String>, PgError> {
    let rows = sql.query_typed(MISSING, &[]).await?;
    Ok(rows.iter().map(|row| row.get(0)).collect())
}

/// The result of an attempt to add a day.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AddedDay {
    Added,
    /// The day has a partition already, for example because another session added it first.
    Covered,
    /// Another table has the name of the new partition.
    NameTaken,
    /// Rows of that day are in the default partition.
    RowsInDefault,
    /// The default partition is larger than 16 MB, or is not a plain table. To add the day, PostgreSQL would
    /// have to read all of this partition, and inserts would wait meanwhile.
    LargeDefault,
}

/// Adds a day from [`missing`], in its own transaction.
///
/// # Errors
/// Database errors, for example because another session holds a lock.
pub(crate) async fn add(sql: &Sql, day: &str) -> Result<AddedDay, PgError> {
    // The locks are held until the commit returns, so the commit must not wait for a synchronous standby
    // server.
    let statements = format!(
        "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL synchronous_commit = local; \
         SELECT outbox.add_day('{day}'); COMMIT"
    );
    let answers = match sql.simple_query(&statements).await {
        Ok(answers) => answers,
        Err(error) => {
            roll_back(sql).await?;
            return Err(error);
        }
    };
    let answer = answers.iter().find_map(|answer| match answer {
        SimpleQueryMessage::Row(row) => row.get(0),
        _ => None,
    });
    Ok(match answer {
        Some("added") => AddedDay::Added,
        Some("taken") => AddedDay::NameTaken,
        Some("rows") => AddedDay::RowsInDefault,
        Some("large") => AddedDay::LargeDefault,
        _ => AddedDay::Covered,
    })
}

/// Begins a transaction in which no other session can change the rows of a day. Returns false, without a
/// transaction, if the partition no longer exists.
///
/// If the relay dies, the server ends the idle session after ten seconds, which frees the lock.
///
/// # Errors
/// Database errors, for example because another session holds a lock. The transaction has then
/// ended.
pub(crate) async fn lock(sql: &Sql, day: &DayPartition) -> Result<bool, PgError> {
    const BEGIN: &str = "BEGIN ISOLATION LEVEL READ COMMITTED; \
        SET LOCAL idle_in_transaction_session_timeout = '10s'";
    sql.batch_execute(BEGIN).await?;
    let statement = format!("SELECT outbox.lock_day('{}', '{}')", day.partition, day.day);
    let locked = match sql.query_typed(&statement, &[]).await {
        Ok(rows) => Ok(rows.first().is_some_and(|row| row.get(0))),
        Err(error) => Err(error),
    };
    if !matches!(locked, Ok(true)) {
        roll_back(sql).await?;
    }
    locked
}

/// Whether a locked day has a row whose event is in quarantine or will be published again. `is_record_of_row`
/// is an SQL condition that record `w` belongs to row `e`.
///
/// # Errors
/// Database errors.
pub(crate) async fn has_quarantined(sql: &Sql, is_record_of_row: &str) -> Result<bool, PgError> {
    let statement = format!(
        "select exists (select from outbox.dispatch w \
         where w.state in ('quarantined', 'released') and {is_record_of_row})"
    );
    Ok(sql.query_one(&statement, &[]).await?.get(0))
}

/// Drops a locked day, and commits. Inserts wait from the drop until the commit, so both statements are sent in
/// one message, without a network round trip between them.
///
/// # Errors
/// Database errors, for example because another session holds a lock. The day then stays locked
/// until [`roll_back`].
pub(crate) async fn drop_locked(sql: &Sql, day: &DayPartition) -> Result<(), PgError> {
    sql.batch_execute("SAVEPOINT before_drop").await?;
    let statements = format!(
        "SET LOCAL synchronous_commit = local; SELECT outbox.drop_day('{}', '{}'); COMMIT",
        day.partition, day.day
    );
    let dropped = sql.batch_execute(&statements).await;
    if dropped.is_err() {
        sql.batch_execute("ROLLBACK TO SAVEPOINT before_drop")
            .await?;
    }
    dropped
}

/// Ends the transaction of [`lock`] without any change.
///
/// # Errors
/// Connection errors.
pub(crate) async fn roll_back(sql: &Sql) -> Result<(), PgError> {
    sql.batch_execute("ROLLBACK").await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_day_is_selected_by_its_partition_and_its_bounds() {
        let day = DayPartition {
            partition: 7,
            day: "2026-11-27".into(),
            from_time: "2026-11-27 00:00:00+00".into(),
            to_time: "2026-11-28 00:00:00+00".into(),
        };
        assert_eq!(
            day.has_row_sql(),
            "(e.tableoid = '7'::oid and e.occurred_at >= '2026-11-27 00:00:00+00'::timestamptz \
             and e.occurred_at < '2026-11-28 00:00:00+00'::timestamptz)"
        );
    }
}
