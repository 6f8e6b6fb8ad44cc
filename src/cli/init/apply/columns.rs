//! Adds the columns and the index that identify and order the rows of a captured table.

use std::time::Duration;

use slot_manager::table::{invalid_seq_indexes, size_of_partitions};
use slot_manager::{Finding, Severity, activity, publication};
use tokio_postgres::error::SqlState;

use super::{drift, not_the_owner};
use crate::capture::shape;
use crate::cli::findings::finding_with_remedy;
use crate::cli::init::script;
use crate::cli::{check, report};
use crate::error::{Code, Error, Result};
use crate::mapping::TableSettings;
use crate::postgres::Sql;
use crate::settings::Settings;
use crate::store::capture_record;

/// Maximum size, in bytes, of a partitioned table on which `init` creates the index. PostgreSQL cannot create the
/// index of a partitioned table concurrently, so writers have to wait. Up to this size the wait is short.
const SMALL_BYTES: u64 = 64 << 20;

/// Adds missing columns and the index on `seq` to the captured tables, and reports the result. A table gets no
/// columns if its column list in the publication would leave out `inserted_xid`, because a running relay would
/// then have to wait until an operator has corrected the list.
pub(in crate::cli::init) async fn columns(sql: &Sql, settings: &Settings) -> Result<Vec<Finding>> {
    let captured = settings.captured();
    let published = publication::inspect(sql, &settings.publication, &captured).await?;
    let mut findings = Vec::new();
    for table in &settings.tables {
        if let Some(problem) = published.would_leave_out_inserted_xid(&table.table) {
            findings.push(drift(&problem));
            continue;
        }
        let before = shape::read(sql, table).await?;
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
            if before.is_some_and(|before| !before.has_inserted_xid) && shape.has_inserted_xid {
                findings.extend(new_column(sql, table, shape.oid).await?);
            }
            // `init` has already changed this table, so ignore an error here. `postrider check` reports the
            // error later.
            let behind = check::capture::sequence(sql, table, &shape).await;
            findings.extend(behind.ok().flatten());
        }
    }
    Ok(findings)
}

/// Returns a note if `init` has added `inserted_xid` to a table that is already captured. All old rows of the
/// table get the same `inserted_xid`. Until the floor is above this `inserted_xid`, the relay uses the `xmin`
/// of these rows instead, so an update makes an old row look new.
async fn new_column(sql: &Sql, table: &TableSettings, oid: u32) -> Result<Option<Finding>> {
    let records = capture_record::read(&**sql).await?;
    let is_captured = records.iter().any(|record| record.oid == oid);
    let what = format!(
        "table {} is captured, and now has the column inserted_xid: for a while, the relay publishes an old row \
         again if you update it",
        table.table
    );
    let remedy = "before you update old rows, let the relay run for ten minutes, or start it again and wait a \
                  minute";
    Ok(is_captured.then(|| finding_with_remedy(Severity::Info, "capture-columns", what, remedy)))
}

/// Key of the advisory lock held while creating an index. Without this lock, another `init` would take our
/// unfinished index for one whose build was interrupted, and drop it.
const INDEX_LOCK: i64 = 0x706f_7374_7269_6466;

/// Pause between two attempts to get [`INDEX_LOCK`].
const INDEX_LOCK_PAUSE: Duration = Duration::from_millis(200);

/// Waits until no other `init` creates an index. Polls the lock, because a waiting statement of ours would
/// block the other `init`: its `create index concurrently` waits for the statements of other sessions.
async fn lock_indexes(sql: &Sql) -> Result<()> {
    let mut waits = 0;
    while !activity::try_advisory_lock(sql, INDEX_LOCK).await? {
        waits += 1;
        if waits == 10 {
            let holder = activity::advisory_lock_holder(sql, INDEX_LOCK).await?;
            let holder = holder.map_or_else(String::new, |one| format!(" ({one})"));
            report::write(&format!(
                "waiting for another `postrider init`{holder} that creates an index"
            ));
        }
        tokio::time::sleep(INDEX_LOCK_PAUSE).await;
    }
    Ok(())
}

/// Creates the index on `seq`, unless another `init` has created it in the meantime.
async fn index(sql: &Sql, table: &TableSettings) -> Result<()> {
    match lacks_index(sql, table).await? {
        Some(is_partitioned) => add_index(sql, table, is_partitioned).await,
        None => Ok(()),
    }
}

/// Finds out whether `init` has to create the index on `seq`. If so, returns whether the table is partitioned, which
/// [`add_index`] must know. Otherwise returns `None`. On a large partitioned table `init` does not create the index,
/// because writers would have to wait.
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

/// How long one attempt waits for the lock on a table. The time is short, because new writers queue behind our
/// request for the lock.
const TABLE_LOCK_TIMEOUT: &str = "1s";
/// Maximum number of attempts to lock a table.
const TABLE_LOCK_TRIES: u32 = 8;
/// Pause between two attempts to lock a table, in which the writers continue.
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

/// Returns the error for a table that stayed locked. It names the oldest transaction that holds a lock
/// on the table.
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
    sql.batch_execute("set statement_timeout = 0").await?;
    let added = replace_index(sql, table, is_partitioned).await;
    sql.batch_execute("reset statement_timeout").await?;
    added
}

async fn replace_index(sql: &Sql, table: &TableSettings, is_partitioned: bool) -> Result<()> {
    let failed = |error| not_the_owner(error, &format!("cannot index {}", table.table));
    for index in invalid_seq_indexes(sql, &table.table).await? {
        let drop_it = format!("drop index concurrently {index}");
        sql.batch_execute(&drop_it).await.map_err(failed)?;
    }
    let statement = script::index(table, !is_partitioned);
    sql.batch_execute(&statement).await.map_err(failed)
}
