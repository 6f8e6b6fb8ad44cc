//! Looks up the types of a table's columns in the catalogue.

use decoder::Oid;
use tokio_postgres::Client;
use tokio_postgres::types::Type;

use crate::slot::get;
use crate::sql::table as sql;
use crate::{QualifiedName, SlotError, query};

/// A column type whose oid the stream has sent, as the catalogue describes it now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CatalogType {
    /// The oid from the stream.
    pub named: Oid,
    /// Oid of the base type. If the type was dropped, the base type that the column has now.
    pub base: Oid,
    /// Whether the type with the oid `named` was dropped.
    pub is_dropped: bool,
    /// Name of the type with the oid `named`, as PostgreSQL prints it. `???` if this type was dropped.
    pub name: String,
    /// Whether the base type is one of PostgreSQL's own scalar types whose values PostgreSQL can sort, and whose
    /// text form PostgreSQL can parse again.
    pub has_order: bool,
}

/// Looks up the types of some columns of a table. Omits a type if both the type and its column have
/// been dropped.
///
/// The stream describes a table as it was when its rows were written. If a type was dropped since then, this
/// function looks up the type that the column of this name has now. That is only a guess: the values in the stream
/// have the text form of the dropped type.
///
/// # Errors
/// [`SlotError::Database`].
pub async fn look_up(
    client: &Client,
    table: &QualifiedName,
    columns: &[(Oid, &str)],
) -> Result<Vec<CatalogType>, SlotError> {
    let action = "reading the types of columns";
    let oids: Vec<u32> = columns.iter().map(|(oid, _)| oid.0).collect();
    let names: Vec<&str> = columns.iter().map(|(_, name)| *name).collect();
    let parameters = [
        (&oids as _, Type::OID_ARRAY),
        (&names as _, Type::TEXT_ARRAY),
        (&table.schema as _, Type::TEXT),
        (&table.name as _, Type::TEXT),
    ];
    let rows = query::all(client, action, sql::BASE_TYPES, &parameters).await?;
    let types = rows.iter().map(|row| {
        Ok(CatalogType {
            named: Oid(get(row, "type_oid")?),
            base: Oid(get(row, "base_oid")?),
            is_dropped: get(row, "is_dropped")?,
            name: get(row, "name")?,
            has_order: get(row, "has_order")?,
        })
    });
    types.collect()
}
