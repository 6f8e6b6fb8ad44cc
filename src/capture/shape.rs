//! Finds the columns by which the rows of a captured table can be bounded and ordered.
//!
//! - `inserted_xid` names the transaction that inserted a row. In a table without this column, the
//!   row's `xmin` is used, which says less: see [`Shape::inserted_xid_sql`].
//! - `seq` grows with each insert. Services hold the lock of their aggregate while they insert, so
//!   `seq` has the order of each key. The `seq` column is the column named in the settings, a column
//!   called `seq`, or an id column that a sequence fills. Without a `seq`, rows are ordered by their
//!   version, if the version is a whole number, and then by their transaction.

use std::collections::HashSet;

use slot_manager::QualifiedName;
use slot_manager::table_shape::{self, InsertedXid, SeqColumn, ShapeColumns};

use crate::error::{Code, Error, Result};
use crate::mapping::TableSettings;
use crate::postgres::Sql;

/// The lowest id that PostgreSQL gives to an ordinary transaction.
pub(crate) const FIRST_NORMAL_XID: u64 = 3;

/// `xmin` of a row of `e`, extended to 64 bits.
const BY_XMIN: &str = "\
    (select (next.xid - pg_catalog.mod(pg_catalog.mod(next.xid - e.xmin::text::bigint, \
        4294967296) + 4294967296, 4294967296))::text::xid8 \
     from (select pg_catalog.pg_snapshot_xmax(pg_catalog.pg_current_snapshot())\
        ::text::bigint) next (xid))";

/// The properties of a table that matter for capturing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) oid: u32,
    /// Whether `inserted_xid` names the transaction of every row: it is `xid8 not null` and
    /// PostgreSQL fills it in.
    pub(crate) has_inserted_xid: bool,
    /// Set if the table has a column `inserted_xid` that does not name the transaction of every row. With
    /// [`UnfitColumn::Value`] the column is still part of event ids.
    pub(crate) unfit_inserted_xid: Option<UnfitColumn>,
    /// Whether the table has a column called `seq`, of any type.
    pub(crate) has_column_seq: bool,
    /// The values of `inserted_xid` in rows that are older than the column.
    pub(crate) missing_xids: Vec<u64>,
    /// The OIDs of the table's partitions, or the table's own OID if it has none, ascending and separated
    /// by commas.
    pub(crate) partitions: String,
    /// The OIDs of the partitions that are not empty.
    pub(crate) filled: Vec<u32>,
    /// The OIDs of its partitions at every level.
    pub(crate) below: Vec<u32>,
    /// The OIDs of the tables of which it is a partition, up to the root.
    pub(crate) above: Vec<u32>,
    /// `oid:file number` of each partition. A new file number means that the table was rewritten.
    pub(crate) files: String,
    /// Blocks of the largest partition, or of the table.
    pub(crate) blocks: u32,
    pub(crate) seq: Option<SeqColumn>,
    /// The version column, if its type is a whole number.
    pub(crate) version: Option<String>,
}

/// A table as it is in the catalog now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FoundTable {
    pub(crate) table: QualifiedName,
    pub(crate) shape: Shape,
}

/// Why a column `inserted_xid` does not name the transaction of every row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum UnfitColumn {
    /// The column is not of type `xid8`.
    Type,
    /// The column is of type `xid8`, but it may be null or has another default.
    Value,
}

/// Reads the shape of a table from the catalog; `None` when the table does not exist.
///
/// # Errors
/// `column-missing` when `columns.seq` does not name a column of whole numbers; those of a
/// statement.
pub(crate) async fn read(sql: &Sql, settings: &TableSettings) -> Result<Option<Shape>> {
    let table = &settings.table;
    let named = settings.columns.seq.as_deref();
    let id = settings.columns.id.as_deref().unwrap_or("id");
    let version = settings.columns.version.as_deref().unwrap_or("version");
    let wanted: Vec<&str> = match named {
        Some("") => Vec::new(),
        Some(named) => vec![named],
        None => vec!["seq", id],
    };
    // Ids may be in any order unless a sequence fills them. So if the settings do not name a `seq`, the
    // id column counts only if a sequence fills it.
    let only_if_numbered = if named.is_none() { id } else { "" };
    let wanted = ShapeColumns {
        seq: &wanted,
        only_if_numbered,
        version,
    };
    let Some(found) = table_shape::read(sql, table, wanted).await? else {
        return Ok(None);
    };
    if let (None, Some(named)) = (&found.seq, named.filter(|named| !named.is_empty())) {
        return Err(no_such_column(table, named));
    }
    Ok(Some(Shape {
        oid: found.oid,
        has_inserted_xid: found.inserted_xid == InsertedXid::FilledIn,
        unfit_inserted_xid: match found.inserted_xid {
            InsertedXid::OtherType => Some(UnfitColumn::Type),
            InsertedXid::OtherValue => Some(UnfitColumn::Value),
            InsertedXid::FilledIn | InsertedXid::Missing => None,
        },
        has_column_seq: found.has_column_seq,
        missing_xids: found.missing_xids,
        partitions: found.partitions,
        filled: found.filled,
        below: found.below,
        above: found.above,
        files: found.files,
        blocks: found.blocks,
        seq: found.seq,
        version: found.has_version.then(|| version.to_owned()),
    }))
}

/// Returns an error if the table was rewritten or replaced since `before`. A rewrite gives the rows new
/// `ctid`s, so a walk by `ctid` may have missed some rows.
///
/// # Errors
/// `slot-busy`; those of [`read`].
pub(crate) async fn refuse_rewritten(
    sql: &Sql,
    settings: &TableSettings,
    before: &Shape,
) -> Result<()> {
    match read(sql, settings).await? {
        Some(now) if now.oid == before.oid && !was_rewritten(&before.files, &now.files) => Ok(()),
        Some(_) | None => {
            let what = format!(
                "{} was rewritten or replaced while the relay read it",
                settings.table
            );
            Err(Error::new(Code::SlotBusy, what).hint("no action needed: the relay reads it again"))
        }
    }
}

/// Whether a table or partition has another file than before. Partitions may come and go.
fn was_rewritten(before: &str, now: &str) -> bool {
    let oid = |file: &str| file.split(':').next().map(str::to_owned);
    let before: HashSet<&str> = before.split(',').collect();
    let oids: HashSet<_> = before.iter().map(|file| oid(file)).collect();
    now.split(',')
        .any(|file| oids.contains(&oid(file)) && !before.contains(file))
}

fn no_such_column(table: &QualifiedName, named: &str) -> Error {
    let what = format!("table {table} has no column {named:?} of an integer type");
    Error::new(Code::ColumnMissing, what).hint(
        "set `columns.seq` to the column that numbers the rows in their order of insertion, such as \
         a bigserial, or leave it out",
    )
}

impl Shape {
    /// Whether event ids are computed with the column `inserted_xid`, as they are for rows of the stream.
    pub(crate) fn has_xid_in_ids(&self) -> bool {
        self.has_inserted_xid || self.unfit_inserted_xid == Some(UnfitColumn::Value)
    }

    pub(crate) fn is_partitioned(&self) -> bool {
        self.partitions != self.oid.to_string()
    }

    /// The `seq` column, if it has an index along which rows are read. Without an index, each page
    /// would sort the whole table.
    pub(crate) fn numbered(&self) -> Option<&SeqColumn> {
        self.seq.as_ref().filter(|seq| seq.is_indexed)
    }

    /// The transaction that inserted a row of `e`, as `xid8`.
    ///
    /// Uses `xmin` in a table without `inserted_xid`, for a row that is older than the column, and for a
    /// row whose writer has set the column to an impossible transaction id. `xmin` has 32 bits, may name
    /// a subtransaction, and is lost when the table is rewritten. The expression extends `xmin` to the
    /// latest transaction id with these lower bits.
    pub(crate) fn inserted_xid_sql(&self, added_xids: &[u64]) -> String {
        self.xid_sql(&self.has_own_xid_sql(), added_xids)
    }

    /// Like [`inserted_xid_sql`](Self::inserted_xid_sql), but an `inserted_xid` from `next_xid` on counts
    /// as impossible.
    pub(crate) fn xid_before_sql(&self, next_xid: u64, added_xids: &[u64]) -> String {
        let own = format!(
            "(e.inserted_xid >= '{FIRST_NORMAL_XID}'::xid8 and e.inserted_xid < '{next_xid}'::xid8)"
        );
        self.xid_sql(&own, added_xids)
    }

    fn xid_sql(&self, own: &str, added_xids: &[u64]) -> String {
        if !self.has_inserted_xid {
            return BY_XMIN.to_owned();
        }
        let added = match added_xids {
            [] => String::new(),
            added => format!("and e.inserted_xid <> all ({}) ", xids_sql(added)),
        };
        format!("case when {own} {added}then e.inserted_xid else {BY_XMIN} end")
    }

    /// The condition that the column `inserted_xid` of a row of `e` holds a possible transaction id. The
    /// writer of the row may have set another value.
    pub(crate) fn has_own_xid_sql(&self) -> String {
        format!(
            "(e.inserted_xid >= '{FIRST_NORMAL_XID}'::xid8 \
             and e.inserted_xid < pg_catalog.pg_snapshot_xmax(pg_catalog.pg_current_snapshot()))"
        )
    }

    /// Whether a partition with rows was added since `known` was recorded.
    pub(crate) fn has_grown_since(&self, known: &str) -> bool {
        let known: HashSet<&str> = known.split(',').collect();
        let mut filled = self.filled.iter();
        filled.any(|leaf| !known.contains(leaf.to_string().as_str()))
    }

    /// Whether [`inserted_xid_sql`](Self::inserted_xid_sql) gives top-level transactions, except for rows
    /// with an impossible `inserted_xid`. `xmin` may be a subtransaction, which no snapshot lists.
    pub(crate) fn tells_top_level_transactions(&self, added_xids: &[u64]) -> bool {
        self.has_inserted_xid && added_xids.is_empty()
    }
}

/// Transaction ids as an SQL array.
pub(crate) fn xids_sql(xids: &[u64]) -> String {
    let xids: Vec<String> = xids.iter().map(u64::to_string).collect();
    format!("'{{{}}}'::xid8[]", xids.join(","))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_is_rewritten_when_one_of_its_partitions_has_another_file() {
        assert!(!was_rewritten("1:10,2:20", "1:10,2:20"));
        assert!(was_rewritten("1:10,2:20", "1:10,2:21"));
        // A partition was added, and another one was detached.
        assert!(!was_rewritten("1:10,2:20", "2:20,3:30"));
        assert!(!was_rewritten("1:10", "1:10,10:1"));
    }
}
