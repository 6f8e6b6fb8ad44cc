//! Reads from the catalog the types of the columns of a table that the stream describes, and whether that
//! table is the current table of its name.

use std::time::Duration;

use decoder::{Oid, OwnedRelation};
use slot_manager::column_types::{self, CatalogType};
use slot_manager::{QualifiedName, table};

use crate::error::Result;
use crate::mapping::{ColumnType, ColumnTypes};
use crate::postgres::{Sql, Target, connect};

/// The time limits are short, because a lookup delays the stream, and a session whose stream is delayed
/// for long ends.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(5);

/// Looks up every type of the table's columns that is not among `known`.
///
/// # Errors
/// Errors of a statement.
pub(crate) async fn look_up(
    sql: &Sql,
    relation: &OwnedRelation,
    known: &ColumnTypes,
) -> Result<ColumnTypes> {
    let unknown = || {
        let columns = relation.columns.iter();
        columns.filter(|column| known.is_unknown(column.type_oid))
    };
    let mut found = ColumnTypes::default();
    if unknown().next().is_none() {
        return Ok(found);
    }
    let columns: Vec<(Oid, &str)> = unknown()
        .map(|column| (column.type_oid, column.name.as_str()))
        .collect();
    let table = QualifiedName::new(&*relation.namespace, &*relation.name);
    let types = column_types::look_up(sql, &table, &columns).await?;
    // Each type is looked up only once, even if the catalog does not know it. Such a type counts as
    // text.
    for &(base, _) in &columns {
        let unnamed = ColumnType {
            base,
            name: format!("with oid {}", base.0).into(),
            has_order: false,
        };
        found.learn(base, unnamed);
    }
    for CatalogType {
        named,
        base,
        name,
        has_order,
    } in types
    {
        let name = name.into();
        found.learn(
            named,
            ColumnType {
                base,
                name,
                has_order,
            },
        );
    }
    Ok(found)
}

/// Looks up the types over a new connection, which is closed afterwards, because lookups are rare.
///
/// # Errors
/// Those of connecting and of a statement.
pub(crate) async fn look_up_apart(
    target: &Target,
    relation: &OwnedRelation,
    known: &ColumnTypes,
) -> Result<ColumnTypes> {
    let sql = connect(target, "postrider types", STATEMENT_TIMEOUT).await?;
    look_up(&sql, relation, known).await
}

/// Whether this relation is the table that now has its name. Reads the catalog over a new connection.
///
/// # Errors
/// Those of connecting and of a statement.
pub(crate) async fn is_current_apart(target: &Target, relation: &OwnedRelation) -> Result<bool> {
    let name = QualifiedName::new(&*relation.namespace, &*relation.name);
    let sql = connect(target, "postrider types", STATEMENT_TIMEOUT).await?;
    Ok(table::oid(&sql, &name).await? == Some(relation.oid.0))
}
