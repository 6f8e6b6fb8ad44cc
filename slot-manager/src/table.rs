//! The catalogue's description of a table: its columns, indexes and size.
//!
//! Not here: which columns identify and order its rows (`table_shape`).

use decoder::{Oid, OwnedColumn};
use tokio_postgres::types::Type;
use tokio_postgres::{Client, Row};

use crate::shown_name::shown;
use crate::slot::get;
use crate::sql::table as sql;
use crate::{QualifiedName, SlotError, query, quoted_identifier, quoted_literal};

/// An SQL condition: the row `e` was written before its partition was attached. Use it in a
/// statement that reads the rows of a captured table as `e`.
pub const WRITTEN_BEFORE_ATTACHED: &str = sql::WRITTEN_BEFORE_ATTACHED;

/// Whether there is a table or index of this name, quoted as in SQL.
///
/// # Errors
/// [`SlotError::Database`].
pub async fn exists(client: &Client, name: &str) -> Result<bool, SlotError> {
    let parameters = [(&name as _, Type::TEXT)];
    let row = query::single(client, "looking for a table", sql::EXISTS, &parameters).await?;
    get(&row, "exists")
}

/// Reads the columns that PostgreSQL streams for a table if the publication has no column list, in the order of the
/// stream. A generated column is among them only if a publication publishes it. Empty if the table does not exist.
///
/// # Errors
/// [`SlotError::Database`].
pub async fn streamed_columns(
    client: &Client,
    table: &QualifiedName,
) -> Result<Vec<OwnedColumn>, SlotError> {
    let action = "reading a table's columns";
    let parameters = [
        (&table.schema as _, Type::TEXT),
        (&table.name as _, Type::TEXT),
    ];
    let rows = query::all(client, action, sql::STREAMED_COLUMNS, &parameters).await?;
    let columns = rows.iter().map(|row| {
        Ok(OwnedColumn {
            is_key: false,
            name: get(row, "name")?,
            type_oid: Oid(get(row, "type_oid")?),
            type_modifier: get(row, "type_modifier")?,
        })
    });
    columns.collect()
}

/// A column that a table has now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PresentColumn {
    /// The name, without quotes.
    pub name: String,
    /// False if the column list of the publication leaves the column out.
    pub is_published: bool,
}

/// Reads the columns that a table has now, in the order of the table, without generated columns that the
/// publication does not send. Empty if the table does not exist.
///
/// # Errors
/// [`SlotError::Database`].
pub async fn present_columns(
    client: &Client,
    publication: &str,
    table: &QualifiedName,
) -> Result<Vec<PresentColumn>, SlotError> {
    let action = "reading a table's columns";
    let parameters = [
        (&table.schema as _, Type::TEXT),
        (&table.name as _, Type::TEXT),
        (&publication as _, Type::TEXT),
    ];
    let rows = query::all(client, action, sql::PRESENT_COLUMNS, &parameters).await?;
    let columns = rows.iter().map(|row| {
        Ok(PresentColumn {
            name: get(row, "name")?,
            is_published: get(row, "is_published")?,
        })
    });
    columns.collect()
}

/// Reads the name of a column's type; `None` if the table has no such column. `table` is quoted as
/// in SQL.
///
/// # Errors
/// [`SlotError::Database`], also when the table does not exist.
pub async fn type_of_column(
    client: &Client,
    table: &str,
    column: &str,
) -> Result<Option<String>, SlotError> {
    let action = "reading the type of a column";
    let parameters = [(&table as _, Type::TEXT), (&column as _, Type::TEXT)];
    let row = query::first(client, action, sql::TYPE_OF_COLUMN, &parameters).await?;
    row.map(|row| get(&row, "type_name")).transpose()
}

/// A column by which rows are looked up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LookupColumn {
    /// OID of the column's type; for a domain, of its base type.
    pub type_oid: u32,
    /// Whether an index can find the rows with one value of this column.
    pub is_indexed: bool,
}

/// Reads a column of the table with this OID; `None` if the table has no such column.
///
/// # Errors
/// [`SlotError::Database`].
pub async fn lookup_column(
    client: &Client,
    table_oid: u32,
    column: &str,
) -> Result<Option<LookupColumn>, SlotError> {
    let action = "reading the indexes of a column";
    let parameters = [(&table_oid as _, Type::OID), (&column as _, Type::TEXT)];
    let row = query::first(client, action, sql::ID_COLUMN, &parameters).await?;
    let lookup_column = |row: Row| {
        Ok(LookupColumn {
            type_oid: get(&row, "type_oid")?,
            is_indexed: get(&row, "is_indexed")?,
        })
    };
    row.map(lookup_column).transpose()
}

/// Whether the column has a unique index of its own; `None` if the table does not exist. Always
/// true for a partitioned table, because often only its partitions can have such an index.
///
/// # Errors
/// [`SlotError::Database`].
pub async fn is_unique(
    client: &Client,
    table: &QualifiedName,
    column: &str,
) -> Result<Option<bool>, SlotError> {
    let action = "looking for a unique index";
    let parameters = [
        (&table.schema as _, Type::TEXT),
        (&table.name as _, Type::TEXT),
        (&column as _, Type::TEXT),
    ];
    let row = query::first(client, action, sql::IS_UNIQUE, &parameters).await?;
    row.map(|row| get(&row, "is_unique")).transpose()
}

/// Lists the invalid indexes that interrupted index builds of `postrider init` have left behind: those on
/// the table's column `seq` with the condition `seq IS NOT NULL`.
///
/// # Errors
/// [`SlotError::Database`].
pub async fn invalid_seq_indexes(
    client: &Client,
    table: &QualifiedName,
) -> Result<Vec<QualifiedName>, SlotError> {
    let action = "looking for invalid indexes";
    let table = table.to_string();
    let parameters = [(&table as _, Type::TEXT)];
    let rows = query::all(client, action, sql::INVALID_SEQ_INDEXES, &parameters).await?;
    let names = rows.iter().map(|row| {
        let schema: String = get(row, "schema_name")?;
        let name: String = get(row, "name")?;
        Ok(QualifiedName { schema, name })
    });
    names.collect()
}

/// The total size of a table's partitions in bytes, without indexes; 0 if the table has no partitions.
///
/// # Errors
/// [`SlotError::Database`].
pub async fn size_of_partitions(client: &Client, table: &QualifiedName) -> Result<u64, SlotError> {
    let table = table.to_string();
    let parameters = [(&table as _, Type::TEXT)];
    let row = query::single(
        client,
        "reading a table's size",
        sql::SIZE_OF_PARTITIONS,
        &parameters,
    )
    .await?;
    let bytes: i64 = get(&row, "bytes")?;
    Ok(bytes.unsigned_abs())
}

/// A table that was once a partition of a captured table, or was the captured table itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FormerPartition {
    /// The table's OID.
    pub oid: u32,
    /// The table's current name.
    pub name: QualifiedName,
    /// The table's own OID, and the OIDs of all tables that contain it as a partition now.
    pub within: Vec<u32>,
    /// Whether a `DETACH CONCURRENTLY` of this partition has begun but not ended.
    pub is_pending: bool,
    /// The statements that let our role read all rows of the table; `None` if the role can already do so.
    pub needs: Option<String>,
}

/// Looks up tables by their OIDs. Omits OIDs that do not exist, and tables that store no rows of
/// their own.
///
/// # Errors
/// [`SlotError::Database`].
pub async fn former_partitions(
    client: &Client,
    oids: &[u32],
) -> Result<Vec<FormerPartition>, SlotError> {
    let action = "looking for detached partitions";
    let parameters = [(&oids as _, Type::OID_ARRAY)];
    let rows = query::all(client, action, sql::FORMER_PARTITIONS, &parameters).await?;
    rows.iter().map(FormerPartition::from_row).collect()
}

impl FormerPartition {
    fn from_row(row: &Row) -> Result<Self, SlotError> {
        let (schema, name): (String, String) = (get(row, "schema_name")?, get(row, "name")?);
        let name = QualifiedName { schema, name };
        let role = shown(row, "role")?.unwrap_or_default();
        let role = quoted_identifier(&role);
        let mut needs = Vec::new();
        if !get::<bool>(row, "may_use_schema")? {
            let schema = quoted_identifier(&name.schema);
            needs.push(format!("GRANT USAGE ON SCHEMA {schema} TO {role}"));
        }
        if !get::<bool>(row, "may_select")? {
            needs.push(format!("GRANT SELECT ON {name} TO {role}"));
        }
        if get(row, "hides_rows")? {
            needs.push(format!("ALTER TABLE {name} DISABLE ROW LEVEL SECURITY"));
        }
        Ok(Self {
            oid: get(row, "oid")?,
            within: get(row, "within")?,
            is_pending: get(row, "is_pending")?,
            needs: (!needs.is_empty()).then(|| needs.join("; ")),
            name,
        })
    }
}

/// Returns the OID of a table; `None` if the table does not exist.
///
/// # Errors
/// [`SlotError::Database`].
pub async fn oid(client: &Client, table: &QualifiedName) -> Result<Option<u32>, SlotError> {
    let parameters = [
        (&table.schema as _, Type::TEXT),
        (&table.name as _, Type::TEXT),
    ];
    let row = query::first(client, "looking for a table", sql::OID, &parameters).await?;
    row.map(|row| get(&row, "oid")).transpose()
}

/// Returns an SQL condition for a statement that reads the table `name`: true if the table has this OID. Otherwise the
/// statement fails with `undefined_table`, even if it finds no row. PostgreSQL skips the check if the planner can tell
/// that there is no row, for example in a partitioned table that has no partitions.
///
/// PostgreSQL looks up the name and locks the table before it computes the condition, and nobody can rename a locked
/// table. So the condition is about the table that the statement reads, even if tables change their names all the time.
/// (Renaming a schema locks no table.) In a statement that reads no table, the condition is about the table that has
/// the name at this moment.
///
/// The session must have pinned `search_path`.
#[must_use]
pub fn has_oid_sql(name: &QualifiedName, oid: u32) -> String {
    // A relation that does not exist. Only the error message shows this name.
    let missing = quoted_identifier(&format!("OID {oid}, {name}"));
    format!(
        "case when to_regclass({})::oid = {oid} then true else {}::text::regclass is not null end",
        quoted_literal(&name.to_string()),
        quoted_literal(&missing)
    )
}
