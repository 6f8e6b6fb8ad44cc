//! Whether a snapshot still shows what was in a table when it was taken.
//!
//! `ALTER TABLE` that rewrites a table is the exception to the rule that a snapshot shows the past:
//! to those taken before, the table looks empty afterwards, without an error (source: manual,
//! "Caveats" of concurrency control). Then nothing that was read, or not, says anything.

use slot_manager::{QualifiedName, quoted_literal};

use crate::error::{Code, Error, Result};
use crate::postgres::Sql;
use crate::table::altered_since;

/// The catalog as the snapshot shows it beside the catalog as it is: `pg_relation_filenode` and
/// `pg_partition_tree`, which has partitioned tables only, know the present alone. A partition that the
/// snapshot does not show was empty then; a whole table that it does not show has taken the place of
/// another one. Partitioned and foreign tables have no file.
fn is_rewritten(table: &str) -> String {
    format!(
        "SELECT bool_or(CASE WHEN c.oid IS NULL THEN t.is_whole WHEN c.relkind IN ('p', 'f') THEN false \
             ELSE c.relfilenode IS DISTINCT FROM pg_catalog.pg_relation_filenode(c.oid) END) \
         FROM (SELECT {table}::regclass AS relid, true AS is_whole UNION ALL \
             SELECT relid, false FROM pg_catalog.pg_partition_tree({table}::regclass) \
             WHERE isleaf) t \
         LEFT JOIN pg_catalog.pg_class c ON c.oid = t.relid"
    )
}

/// Locks the table and its partitions against a rewrite until the transaction of the snapshot ends,
/// and makes sure that there was none before.
///
/// # Errors
/// `slot-busy` if there was; those of a statement.
pub(super) async fn refuse_rewritten(snapshot: &Sql, table: &QualifiedName) -> Result<()> {
    // Reading locks all partitions, also when no row is asked for.
    let lock = format!("SELECT FROM {table} LIMIT 0");
    snapshot.batch_execute(&lock).await.map_err(altered_since)?;
    let look = is_rewritten(&quoted_literal(&table.to_string()));
    let row = snapshot
        .query_one(&look, &[])
        .await
        .map_err(altered_since)?;
    match row.get(0) {
        true => {
            let what = format!("{table} was rewritten since the snapshot in which it is read");
            Err(Error::new(Code::SlotBusy, what)
                .hint("no action needed: the relay begins again with a new snapshot"))
        }
        false => Ok(()),
    }
}
