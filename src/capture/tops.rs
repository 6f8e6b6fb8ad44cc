//! Finds the highest `seq` of each table. A later scan can start at that `seq` and skip the rows before
//! it.

use slot_manager::{QualifiedName, quoted_identifier, table};
use tokio_postgres::error::SqlState;

use super::shape::{FoundTable, LOWEST_SEQ};
use super::table::altered_since;
use crate::error::Result;
use crate::postgres::{Sql, current_snapshot};

/// The highest `seq` of each table, and the next transaction id. The transaction id is read last, so rows up to
/// the highest `seq` usually belong to transactions before `next_xid`. Once all transactions before `next_xid`
/// have ended, a scan for rows of later transactions can start at the highest `seq`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Tops {
    pub(crate) seqs: Vec<Option<Top>>,
    /// The next transaction id that PostgreSQL will assign.
    pub(crate) next_xid: u64,
}

/// The highest committed `seq` of one table, and the sequence that fills the column `seq`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Top {
    pub(crate) seq: i64,
    pub(crate) numbering: String,
}

/// Finds the highest `seq` of each table.
///
/// # Errors
/// Database errors.
pub(crate) async fn tops(sql: &Sql, tables: &[FoundTable]) -> Result<Tops> {
    let mut seqs = Vec::with_capacity(tables.len());
    for FoundTable { table, shape } in tables {
        let seq = shape.seq.as_ref();
        let seq = seq.filter(|seq| seq.is_steady && seq.is_indexed);
        let Some((seq, numbering)) = seq.and_then(|seq| Some((seq, seq.numbering.clone()?))) else {
            seqs.push(None);
            continue;
        };
        let top = match largest(sql, table, shape.oid, &seq.column).await {
            // The table is empty, so a later `seq` may be any number. Scans must start at the lowest one.
            Ok(largest) => largest.unwrap_or(i64::MIN),
            // The role that creates a slot need not have the right to read the tables. Without the highest
            // `seq`, later scans start at the first row.
            Err(error) if error.code() == Some(&SqlState::INSUFFICIENT_PRIVILEGE) => {
                seqs.push(None);
                continue;
            }
            Err(error) => return Err(altered_since(error)),
        };
        let top = Top {
            seq: top,
            numbering,
        };
        seqs.push(Some(top));
    }
    let next_xid = current_snapshot(&**sql).await?.xmax();
    Ok(Tops { seqs, next_xid })
}

/// Returns the highest committed `seq`, or `None` if the table is empty.
///
/// With this statement, PostgreSQL reads only the end of the index on `seq`. Two simpler statements may read much more:
///
/// - Without the condition `seq >= LOWEST_SEQ`, PostgreSQL reads the whole table. The index that `init` creates is a
///   partial index, with the condition `seq IS NOT NULL`. PostgreSQL uses a partial index only if the condition in the
///   statement implies the condition of the index. Every `seq` meets `seq >= LOWEST_SEQ`, so no row is left out.
///   `IS NOT NULL` in the statement would not do: if the column is `NOT NULL`, PostgreSQL 17 and later ignores it.
/// - With `max(seq)`, PostgreSQL reads the whole index if its statistics are older than the values of `seq`.
async fn largest(
    sql: &Sql,
    table: &QualifiedName,
    oid: u32,
    column: &str,
) -> Result<Option<i64>, tokio_postgres::Error> {
    let column = quoted_identifier(column);
    let statement = format!(
        "SELECT e.{column}::bigint FROM {table} e WHERE {} AND e.{column} >= {LOWEST_SEQ} \
         ORDER BY e.{column} DESC LIMIT 1",
        table::has_oid_sql(table, oid)
    );
    Ok(sql.query_opt(&statement, &[]).await?.map(|row| row.get(0)))
}
