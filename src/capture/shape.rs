//! Finds the columns by which the relay selects and orders the rows of a captured table.
//!
//! - `inserted_xid` names the transaction that inserted a row. In a table without this column, we use the
//!   row's `xmin`, which is less exact: see [`Shape::inserted_xid_sql`].
//! - `seq` grows with each insert. Services hold a lock on their aggregate while they insert, so the rows
//!   of each key are committed in the order of `seq`. The `seq` column is the column named in the
//!   settings, a column called `seq`, or an id column that a sequence fills. Without a `seq`, rows are
//!   ordered by their version, if the version is a whole number, and then by their transaction.

use std::collections::HashSet;

use slot_manager::QualifiedName;
use slot_manager::table_shape::{self, InsertedXid, SeqColumn, ShapeColumns};

use crate::error::{Code, Error, Result};
use crate::mapping::TableSettings;
use crate::postgres::Sql;

/// SQL expression: the lowest possible `seq`. Every row with a `seq` meets the condition `seq >= LOWEST_SEQ`. With
/// this condition PostgreSQL can use the index that `init` creates, which contains only the rows with a `seq`.
pub(crate) const LOWEST_SEQ: &str = "'-9223372036854775808'::bigint";

/// The lowest id that PostgreSQL gives to an ordinary transaction.
pub(crate) const FIRST_NORMAL_XID: u64 = 3;

/// `xmin` of a row of `e`, extended to 64 bits.
pub(super) const BY_XMIN: &str = "\
    (select (next.xid - ((next.xid - e.xmin::text::bigint) & 4294967295))::text::xid8 \
     from (select pg_catalog.pg_snapshot_xmax(pg_catalog.pg_current_snapshot())\
        ::text::bigint) next (xid))";

/// The properties of a table that matter for capturing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) oid: u32,
    /// Whether the column `inserted_xid` contains the transaction of each row: it is `xid8 not null`, and PostgreSQL
    /// fills it in.
    pub(crate) has_inserted_xid: bool,
    /// Set if the table has a column `inserted_xid` that may not contain the transaction of each row. The relay uses
    /// `xmin` instead to select rows. Event ids may still depend on the column
    /// ([`has_xid_in_ids`](Self::has_xid_in_ids)).
    pub(crate) unfit_inserted_xid: Option<UnfitColumn>,
    /// Whether a subscription of logical replication writes into the table or one of its partitions.
    pub(crate) is_subscribed: bool,
    /// Whether the table has a column called `seq`, of any type.
    pub(crate) has_column_seq: bool,
    /// The values of `inserted_xid` in rows that are older than the column.
    pub(crate) missing_xids: Vec<u64>,
    /// The OIDs of the table's partitions, or the table's own OID if it has none, ascending and separated
    /// by commas.
    pub(crate) partitions: String,
    /// The OIDs of the partitions that are not empty.
    pub(crate) filled: Vec<u32>,
    /// The OIDs of the table's partitions at every level.
    pub(crate) below: Vec<u32>,
    /// The OIDs of the partitioned tables that contain the table, up to the root.
    pub(crate) above: Vec<u32>,
    /// `oid:file number` of each partition. A new file number means that the table was rewritten.
    pub(crate) files: String,
    /// `oid:xid` of each partition at every level, where `xid` is the transaction that attached the partition.
    pub(crate) attached: String,
    /// Number of blocks of the largest partition, or of the table if it has no partitions.
    pub(crate) blocks: u32,
    pub(crate) seq: Option<SeqColumn>,
    /// The version column, if its type is a whole number.
    pub(crate) version: Option<String>,
}

/// A table as it is in the catalogue now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FoundTable {
    pub(crate) table: QualifiedName,
    pub(crate) shape: Shape,
}

/// Why a column `inserted_xid` may not contain the transaction of each row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum UnfitColumn {
    /// The column is not of type `xid8`.
    Type,
    /// The column is of type `xid8`, but it may be null or has another default.
    Value,
}

/// Reads the shape of a table from the catalogue; `None` when the table does not exist.
///
/// # Errors
/// `column-missing` when `columns.seq` does not name a column of whole numbers; database errors.
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
    // If the settings do not name a `seq`, the id column can be the `seq`, but only if a sequence fills the
    // column. Other ids may be in any order.
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
        is_subscribed: found.is_subscribed,
        has_column_seq: found.has_column_seq,
        missing_xids: found.missing_xids,
        partitions: found.partitions,
        filled: found.filled,
        below: found.below,
        above: found.above,
        files: found.files,
        attached: found.attached,
        blocks: found.blocks,
        seq: found.seq,
        version: found.has_version.then(|| version.to_owned()),
    }))
}

/// Returns an error if the table was rewritten or replaced since `before`. A rewrite gives the rows new
/// `ctid`s, so a walk by `ctid` may have missed some rows.
///
/// # Errors
/// `slot-busy` when the table was rewritten or replaced; the errors of [`read`].
pub(crate) async fn refuse_rewritten(
    sql: &Sql,
    settings: &TableSettings,
    before: &Shape,
) -> Result<()> {
    match read(sql, settings).await? {
        Some(now) if !now.was_rewritten_since(before) => Ok(()),
        Some(_) | None => {
            let what = format!(
                "{} was rewritten or replaced while the relay read it",
                settings.table
            );
            Err(Error::new(Code::SlotBusy, what).hint("no action needed: the relay reads it again"))
        }
    }
}

impl Shape {
    /// Whether the table or one of its partitions was rewritten or replaced since `before`.
    pub(crate) fn was_rewritten_since(&self, before: &Shape) -> bool {
        self.oid != before.oid || has_changed(&before.files, &self.files)
    }

    /// Whether one of the partitions was detached and attached again since `before`.
    pub(crate) fn was_attached_again_since(&self, before: &Shape) -> bool {
        has_changed(&before.attached, &self.attached)
    }
}

/// Whether the value of a table or partition has changed. `before` and `now` have the form
/// `oid:value,oid:value`. Partitions that are in only one of them do not count.
fn has_changed(before: &str, now: &str) -> bool {
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
    /// Whether event ids are computed with the column `inserted_xid`. The intake (for streamed rows) and the readers
    /// of the table both ask this function, because they must compute the same id for a row.
    pub(crate) fn has_xid_in_ids(&self) -> bool {
        self.has_inserted_xid || self.unfit_inserted_xid == Some(UnfitColumn::Value)
    }

    /// The OIDs of the partitions, or the table's own OID if it has none.
    pub(crate) fn leaves(&self) -> impl Iterator<Item = u32> {
        self.partitions
            .split(',')
            .filter_map(|oid| oid.parse().ok())
    }

    pub(crate) fn is_partitioned(&self) -> bool {
        self.partitions != self.oid.to_string()
    }

    /// Whether a column gives the order in which the rows of each aggregate were inserted. Without such a column,
    /// a scan may return an updated row after rows that were inserted later.
    pub(super) fn has_order(&self) -> bool {
        self.seq.is_some() || self.version.is_some()
    }

    /// The `seq` column, if it has an index along which a scan can read the rows. Without an index, each
    /// page would sort the whole table.
    pub(crate) fn numbered(&self) -> Option<&SeqColumn> {
        self.seq.as_ref().filter(|seq| seq.is_indexed)
    }

    /// Returns the SQL expression for the transaction that inserted a row, as `xid8`. In the query, the table has
    /// the alias `e`. The expression is the column `inserted_xid`, but it is `xmin` in these cases:
    ///
    /// - The table has no column `inserted_xid`.
    /// - The row is older than the column. The column of such a row contains one of the `added_xids`, the
    ///   transactions that added the column.
    /// - The column contains an impossible transaction id: see [`has_own_xid_sql`](Self::has_own_xid_sql), which
    ///   also explains `is_adopted`.
    ///
    /// `xmin` is less exact: it has only 32 bits, may be a subtransaction, and is lost when the table is rewritten.
    /// The expression extends `xmin` to the latest transaction id with the same lower 32 bits.
    pub(crate) fn inserted_xid_sql(&self, added_xids: &[u64], is_adopted: bool) -> String {
        if !self.has_inserted_xid {
            return BY_XMIN.to_owned();
        }
        let own = self.has_own_xid_sql(is_adopted);
        let added = match added_xids {
            [] => String::new(),
            added => format!("and e.inserted_xid <> all ({}) ", xids_sql(added)),
        };
        format!("case when {own} {added}then e.inserted_xid else {BY_XMIN} end")
    }

    /// Returns the SQL condition that the column `inserted_xid` of a row contains a possible transaction id. In the
    /// query, the table has the alias `e`. The column contains an impossible id if the writer of the row has set the
    /// column, or if the table was restored from a server with higher transaction ids.
    ///
    /// A possible id is not higher than the row's `xmin`. Usually both are equal, so the condition tests the
    /// equality first, which is also the cheapest test. `xmin` is higher if a subtransaction inserted the row, or
    /// if the row was moved or updated.
    ///
    /// `is_adopted` means that the capture record and the rows were restored from an earlier server. The
    /// `inserted_xid` of such a row is valid, but its `xmin` is the transaction of the restore. So with `is_adopted`
    /// the condition does not compare the two.
    pub(crate) fn has_own_xid_sql(&self, is_adopted: bool) -> String {
        let is_old_enough = if is_adopted {
            String::new()
        } else {
            format!(" and (e.xmin = e.inserted_xid::xid or e.inserted_xid <= {BY_XMIN})")
        };
        format!(
            "(e.inserted_xid >= '{FIRST_NORMAL_XID}'::xid8 \
             and e.inserted_xid < pg_catalog.pg_snapshot_xmax(pg_catalog.pg_current_snapshot())\
             {is_old_enough})"
        )
    }

    /// Whether the table has a new partition that contains rows. `known` lists the partitions that were recorded
    /// earlier.
    pub(crate) fn has_grown_since(&self, known: &str) -> bool {
        let known: HashSet<&str> = known.split(',').collect();
        let mut filled = self.filled.iter();
        filled.any(|leaf| !known.contains(leaf.to_string().as_str()))
    }

    /// Whether [`inserted_xid_sql`](Self::inserted_xid_sql) returns a top-level transaction for each row that meets the
    /// condition [`has_own_xid_sql`](Self::has_own_xid_sql). This is the case if the table has the column
    /// `inserted_xid`, and no row is older than the column (`added_xids` is empty).
    ///
    /// If false, the expression may return the `xmin` of any row, and an `xmin` may be a subtransaction. The caller
    /// must not look up these transactions in a snapshot, because a snapshot does not show whether a subtransaction
    /// had ended.
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
        assert!(!has_changed("1:10,2:20", "1:10,2:20"));
        assert!(has_changed("1:10,2:20", "1:10,2:21"));
        // A partition was added, and another one was detached.
        assert!(!has_changed("1:10,2:20", "2:20,3:30"));
        assert!(!has_changed("1:10", "1:10,10:1"));
    }
}
