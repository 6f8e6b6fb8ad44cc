//! Asks the catalog what the types of a table's columns are.

use std::time::Duration;

use decoder::{Oid, OwnedRelation};
use tokio_postgres::Row;

use crate::error::Result;
use crate::map::{ColumnType, ColumnTypes};
use crate::postgres::{Sql, Target, answer_within, connect};

/// Looking types up holds the stream up, and a session that is held up for long ends.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(5);

/// Of a connection that leads nowhere; the server's own limit comes first.
const LOOK_UP_LIMIT: Duration = Duration::from_secs(8);

/// Parameters: oids of types, the columns that have them (oid[], text[]), schema and table (text).
///
/// The stream describes a table as it was when its rows were written. A type that was dropped since
/// is not in the catalog any more: then the column has another type, which its values can be read
/// as, since PostgreSQL has converted them or has found that nothing is to be converted.
///
/// Only single values count as having an order: an array or a row may hold what has none.
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
        select asked.type_oid, t.oid, t.typtype, t.typbasetype, t.typcategory \
        from asked join pg_catalog.pg_type t on t.oid = asked.oid \
        union all \
        select d.type_oid, t.oid, t.typtype, t.typbasetype, t.typcategory \
        from made_from d join pg_catalog.pg_type t on t.oid = d.typbasetype \
        where d.typtype = 'd' \
    ) \
    select m.type_oid, m.oid, pg_catalog.format_type(m.type_oid, null), \
           m.typtype in ('e', 'r') \
           or m.typtype = 'b' and m.typcategory <> 'A' and exists ( \
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
/// Those of a statement.
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
    // Nothing is asked for twice, also what nobody knows: it is taken for text.
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

/// The same on a session of its own: it is rarely needed.
///
/// # Errors
/// Those of connecting and of a statement.
pub(crate) async fn look_up_apart(
    target: &Target,
    relation: &OwnedRelation,
    known: &ColumnTypes,
) -> Result<ColumnTypes> {
    answer_within(LOOK_UP_LIMIT, async {
        let sql = connect(target, "postrider types", STATEMENT_TIMEOUT).await?;
        look_up(&sql, relation, known).await
    })
    .await
}

fn column_type(row: &Row) -> ColumnType {
    ColumnType {
        base: Oid(row.get(1)),
        name: row.get::<_, String>(2).into(),
        has_order: row.get(3),
    }
}
