//! Adds the columns and the index by which the rows of a captured table are identified and ordered.

use std::time::Duration;

use slot_manager::Finding;
use tokio_postgres::error::SqlState;

use super::not_the_owner;
use crate::capture::shape;
use crate::cli::check;
use crate::cli::init::script;
use crate::error::{Code, Error, Result};
use crate::mapping::TableSettings;
use crate::postgres::Sql;
use crate::settings::Settings;

/// Adds missing columns to the captured tables, and the index on `seq`, and reports what the tables
/// have afterwards.
pub(in crate::cli::init) async fn columns(sql: &Sql, settings: &Settings) -> Result<Vec<Finding>> {
    let mut findings = Vec::new();
    for table in &settings.tables {
        add_columns(sql, table).await?;
        let Some(shape) = shape::look(sql, table).await? else {
            continue;
        };
        let seq = shape.seq.as_ref();
        if seq.is_some_and(|seq| seq.column == "seq" && !seq.is_indexed)
            && (!shape.is_partitioned() || is_small(sql, table).await?)
        {
            add_index(sql, table, shape.is_partitioned()).await?;
        }
        if let Some(shape) = shape::look(sql, table).await? {
            findings.extend(check::capture::columns(table, &shape));
        }
    }
    Ok(findings)
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
    const STATEMENT: &str = "\
        select coalesce('process ' || l.pid || ', role ' || coalesce(a.usename, '?'), \
                        'a prepared transaction') \
        from pg_catalog.pg_locks l left join pg_catalog.pg_stat_activity a on a.pid = l.pid \
        where l.granted and l.pid is distinct from pg_catalog.pg_backend_pid() \
          and l.database = (select d.oid from pg_catalog.pg_database d \
                            where d.datname = current_database()) \
          and (l.relation = pg_catalog.to_regclass($1) or l.relation in ( \
              select t.relid from pg_catalog.pg_partition_tree(pg_catalog.to_regclass($1)) t)) \
        order by a.xact_start limit 1";
    let name = table.table.to_string();
    let holder = sql.query_opt(STATEMENT, &[&name]).await.ok().flatten();
    let holder = holder.map_or_else(|| "other transactions".to_owned(), |row| row.get(0));
    let what = format!("{what}: {holder} kept it locked");
    Error::new(Code::PostgresTimeout, what)
        .caused_by(error)
        .hint("wait until that transaction has ended, or end it; then run this again")
}

/// Creates the index on `seq`. That may take as long as the table is large, so no limit applies. A
/// build that was cut off has left an invalid index, which is dropped first.
async fn add_index(sql: &Sql, table: &TableSettings, is_partitioned: bool) -> Result<()> {
    const INVALID: &str = "\
        select pg_catalog.format('drop index concurrently %I.%I', n.nspname, c.relname) \
        from pg_catalog.pg_index i \
        join pg_catalog.pg_class c on c.oid = i.indexrelid and c.relkind = 'i' \
        join pg_catalog.pg_namespace n on n.oid = c.relnamespace \
        where i.indrelid = pg_catalog.to_regclass($1) and not i.indisvalid \
          and pg_catalog.pg_get_indexdef(i.indexrelid, 1, false) = 'seq' \
          and pg_catalog.pg_get_expr(i.indpred, i.indrelid) = '(seq IS NOT NULL)'";
    let failed = |error| not_the_owner(error, &format!("cannot index {}", table.table));
    let name = table.table.to_string();
    sql.batch_execute("set statement_timeout = 0").await?;
    for row in sql.query(INVALID, &[&name]).await? {
        sql.batch_execute(row.get(0)).await.map_err(failed)?;
    }
    let statement = script::index(table, !is_partitioned);
    sql.batch_execute(&statement).await.map_err(failed)?;
    sql.batch_execute("reset statement_timeout").await?;
    Ok(())
}

/// Whether the table is small enough to index it before a writer notices: less than 64 MiB.
async fn is_small(sql: &Sql, table: &TableSettings) -> Result<bool> {
    const STATEMENT: &str = "\
        select coalesce(sum(pg_catalog.pg_relation_size(relid)), 0) < 64 << 20 \
        from pg_catalog.pg_partition_tree(pg_catalog.to_regclass($1))";
    let row = sql
        .query_one(STATEMENT, &[&table.table.to_string()])
        .await?;
    Ok(row.get(0))
}
