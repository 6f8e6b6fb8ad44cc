//! Finds the columns that distinguish and order the rows of a captured table.
//!
//! Not here: the SQL that reads rows by these columns. The code that reads the table contains that SQL.

use tokio_postgres::types::Type;
use tokio_postgres::{Client, Row};

use crate::slot::get;
use crate::sql::table as sql;
use crate::{QualifiedName, SlotError, query};

/// The columns to look for.
#[derive(Debug, Clone, Copy)]
pub struct ShapeColumns<'a> {
    /// The columns that can give the order of insertion, in order of preference.
    pub seq: &'a [&'a str],
    /// The one column of `seq` that is used only if a sequence fills it; empty if there is no such column.
    pub only_if_numbered: &'a str,
    /// The column with the version of an event's aggregate.
    pub version: &'a str,
}

/// The properties of a table that matter for capturing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableShape {
    /// The table's OID.
    pub oid: u32,
    /// The kind of the table's column `inserted_xid`.
    pub inserted_xid: InsertedXid,
    /// The values of `inserted_xid` in rows that were inserted before the column was added.
    pub missing_xids: Vec<u64>,
    /// The OIDs of the partitions that can hold rows (the leaves), or of the table itself, ascending,
    /// separated by commas.
    pub partitions: String,
    /// The OIDs in `partitions` whose files are not empty.
    pub filled: Vec<u32>,
    /// The OIDs of the partitions at every level, without the table itself.
    pub below: Vec<u32>,
    /// The OIDs of the tables that contain this table as a partition, up to the root.
    pub above: Vec<u32>,
    /// `oid:file number` of each partition that can hold rows, or of the table itself, separated by commas.
    pub files: String,
    /// `oid:transaction` of each partition at every level: the transaction that has attached it.
    pub attached: String,
    /// Number of blocks of the largest partition, or of the table.
    pub blocks: u32,
    /// The first of the columns [`ShapeColumns::seq`] that the table has and that holds whole numbers. The
    /// column [`ShapeColumns::only_if_numbered`] is skipped if no sequence fills it.
    pub seq: Option<SeqColumn>,
    /// Whether a subscription of logical replication writes into the table or one of its partitions.
    pub is_subscribed: bool,
    /// Whether the table has a column called `seq`, of any type.
    pub has_column_seq: bool,
    /// Whether the table has the version column with a whole-number type.
    pub has_version: bool,
}

/// The column `inserted_xid` of a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InsertedXid {
    /// The table has no such column.
    Missing,
    /// The column is `xid8 not null` and PostgreSQL fills it in.
    FilledIn,
    /// The column is not of type `xid8`.
    OtherType,
    /// The column is `xid8`, but is nullable or is not filled in by PostgreSQL.
    OtherValue,
}

/// The column that gives the order of insertion.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SeqColumn {
    /// The column's name.
    pub column: String,
    /// Whether a sequence hands out the numbers one by one. If so, then once a number is visible,
    /// every smaller number has been handed out.
    pub is_steady: bool,
    /// Whether an index is ordered by this column.
    pub is_indexed: bool,
    /// Whether the column is nullable.
    pub is_nullable: bool,
    /// The sequence's OID and file number; RESTART changes the file number. `None` when the column
    /// has no sequence.
    pub numbering: Option<String>,
}

/// A sequence that fills a column.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ColumnSequence {
    /// The sequence's name.
    pub name: QualifiedName,
    /// The number that the sequence hands out next.
    pub next: i64,
}

/// Reads the sequence that fills a column. Returns `None` if the column has no sequence, or if our role
/// cannot see the sequence's next number. A role with `USAGE` but without `SELECT` on the sequence sees the next
/// number only after the first `nextval`.
///
/// # Errors
/// [`SlotError::Database`].
pub async fn sequence(
    client: &Client,
    column: &SeqColumn,
) -> Result<Option<ColumnSequence>, SlotError> {
    let action = "reading a sequence";
    let numbering = column.numbering.as_deref().unwrap_or_default();
    let oid = numbering.split('/').next().and_then(|oid| oid.parse().ok());
    let oid: u32 = oid.unwrap_or_default();
    let parameters = [(&oid as _, Type::OID)];
    let row = query::first(client, action, sql::SEQUENCE, &parameters).await?;
    let Some(row) = row else { return Ok(None) };
    let (schema, name): (String, String) = (get(&row, "schema_name")?, get(&row, "name")?);
    let name = QualifiedName::new(schema, name);
    if !get::<bool>(&row, "is_readable")? {
        let last: Option<i64> = get(&row, "last_value")?;
        let next = last.map(|last| last.saturating_add(1));
        return Ok(next.map(|next| ColumnSequence { name, next }));
    }
    let next = format!("select last_value + is_called::int as next from {name}");
    let row = query::first(client, action, &next, &[]).await?;
    let next = row.map(|row| get(&row, "next")).transpose()?;
    Ok(next.map(|next| ColumnSequence { name, next }))
}

/// Reads the shape of a table; `None` if the table does not exist.
///
/// # Errors
/// [`SlotError::Database`].
pub async fn read(
    client: &Client,
    table: &QualifiedName,
    columns: ShapeColumns<'_>,
) -> Result<Option<TableShape>, SlotError> {
    let action = "reading a table's shape";
    let parameters = [
        (&table.schema as _, Type::TEXT),
        (&table.name as _, Type::TEXT),
        (&columns.seq as _, Type::TEXT_ARRAY),
        (&columns.version as _, Type::TEXT),
        (&columns.only_if_numbered as _, Type::TEXT),
    ];
    let row = query::first(client, action, sql::SHAPE, &parameters).await?;
    row.as_ref().map(TableShape::from_row).transpose()
}

impl TableShape {
    fn from_row(row: &Row) -> Result<Self, SlotError> {
        let missing: Vec<String> = get(row, "missing_xids")?;
        let partitions: Option<String> = get(row, "partitions")?;
        let files: Option<String> = get(row, "files")?;
        let attached: Option<String> = get(row, "attached")?;
        let blocks: Option<i64> = get(row, "blocks")?;
        Ok(Self {
            oid: get(row, "oid")?,
            inserted_xid: InsertedXid::from_row(row)?,
            missing_xids: missing.iter().filter_map(|xid| xid.parse().ok()).collect(),
            partitions: partitions.unwrap_or_default(),
            filled: get(row, "filled")?,
            below: get(row, "below")?,
            above: get(row, "above")?,
            files: files.unwrap_or_default(),
            attached: attached.unwrap_or_default(),
            blocks: u32::try_from(blocks.unwrap_or_default()).unwrap_or(u32::MAX),
            seq: SeqColumn::from_row(row)?,
            is_subscribed: get(row, "is_subscribed")?,
            has_column_seq: get(row, "has_column_seq")?,
            has_version: get(row, "has_version")?,
        })
    }
}

impl InsertedXid {
    fn from_row(row: &Row) -> Result<Self, SlotError> {
        let is_filled_in: bool = get(row, "is_filled_in")?;
        let is_xid8: Option<bool> = get(row, "is_xid8")?;
        Ok(match is_xid8 {
            _ if is_filled_in => Self::FilledIn,
            None => Self::Missing,
            Some(false) => Self::OtherType,
            Some(true) => Self::OtherValue,
        })
    }
}

impl SeqColumn {
    fn from_row(row: &Row) -> Result<Option<Self>, SlotError> {
        let Some(column) = get(row, "seq_column")? else {
            return Ok(None);
        };
        let is_numbered: Option<bool> = get(row, "is_numbered")?;
        let cache: Option<i64> = get(row, "seqcache")?;
        Ok(Some(Self {
            column,
            is_steady: is_numbered == Some(true) && cache == Some(1),
            is_indexed: get::<Option<bool>>(row, "is_indexed")? == Some(true),
            is_nullable: get::<Option<bool>>(row, "is_nullable")? != Some(false),
            numbering: get(row, "numbering")?,
        }))
    }
}
