//! Describes a table from the catalogue, as the stream would describe it.

use decoder::{Oid, OwnedRelation, ReplicaIdentity};
use slot_manager::{QualifiedName, table};

use super::column_types;
use crate::error::Result;
use crate::mapping::ColumnTypes;
use crate::postgres::Sql;

/// A table as the stream would describe it, and the types of its columns.
#[derive(Debug)]
pub(crate) struct Description {
    pub(crate) relation: OwnedRelation,
    pub(crate) types: ColumnTypes,
}

/// Describes a table from the catalogue; `None` when it does not exist.
///
/// # Errors
/// Database errors.
pub(crate) async fn describe(sql: &Sql, table: &QualifiedName) -> Result<Option<Description>> {
    let columns = table::streamed_columns(sql, table).await?;
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
