//! Adds the columns and the index that identify and order the rows of a captured table.

use std::time::Duration;

use slot_manager::table::{invalid_seq_indexes, size_of_partitions};
use slot_manager::{Finding, activity};
use tokio_postgres::error::SqlState;

use super::not_the_owner;
use crate::capture::shape;
use crate::cli::check;
use crate::cli::init::script;
use crate::error::{Code, Error, Result};
use crate::mapping::TableSettings;
use crate::postgres::Sql;
use crate::settings::Settings;

/// Maximum size of a partitioned table to index. Building the index blocks writers, but at this
/// size only for a moment.
const SMALL_BYTES: u64 = 64 << 20;

/// Adds missing columns and the index on `seq` to the captured tables, and reports the result.
pub(in crate::cli::init) async fn columns(sql: &Sql, settings: &Settings) -> Result<Vec<Finding>> {
    let mut findings = Vec::new();
    for table in &settings.tables {
        add_columns(sql, table).await?;
        if lacks_index(sql, table).await?.is_some() {
            lock_indexes(sql).await?;
            let indexed = index(sql, table).await;
            let unlocked = activity::advisory_unlock(sql, INDEX_LOCK).await;
            indexed?;
            unlocked?;
        }
        if let Some(shape) = shape::read(sql, table).await? {
            findings.extend(check::capture::columns(table, &shape));
        }
    }
    Ok(findings)
}

/// Key of the advisory lock held while creating an index. Without it, another `init` would mistake our
/// unfinished index for one whose build was interrupted, and drop it.
const INDEX_LOCK: i64 = 0x706f_7374_7269_6466;

/// Pause between two attempts to get this lock.
const INDEX_LOCK_PAUSE: Duration = Duration::from_millis(200);

/// Waits until no other `init` creates an index. Polls the lock, because a session that waits for
/// it in one statement would hold up the `create index concurrently` of the other `init`.
async fn lock_indexes(sql: &Sql) -> Result<()> {
    let mut waits = 0;
    while !activity::try_advisory_lock(sql, INDEX_LOCK).await? {
        waits += 1;
        if waits == 10 {
            let holder = activity::advisory_lock_holder(sql, INDEX_LOCK).await?;
            let holder = holder.map_or_else(String::new, |one| format!(" ({one})"));
            eprintln!("waiting for another `postrider init`{holder} that creates an index");
        }
        tokio::time::sleep(INDEX_LOCK_PAUSE).await;
    }
    Ok(())
}

/// Creates the index on `seq`, unless another `init` has done that.
async fn index(sql: &Sql, table: &TableSettings) -> Result<()> {
    match lacks_index(sql, table).await? {
        Some(is_partitioned) => add_index(sql, table, is_partitioned).await,
        None => Ok(()),
    }
}

/// `None` if the index on `seq` exists or must not be created, otherwise whether the table is
/// partitioned. On a large partitioned table, creating the index would hold up the writers.
async fn lacks_index(sql: &Sql, table: &TableSettings) -> Result<Option<bool>> {
    let Some(shape) = shape::read(sql, table).await? else {
        return Ok(None);
    };
    let seq = shape.seq.as_ref();
    let is_missing = seq.is_some_and(|seq| seq.column == "seq" && !seq.is_indexed);
    let is_partitioned = shape.is_partitioned();
    let may_create = !is_partitioned || size_of_partitions(sql, &table.table).await? < SMALL_BYTES;
    Ok((is_missing && may_create).then_some(is_partitioned))
}

/// How long to wait for the lock on a table. New writers wait behind us meanwhile.
const TABLE_LOCK_TIMEOUT: &str = "1s";
/// How many times to try, and the pause in which the writers continue.
const TABLE_LOCK_TRIES: u32 = 8;
const TABLE_LOCK_PAUSE: Duration = Duration::from_secs(1);

async fn add_columns(sql: &Sql, table: &TableSettings) -> Result<()> {
    let what = format!("cannot add columns to {}", table.table);
    let adding = format!(
        "set lock_timeout = '{TABLE_LOCK_TIMEOUT}'; {}",
        script::columns(table)
    );
    let mut tries = 1;
    loop {
        let added = sql.batch_execute(&adding).await;
        sql.batch_execute("reset lock_timeout").await?;
        match added {
            Ok(()) => return Ok(()),
            Err(error) if error.code() != Some(&SqlState::LOCK_NOT_AVAILABLE) => {
                return Err(not_the_owner(error, &what));
            }
            Err(error) if tries == TABLE_LOCK_TRIES => {
                return Err(locked_table(sql, table, &what, error).await);
            }
            Err(_) => tokio::time::sleep(TABLE_LOCK_PAUSE).await,
        }
        tries += 1;
    }
}

/// The error when a table stayed locked, with the oldest transaction that holds a lock on it.
async fn locked_table(
    sql: &Sql,
    table: &TableSettings,
    what: &str,
    error: tokio_postgres::Error,
) -> Error {
    let name = table.table.to_string();
    let holder = activity::table_lock_holder(sql, &name).await.ok().flatten();
    let holder = holder.map_or_else(|| "other transactions".to_owned(), |one| one.to_string());
    let what = format!("{what}: {holder} kept it locked");
    Error::new(Code::PostgresTimeout, what)
        .caused_by(error)
        .hint("wait until that transaction has ended, or end it; then run this again")
}

/// Creates the index on `seq`. On a large table this takes long, so no time limit applies. An
/// interrupted build leaves an invalid index, which is dropped first.
async fn add_index(sql: &Sql, table: &TableSettings, is_partitioned: bool) -> Result<()> {
    let failed = |error| not_the_owner(error, &format!("cannot index {}", table.table));
    sql.batch_execute("set statement_timeout = 0").await?;
    for index in invalid_seq_indexes(sql, &table.table).await? {
        let drop_it = format!("drop index concurrently {index}");
        sql.batch_execute(&drop_it).await.map_err(failed)?;
    }
    let statement = script::index(table, !is_partitioned);
    sql.batch_execute(&statement).await.map_err(failed)?;
    sql.batch_execute("reset statement_timeout").await?;
    Ok(())
}
