//! Looks up a table in the catalogue after the stream has described the table: the types of its columns, the columns
//! that it has now, and whether another table has replaced it under the same name.

use std::time::Duration;

use decoder::{Oid, OwnedRelation};
use slot_manager::QualifiedName;
use slot_manager::column_types::{self, CatalogType};
use slot_manager::table::{self, PresentColumn};

use crate::error::Result;
use crate::mapping::{ColumnType, ColumnTypes};
use crate::postgres::{Sql, Target, connect};

/// Maximum duration of a look-up. Short, because the relay does not read the stream during a look-up, and the
/// session ends if that takes too long.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(5);

/// Looks up every type of the table's columns that is not among `known`.
///
/// # Errors
/// Database errors.
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
    // First remember every type as a dropped type. The types that the catalogue has found then replace these entries.
    // So the relay does not look up a type again that the catalogue does not know.
    for &(base, _) in &columns {
        let unnamed = ColumnType {
            base,
            name: format!("with oid {}", base.0).into(),
            has_order: false,
            is_dropped: true,
        };
        found.learn(base, unnamed);
    }
    for CatalogType {
        named,
        base,
        is_dropped,
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
                is_dropped,
            },
        );
    }
    Ok(found)
}

/// Looks up the types over a new connection, and closes it afterwards, because look-ups are rare.
///
/// # Errors
/// Connection and database errors.
pub(crate) async fn look_up_apart(
    target: &Target,
    relation: &OwnedRelation,
    known: &ColumnTypes,
) -> Result<ColumnTypes> {
    let sql = connect(target, "postrider types", STATEMENT_TIMEOUT).await?;
    look_up(&sql, relation, known).await
}

/// Returns the columns that the table has now; none if there is no such table. Reads the catalogue over a new
/// connection.
///
/// # Errors
/// Connection and database errors.
pub(crate) async fn columns_apart(
    target: &Target,
    publication: &str,
    name: &QualifiedName,
) -> Result<Vec<PresentColumn>> {
    let sql = connect(target, "postrider types", STATEMENT_TIMEOUT).await?;
    Ok(table::present_columns(&sql, publication, name).await?)
}

/// Whether the table that now has the relation's name also has the relation's OID. Returns false if the table that the
/// stream has described was dropped, renamed or replaced. Reads the catalogue over a new connection.
///
/// # Errors
/// Connection and database errors.
pub(crate) async fn is_current_apart(target: &Target, relation: &OwnedRelation) -> Result<bool> {
    let name = QualifiedName::new(&*relation.namespace, &*relation.name);
    let sql = connect(target, "postrider types", STATEMENT_TIMEOUT).await?;
    Ok(table::oid(&sql, &name).await? == Some(relation.oid.0))
}
