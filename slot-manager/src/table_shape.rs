//! Finds the columns that distinguish and order the rows of a captured table.
//!
//! Not here: the SQL that reads rows by these columns, which belongs to the reader of the table.

use tokio_postgres::types::Type;
use tokio_postgres::{Client, Row};

use crate::slot::get;
use crate::sql::table as sql;
use crate::{QualifiedName, SlotError, query};

/// The columns to look for.
#[derive(Debug, Clone, Copy)]
pub struct ShapeColumns<'a> {
    /// The columns that may give the order of insertion, in order of preference.
    pub seq: &'a [&'a str],
    /// The column of `seq` that counts only if a sequence fills it; empty if each column of `seq` counts.
    pub only_if_numbered: &'a str,
    /// The column with the version of an event's aggregate.
    pub version: &'a str,
}

/// The properties of a table that matter for capturing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableShape {
    /// Its OID.
    pub oid: u32,
    /// Its column `inserted_xid`.
    pub inserted_xid: InsertedXid,
    /// The values of `inserted_xid` in rows that are older than the column.
    pub missing_xids: Vec<u64>,
    /// The OIDs of its partitions, or its own OID, ascending and separated by commas.
    pub partitions: String,
    /// The OIDs of those partitions, or of the table, whose files are not empty.
    pub filled: Vec<u32>,
    /// The OIDs of its partitions at every level, without its own.
    pub below: Vec<u32>,
    /// The OIDs of the tables of which it is a partition, up to the root.
    pub above: Vec<u32>,
    /// `oid:file number` of each partition, or of the table itself, separated by commas.
    pub files: String,
    /// Blocks of the largest partition, or of the table.
    pub blocks: u32,
    /// The first of [`ShapeColumns::seq`] that is in the table, holds whole numbers and counts.
    pub seq: Option<SeqColumn>,
    /// Whether it has a column called `seq`, of any type.
    pub has_column_seq: bool,
    /// Whether it has the version column, and the type of that column is a whole number.
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
    /// Its name.
    pub column: String,
    /// Whether a sequence hands out its numbers one by one. If so, once a number is visible, every
    /// smaller number has been handed out.
    pub is_steady: bool,
    /// Whether an index is ordered by this column.
    pub is_indexed: bool,
    /// Whether a row may have NULL in this column.
    pub is_nullable: bool,
    /// The sequence's OID and file number; RESTART changes the file number. `None` when the column
    /// has no sequence.
    pub numbering: Option<String>,
}

/// Reads the shape of a table; `None` when the table does not exist.
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
            blocks: u32::try_from(blocks.unwrap_or_default()).unwrap_or(u32::MAX),
            seq: SeqColumn::from_row(row)?,
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
