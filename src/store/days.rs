//! The daily partitions of `outbox.events`, by the functions of migration 19.
//!
//! The functions find a partition by its bounds. They refuse anything else than partitions of
//! `outbox.events`, and work with the rights of the table's owner, which the relay does not have. Which
//! rows a day holds, and whether they may go, is decided in `ops::prune`.

use tokio_postgres::error::Error as PgError;
use tokio_postgres::{Row, SimpleQueryMessage};

use crate::postgres::Sql;

/// The table that may have daily partitions.
pub(crate) const TABLE: &str = "outbox.events";

/// The functions that need a grant: they add and drop days with the rights of the table's owner.
pub(crate) const FUNCTIONS: [&str; 3] = [
    "outbox.add_day(date)",
    "outbox.lock_day(oid, date)",
    "outbox.drop_day(oid, date)",
];

/// Parameters: none. Dates as text, because their form depends on the session.
const MISSING: &str = "\
    select to_char(m.day, 'YYYY-MM-DD') from outbox.missing_days() m (day) order by m.day";

/// A day that has its own partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DayPartition {
    partition: u32,
    /// Such as 2026-11-27, in UTC.
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

    /// The condition that a row of `e` is in this partition. PostgreSQL reads no other partition, because
    /// of the bounds.
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

/// The days that were over at `cutoff`, an SQL expression.
///
/// # Errors
/// Errors of the statement.
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

/// Whether the table is partitioned by the time of its events.
///
/// # Errors
/// Errors of the statement.
pub(crate) async fn exist(sql: &Sql) -> Result<bool, PgError> {
    const STATEMENT: &str = "select exists (select from outbox.days())";
    Ok(sql.query_one(STATEMENT, &[]).await?.get(0))
}

/// Of today and the next seven days, those that have no partition.
///
/// # Errors
/// Errors of the statement.
pub(crate) async fn missing(sql: &Sql) -> Result<Vec<String>, PgError> {
    let rows = sql.query_typed(MISSING, &[]).await?;
    Ok(rows.iter().map(|row| row.get(0)).collect())
}

/// The result of an attempt to add a day.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AddedDay {
    Added,
    /// Somebody else was faster.
    Covered,
    /// Another table has its name.
    NameTaken,
    /// Rows of that day are in the default partition.
    RowsInDefault,
    /// The default partition is too large to be read while inserts wait.
    LargeDefault,
}

/// Adds a day from [`missing`], in a transaction of its own.
///
/// # Errors
/// Errors of a statement, such as a lock that others hold.
pub(crate) async fn add(sql: &Sql, day: &str) -> Result<AddedDay, PgError> {
    // Locks are held until the commit returns, and it must not wait for a standby.
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

/// Begins a transaction in which nobody else can change the rows of a day. Returns false, without a
/// transaction, if the partition no longer exists.
///
/// If our process dies, the server ends the session after ten seconds, and with it the lock.
///
/// # Errors
/// Errors of a statement, such as a lock that others hold. The transaction is over then.
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

/// Whether a record in quarantine, or one that is to be published again, has its row in a locked day.
/// `is_record_of_row` is a condition on records `w` and rows `e`.
///
/// # Errors
/// Errors of the statement.
pub(crate) async fn has_quarantined(sql: &Sql, is_record_of_row: &str) -> Result<bool, PgError> {
    let statement = format!(
        "select exists (select from outbox.dispatch w \
         where w.state in ('quarantined', 'released') and {is_record_of_row})"
    );
    Ok(sql.query_one(&statement, &[]).await?.get(0))
}

/// Drops a locked day, and commits. Both statements are one message, so that no insert waits for the
/// network.
///
/// # Errors
/// Errors of a statement, such as a lock that others hold. The day is still locked then, until
/// [`roll_back`].
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

/// Ends the transaction of [`lock`] without a change.
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
