//! Finds out by which columns the rows of a captured table can be distinguished and ordered.
//!
//! - `inserted_xid` names the transaction that inserted a row. Without it the row's `xmin` is used,
//!   which says less: see [`Shape::inserted_xid_sql`].
//! - `seq` grows with each insert. Writers hold the lock of their aggregate while they insert, so
//!   `seq` has the order of each key. It is the column named in the settings, a column called
//!   `seq`, or a numbered id. Without it, rows are ordered by their version, if that is a number,
//!   and then by their transaction.

use std::collections::HashSet;

use slot_manager::QualifiedName;
use tokio_postgres::types::ToSql;

use crate::error::{Code, Error, Result};
use crate::mapping::TableSettings;
use crate::postgres::Sql;

/// PostgreSQL gives lower ids to no transaction.
pub(crate) const FIRST_NORMAL_XID: u64 = 3;

/// `xmin` of a row of `e`, completed to 64 bits.
const BY_XMIN: &str = "\
    (select (next.xid - pg_catalog.mod(pg_catalog.mod(next.xid - e.xmin::text::bigint, \
        4294967296) + 4294967296, 4294967296))::text::xid8 \
     from (select pg_catalog.pg_snapshot_xmax(pg_catalog.pg_current_snapshot())\
        ::text::bigint) next (xid))";

/// Parameters: schema, table, the possible `seq` columns in order of preference (text[]), the
/// version column, and the column that counts as `seq` only if a sequence numbers it.
///
/// `attmissingval` holds the value that a column has in rows older than the column. Each partition
/// has its own.
const SELECT: &str = "\
    WITH root AS ( \
        SELECT c.oid, c.relkind FROM pg_catalog.pg_class c \
        JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace \
        WHERE n.nspname = $1 AND c.relname = $2 AND c.relkind IN ('r', 'p')), \
    leaf AS ( \
        SELECT root.oid FROM root WHERE relkind = 'r' \
        UNION ALL \
        SELECT t.relid::oid FROM root, pg_catalog.pg_partition_tree(root.oid) t \
        WHERE root.relkind = 'p' AND t.isleaf), \
    seq AS ( \
        SELECT a.attname, a.attnum, \
            (a.attidentity <> '' OR d.adbin IS NOT NULL) AND s.seqincrement = 1 AS is_numbered, \
            NOT a.attnotnull AS is_nullable, s.seqcache, wanted.place, \
            s.seqrelid || '/' || pg_catalog.pg_relation_filenode(s.seqrelid) AS numbering, \
            EXISTS (SELECT FROM pg_catalog.pg_index i \
                JOIN pg_catalog.pg_class ic ON ic.oid = i.indexrelid \
                JOIN pg_catalog.pg_am am ON am.oid = ic.relam \
                WHERE i.indrelid = root.oid AND i.indisvalid AND am.amname = 'btree' \
                  AND i.indkey[0] = a.attnum \
                  AND (i.indpred IS NULL OR pg_catalog.pg_get_expr(i.indpred, i.indrelid) \
                       = pg_catalog.format('(%I IS NOT NULL)', a.attname))) AS is_indexed \
        FROM root \
        CROSS JOIN pg_catalog.unnest($3::text[]) WITH ORDINALITY AS wanted (name, place) \
        JOIN pg_catalog.pg_attribute a ON a.attrelid = root.oid AND a.attname = wanted.name \
            AND NOT a.attisdropped AND a.atttypid IN (20, 21, 23) \
        LEFT JOIN pg_catalog.pg_attrdef d ON d.adrelid = root.oid AND d.adnum = a.attnum \
            AND pg_catalog.pg_get_expr(d.adbin, d.adrelid) LIKE 'nextval(%' \
        LEFT JOIN LATERAL ( \
            SELECT s.seqrelid, s.seqcache, s.seqincrement FROM pg_catalog.pg_sequence s JOIN pg_catalog.pg_depend o \
              ON o.classid = 'pg_catalog.pg_class'::regclass AND o.objid = s.seqrelid \
                 AND o.refobjid = root.oid AND o.refobjsubid = a.attnum AND o.deptype = 'i' \
              OR o.classid = 'pg_catalog.pg_attrdef'::regclass AND o.objid = d.oid \
                 AND o.refobjid = s.seqrelid LIMIT 1) s ON true) \
    SELECT root.oid, \
        EXISTS (SELECT FROM pg_catalog.pg_attribute a \
            JOIN pg_catalog.pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum \
            WHERE a.attrelid = root.oid AND a.attname = 'inserted_xid' AND NOT a.attisdropped \
              AND a.atttypid = 5069 AND a.attnotnull AND a.attgenerated = '' \
              AND pg_catalog.pg_get_expr(d.adbin, d.adrelid) \
                  IN ('pg_current_xact_id()', 'pg_catalog.pg_current_xact_id()')), \
        ARRAY(SELECT DISTINCT (a.attmissingval::text::text[])[1] \
            FROM leaf JOIN pg_catalog.pg_attribute a ON a.attrelid = leaf.oid \
            WHERE a.attname = 'inserted_xid' AND a.atttypid = 5069 AND a.atthasmissing), \
        (SELECT pg_catalog.string_agg(leaf.oid::text, ',' ORDER BY leaf.oid) FROM leaf), \
        (SELECT max(pg_catalog.pg_relation_size(leaf.oid)) \
            / pg_catalog.current_setting('block_size')::bigint FROM leaf), \
        seq.attname::text, seq.is_numbered, seq.seqcache, seq.is_indexed, \
        EXISTS (SELECT FROM pg_catalog.pg_attribute a WHERE a.attrelid = root.oid \
            AND a.attname = $4 AND NOT a.attisdropped AND a.atttypid IN (20, 21, 23)), \
        ARRAY(SELECT leaf.oid FROM leaf WHERE pg_catalog.pg_relation_size(leaf.oid) > 0), \
        seq.numbering, seq.is_nullable, \
        (SELECT pg_catalog.string_agg( \
            leaf.oid || ':' || pg_catalog.pg_relation_filenode(leaf.oid), ',') FROM leaf), \
        (SELECT coalesce(nullif(t.typbasetype, 0), t.oid) = 5069 FROM pg_catalog.pg_attribute a \
            JOIN pg_catalog.pg_type t ON t.oid = a.atttypid WHERE a.attrelid = root.oid \
            AND a.attname = 'inserted_xid' AND NOT a.attisdropped), \
        EXISTS (SELECT FROM pg_catalog.pg_attribute a WHERE a.attrelid = root.oid \
            AND a.attname = 'seq' AND NOT a.attisdropped) \
    FROM root \
    LEFT JOIN LATERAL ( \
        SELECT * FROM seq \
        WHERE seq.attname <> $5 OR coalesce(seq.is_numbered, false) \
        ORDER BY seq.place LIMIT 1) seq ON true";

/// The properties of a table that matter for capturing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) oid: u32,
    /// Whether `inserted_xid` names the transaction of every row: it is `xid8 not null` and
    /// PostgreSQL fills it in.
    pub(crate) has_inserted_xid: bool,
    /// A column of that name that does not: it counts in event ids only.
    pub(crate) unfit_inserted_xid: Option<Unfit>,
    /// Whether the table has a column called `seq`, of any type.
    pub(crate) has_column_seq: bool,
    /// The values of `inserted_xid` in rows that are older than the column.
    pub(crate) missing_xids: Vec<u64>,
    /// The OIDs of its partitions, or its own OID, ascending and separated by commas.
    pub(crate) partitions: String,
    /// The OIDs of those partitions that are not empty.
    pub(crate) filled: Vec<u32>,
    /// `oid:file number` of each of them. A new file number means that the table was rewritten.
    pub(crate) files: String,
    /// Blocks of the largest partition, or of the table.
    pub(crate) blocks: u32,
    pub(crate) seq: Option<Seq>,
    /// The version column, if its type is a whole number.
    pub(crate) version: Option<String>,
}

/// Why a column `inserted_xid` does not name the transaction of every row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unfit {
    /// It is not of type `xid8`.
    Type,
    /// It is `xid8`, but may be null, or has another default.
    Value,
}

/// The column that gives the order of insertion.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Seq {
    pub(crate) column: String,
    /// Whether its numbers come from a sequence one by one. Then, if a number is seen, every
    /// smaller number has been given out.
    pub(crate) is_steady: bool,
    pub(crate) is_indexed: bool,
    /// Whether a row may have no number.
    pub(crate) is_nullable: bool,
    /// The sequence, and its file, which changes with RESTART. `None` when no sequence belongs to
    /// the column.
    pub(crate) numbering: Option<String>,
}

/// Looks a table up; `None` when it does not exist.
///
/// # Errors
/// `column-missing` when `columns.seq` does not name a column of whole numbers; those of a
/// statement.
pub(crate) async fn look(sql: &Sql, settings: &TableSettings) -> Result<Option<Shape>> {
    let table = &settings.table;
    let named = settings.columns.seq.as_deref();
    let id = settings.columns.id.as_deref().unwrap_or("id");
    let version = settings.columns.version.as_deref().unwrap_or("version");
    let wanted: Vec<&str> = match named {
        Some("") => Vec::new(),
        Some(named) => vec![named],
        None => vec!["seq", id],
    };
    // An id without a sequence may be in any order, so it counts only if the settings name it as
    // `seq`.
    let only_if_numbered = if named.is_none() { id } else { "" };
    let parameters: [&(dyn ToSql + Sync); 5] = [
        &table.schema,
        &table.name,
        &wanted,
        &version,
        &only_if_numbered,
    ];
    let Some(row) = sql.query_opt(SELECT, &parameters).await? else {
        return Ok(None);
    };
    let missing: Vec<String> = row.get(2);
    let column: Option<String> = row.get(5);
    if let (None, Some(named)) = (&column, named.filter(|named| !named.is_empty())) {
        return Err(no_such_column(table, named));
    }
    let is_numbered: Option<bool> = row.get(6);
    let cache: Option<i64> = row.get(7);
    let is_indexed: Option<bool> = row.get(8);
    let has_version: bool = row.get(9);
    let blocks: Option<i64> = row.get(4);
    let has_inserted_xid: bool = row.get(1);
    let is_xid8: Option<bool> = row.get(14);
    let unfit = is_xid8.map(|is_xid8| if is_xid8 { Unfit::Value } else { Unfit::Type });
    Ok(Some(Shape {
        oid: row.get(0),
        has_inserted_xid,
        unfit_inserted_xid: unfit.filter(|_| !has_inserted_xid),
        has_column_seq: row.get(15),
        missing_xids: missing.iter().filter_map(|xid| xid.parse().ok()).collect(),
        partitions: row.get::<_, Option<String>>(3).unwrap_or_default(),
        filled: row.get(10),
        files: row.get::<_, Option<String>>(13).unwrap_or_default(),
        blocks: u32::try_from(blocks.unwrap_or_default()).unwrap_or(u32::MAX),
        seq: column.map(|column| Seq {
            column,
            is_steady: is_numbered == Some(true) && cache == Some(1),
            is_indexed: is_indexed == Some(true),
            is_nullable: row.get::<_, Option<bool>>(12) != Some(false),
            numbering: row.get(11),
        }),
        version: has_version.then(|| version.to_owned()),
    }))
}

/// Fails if the table was rewritten since `before`. Its rows then have new places, so a walk by
/// place may have missed some.
///
/// # Errors
/// `slot-busy`; those of [`look`].
pub(crate) async fn refuse_rewritten(
    sql: &Sql,
    settings: &TableSettings,
    before: &Shape,
) -> Result<()> {
    match look(sql, settings).await? {
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
    /// Whether the ids of its events are made with its column `inserted_xid`, as those of the stream.
    pub(crate) fn has_xid_in_ids(&self) -> bool {
        self.has_inserted_xid || self.unfit_inserted_xid == Some(Unfit::Value)
    }

    pub(crate) fn is_partitioned(&self) -> bool {
        self.partitions != self.oid.to_string()
    }

    /// The column along whose index rows are read. Without an index, each page would sort the
    /// table.
    pub(crate) fn numbered(&self) -> Option<&Seq> {
        self.seq.as_ref().filter(|seq| seq.is_indexed)
    }

    /// The transaction that inserted a row of `e`, as `xid8`.
    ///
    /// For a row that is older than the column, and in a table without it, only `xmin` is known. The
    /// same counts for a row whose writer has set the column to a transaction that cannot be. `xmin` has
    /// 32 bits, may be that of a subtransaction, and is lost when the table is rewritten. It is completed
    /// to the latest transaction with these bits.
    pub(crate) fn inserted_xid_sql(&self, added_xids: &[u64]) -> String {
        self.xid_sql(&self.has_own_xid_sql(), added_xids)
    }

    /// The same, at a time when `next_xid` was the next transaction.
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

    /// The condition that the column `inserted_xid` of a row of `e` holds a transaction that can be. Its
    /// writer may have chosen another value.
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

    /// Whether [`inserted_xid_sql`](Self::inserted_xid_sql) always gives a transaction that a
    /// snapshot can list. `xmin` may be a subtransaction, which no snapshot lists.
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
