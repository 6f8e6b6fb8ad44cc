//! Describes a table from the catalog, as the stream would describe it.

use decoder::{Oid, OwnedColumn, OwnedRelation, ReplicaIdentity};
use slot_manager::QualifiedName;

use super::column_types;
use crate::error::Result;
use crate::mapping::ColumnTypes;
use crate::postgres::Sql;

/// A generated column is included if a publication sends it, which is possible from PostgreSQL 18
/// on.
const COLUMNS: &str = "\
    select a.attname::text, a.atttypid, a.atttypmod \
    from pg_catalog.pg_attribute a \
    join pg_catalog.pg_class c on c.oid = a.attrelid and c.relkind in ('r', 'p') \
    join pg_catalog.pg_namespace n on n.oid = c.relnamespace \
    where n.nspname = $1 and c.relname = $2 \
      and a.attnum > 0 and not a.attisdropped \
      and (a.attgenerated = '' \
           or current_setting('server_version_num')::int >= 180000 and exists ( \
               select from pg_catalog.pg_publication_tables p \
               where p.schemaname = $1 and p.tablename = $2 \
                 and pg_catalog.to_jsonb(p) -> 'attnames' ? a.attname::text)) \
    order by a.attnum";

/// A table as the stream would describe it, and the types of its columns.
#[derive(Debug)]
pub(crate) struct Description {
    pub(crate) relation: OwnedRelation,
    pub(crate) types: ColumnTypes,
}

/// Describes a table from the catalog; `None` when it does not exist.
///
/// # Errors
/// Errors of a statement.
pub(crate) async fn describe(sql: &Sql, table: &QualifiedName) -> Result<Option<Description>> {
    let rows = sql.query(COLUMNS, &[&table.schema, &table.name]).await?;
    let columns: Vec<OwnedColumn> = rows
        .iter()
        .map(|row| OwnedColumn {
            is_key: false,
            name: row.get(0),
            type_oid: Oid(row.get(1)),
            type_modifier: row.get(2),
        })
        .collect();
    if columns.is_empty() {
        return Ok(None);
    }
    let relation = OwnedRelation {
        oid: Oid(0),
        namespace: table.schema.clone(),
        name: table.name.clone(),
        replica_identity: ReplicaIdentity::Default,
        columns,
    };
    let types = column_types::look_up(sql, &relation, &ColumnTypes::default()).await?;
    Ok(Some(Description { relation, types }))
}
