//! Asks the catalog for the types of a table's columns.

use std::time::Duration;

use decoder::{Oid, OwnedRelation};
use tokio_postgres::Row;

use crate::error::{Code, Error, Result};
use crate::mapping::{ColumnType, ColumnTypes};
use crate::postgres::{Sql, Target, connect};

/// A look-up delays the stream, and a session that is held back for long ends.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(5);
const LOOK_UP_LIMIT: Duration = Duration::from_secs(8);

/// Parameters: OIDs of types, the columns that have them (oid[], text[]), schema and table (text).
///
/// The stream describes a table as it was when its rows were written. A type that has been dropped
/// since is no longer in the catalog. The column has another type now, and its old values can be
/// read as that type, because PostgreSQL has either converted them or found that no conversion is
/// needed.
///
/// Only PostgreSQL's own scalar types count as sortable. An array or a row may contain values that
/// cannot be sorted. The operators of another type may be in any schema, and may belong to anybody. A
/// `regclass` or an enum cannot be read again from its text once the object or label has another name.
const TYPES: &str = "\
    with recursive asked as ( \
        select w.type_oid, coalesce(t.oid, a.atttypid) as oid \
        from unnest($1::oid[], $2::text[]) w (type_oid, column_name) \
        left join pg_catalog.pg_type t on t.oid = w.type_oid \
        left join pg_catalog.pg_namespace n on n.nspname = $3 \
        left join pg_catalog.pg_class c \
               on c.relnamespace = n.oid and c.relname = $4 and c.relkind in ('r', 'p') \
        left join pg_catalog.pg_attribute a \
               on a.attrelid = c.oid and a.attname = w.column_name \
              and a.attnum > 0 and not a.attisdropped \
    ), made_from as ( \
        select asked.type_oid, t.oid, t.typname, t.typnamespace, t.typtype, t.typbasetype, \
               t.typcategory \
        from asked join pg_catalog.pg_type t on t.oid = asked.oid \
        union all \
        select d.type_oid, t.oid, t.typname, t.typnamespace, t.typtype, t.typbasetype, \
               t.typcategory \
        from made_from d join pg_catalog.pg_type t on t.oid = d.typbasetype \
        where d.typtype = 'd' \
    ) \
    select m.type_oid, m.oid, pg_catalog.format_type(m.type_oid, null), \
           m.typtype = 'b' and m.typcategory <> 'A' \
           and m.typnamespace = 'pg_catalog'::regnamespace and m.typname not like 'reg%' \
           and exists ( \
               select from pg_catalog.pg_opclass o \
               join pg_catalog.pg_am am on am.oid = o.opcmethod and am.amname = 'btree' \
               where o.opcdefault and (o.opcintype = m.oid or exists ( \
                   select from pg_catalog.pg_cast k \
                   where k.castsource = m.oid and k.casttarget = o.opcintype \
                     and k.castmethod = 'b' and k.castcontext = 'i'))) \
    from made_from m where m.typtype <> 'd'";

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
    let oids: Vec<u32> = unknown().map(|column| column.type_oid.0).collect();
    let names: Vec<&str> = unknown().map(|column| column.name.as_str()).collect();
    let table = (&relation.namespace, &relation.name);
    let rows = sql.query(TYPES, &[&oids, &names, table.0, table.1]).await?;
    // Each type is looked up only once, even if the catalog does not know it. Such a type counts as
    // text.
    for &oid in &oids {
        let name = format!("with oid {oid}").into();
        let base = Oid(oid);
        found.learn(
            Oid(oid),
            ColumnType {
                base,
                name,
                has_order: false,
            },
        );
    }
    for row in &rows {
        found.learn(Oid(row.get(0)), column_type(row));
    }
    Ok(found)
}

/// The same in a session of its own, since it is rarely needed.
///
/// # Errors
/// Those of connecting and of a statement.
pub(crate) async fn look_up_apart(
    target: &Target,
    relation: &OwnedRelation,
    known: &ColumnTypes,
) -> Result<ColumnTypes> {
    let asking = async {
        let sql = connect(target, "postrider types", STATEMENT_TIMEOUT).await?;
        look_up(&sql, relation, known).await
    };
    let asked = tokio::time::timeout(LOOK_UP_LIMIT, asking).await;
    asked.unwrap_or_else(|_| {
        let what = format!("PostgreSQL has not answered in {LOOK_UP_LIMIT:?}");
        Err(Error::new(Code::PostgresConnectionLost, what))
    })
}

fn column_type(row: &Row) -> ColumnType {
    ColumnType {
        base: Oid(row.get(1)),
        name: row.get::<_, String>(2).into(),
        has_order: row.get(3),
    }
}
