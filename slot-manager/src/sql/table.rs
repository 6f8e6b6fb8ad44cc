//! Statements on tables, and on their columns, types, indexes and privileges.

/// Parameters: quoted name of a table or index (text).
pub(crate) const EXISTS: &str = "select pg_catalog.to_regclass($1) is not null as exists";

/// Parameters: schema and table (text). Includes a generated column if a publication publishes it,
/// which is possible from PostgreSQL 18 on.
pub(crate) const STREAMED_COLUMNS: &str = "
select a.attname::text as name, a.atttypid as type_oid, a.atttypmod as type_modifier
from pg_catalog.pg_attribute a
join pg_catalog.pg_class c on c.oid = a.attrelid and c.relkind in ('r', 'p')
join pg_catalog.pg_namespace n on n.oid = c.relnamespace
where n.nspname = $1 and c.relname = $2
  and a.attnum > 0 and not a.attisdropped
  and (a.attgenerated = ''
       or pg_catalog.current_setting('server_version_num')::int >= 180000 and exists (
           select from pg_catalog.pg_publication_tables p
           where p.schemaname = $1 and p.tablename = $2
             and pg_catalog.to_jsonb(p) -> 'attnames' ? a.attname::text))
order by a.attnum";

/// Parameters: schema, table and publication (text). Without column lists, as before PostgreSQL 15, every column
/// counts as published.
pub(crate) const PRESENT_COLUMNS: &str = "
select a.attname::text as name,
       coalesce(pg_catalog.to_jsonb(p) -> 'attnames' ? a.attname::text, true) as is_published
from pg_catalog.pg_attribute a
join pg_catalog.pg_class c on c.oid = a.attrelid and c.relkind in ('r', 'p')
join pg_catalog.pg_namespace n on n.oid = c.relnamespace
left join pg_catalog.pg_publication_tables p
       on p.pubname = $3 and p.schemaname = n.nspname and p.tablename = c.relname
where n.nspname = $1 and c.relname = $2
  and a.attnum > 0 and not a.attisdropped
  and (a.attgenerated = '' or pg_catalog.to_jsonb(p) -> 'attnames' ? a.attname::text)
order by a.attnum";

/// Parameters: quoted table name, column (text).
pub(crate) const TYPE_OF_COLUMN: &str = "
select pg_catalog.format_type(atttypid, null) as type_name from pg_catalog.pg_attribute
where attrelid = $1::regclass and attname = $2";

/// Parameters: OID of a table (oid), column (text). A domain counts as its base type.
pub(crate) const ID_COLUMN: &str = "
select coalesce(nullif(t.typbasetype, 0), t.oid) as type_oid, exists (
    select from pg_catalog.pg_index i
    join pg_catalog.pg_class ic on ic.oid = i.indexrelid
    join pg_catalog.pg_am am on am.oid = ic.relam
    where i.indrelid = a.attrelid and i.indisvalid and i.indpred is null
      and am.amname in ('btree', 'hash') and i.indkey[0] = a.attnum) as is_indexed
from pg_catalog.pg_attribute a join pg_catalog.pg_type t on t.oid = a.atttypid
where a.attrelid = $1 and a.attname = $2";

/// Parameters: schema, table and column (text). Returns whether the column has a unique index of its own. Always
/// true for a partitioned table, because often only its partitions can have such an index.
pub(crate) const IS_UNIQUE: &str = "
select c.relkind = 'p' or exists (
    select from pg_catalog.pg_index i
    join pg_catalog.pg_attribute a on a.attrelid = c.oid and a.attnum = i.indkey[0]
    where i.indrelid = c.oid and i.indisunique and i.indnkeyatts = 1 and i.indpred is null
      and a.attname = $3) as is_unique
from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
where n.nspname = $1 and c.relname = $2";

/// Parameters: quoted table name (text).
pub(crate) const INVALID_SEQ_INDEXES: &str = "
select n.nspname::text as schema_name, c.relname::text as name
from pg_catalog.pg_index i
join pg_catalog.pg_class c on c.oid = i.indexrelid and c.relkind = 'i'
join pg_catalog.pg_namespace n on n.oid = c.relnamespace
where i.indrelid = pg_catalog.to_regclass($1) and not i.indisvalid
  and pg_catalog.pg_get_indexdef(i.indexrelid, 1, false) = 'seq'
  and pg_catalog.pg_get_expr(i.indpred, i.indrelid) = '(seq IS NOT NULL)'";

/// Parameters: quoted table name (text).
pub(crate) const SIZE_OF_PARTITIONS: &str = "
with recursive tree (oid) as (
    select c.oid from pg_catalog.pg_class c where c.oid = pg_catalog.to_regclass($1) and c.relkind = 'p'
    union all
    select i.inhrelid from tree join pg_catalog.pg_inherits i on i.inhparent = tree.oid
    where not i.inhdetachpending
)
select coalesce(pg_catalog.sum(pg_catalog.pg_relation_size(oid)), 0)::bigint as bytes from tree";

/// Parameters: schemas, names and privileges (three text[]). Returns one row for each privilege, in the order
/// of the parameters. For a table that does not exist, no privilege counts as lacking.
pub(crate) const MISSING_PRIVILEGES: &str = "
select current_user::text as role,
       coalesce(not pg_catalog.has_schema_privilege(n.oid, 'USAGE'), false) as lacks_schema,
       coalesce(not pg_catalog.has_table_privilege(c.oid, w.privilege), false) as lacks_privilege,
       coalesce(pg_catalog.row_security_active(c.oid), false) as hides_rows
from unnest($1, $2, $3) with ordinality
    as w (schema_name, table_name, privilege, place)
left join pg_catalog.pg_namespace n on n.nspname = w.schema_name
left join pg_catalog.pg_class c
       on c.relnamespace = n.oid and c.relname = w.table_name and c.relkind in ('r', 'p')
order by w.place";

/// Parameters: functions with the types of their arguments (text[]). Returns those that our role may not call.
/// Ignores functions that do not exist.
pub(crate) const MISSING_EXECUTE: &str = "
select current_user::text as role, f.name
from pg_catalog.unnest($1) with ordinality f (name, place)
where not pg_catalog.has_function_privilege(pg_catalog.to_regprocedure(f.name)::oid, 'execute')
order by f.place";

/// Parameters: role (text). The right to replicate is an attribute of the role or, on Amazon RDS,
/// comes with membership in a group role.
pub(crate) const ROLE_RIGHTS: &str = "
select r.rolcanlogin as may_log_in, r.rolreplication or r.rolsuper or exists (
    select from pg_catalog.pg_roles g where g.rolname = 'rds_replication'
    and pg_catalog.pg_has_role(r.oid, g.oid, 'member')) as may_replicate
from pg_catalog.pg_roles r where r.rolname = $1";

/// Parameters: role, group (text). Returns a row if the role is a member of the group but has the group's rights
/// neither by inheritance nor by its setting `role`. From PostgreSQL 16 on, each membership has its own option
/// INHERIT.
pub(crate) const NOT_INHERITED: &str = "
select pg_catalog.current_setting('server_version_num')::int >= 160000 as by_membership
from pg_catalog.pg_roles r, pg_catalog.pg_roles g
where r.rolname = $1 and g.rolname = $2
and pg_catalog.pg_has_role(r.oid, g.oid, 'member')
and not pg_catalog.pg_has_role(r.oid, g.oid, 'usage')
and not exists (
    select from pg_catalog.pg_db_role_setting s
    where s.setrole = r.oid
    and s.setdatabase in (0, (select d.oid from pg_catalog.pg_database d
                              where d.datname = pg_catalog.current_database()))
    and 'role=' || g.rolname = any (s.setconfig))";

/// Parameters: OIDs of types and the columns of these types (oid[], text[]), schema and table
/// (text).
///
/// Only PostgreSQL's own scalar types count as sortable. Arrays and row types do not count, because they can
/// contain values that cannot be sorted. Types outside `pg_catalog` do not count, because any user can have
/// created their operators, in any schema. `regclass` and enums do not count, because PostgreSQL cannot parse
/// their text again after the object or the label was renamed.
pub(crate) const BASE_TYPES: &str = "
with recursive asked as (
    select w.type_oid, coalesce(t.oid, a.atttypid) as oid, t.oid is null as is_dropped
    from unnest($1, $2) w (type_oid, column_name)
    left join pg_catalog.pg_type t on t.oid = w.type_oid
    left join pg_catalog.pg_namespace n on n.nspname = $3
    left join pg_catalog.pg_class c
           on c.relnamespace = n.oid and c.relname = $4 and c.relkind in ('r', 'p')
    left join pg_catalog.pg_attribute a
           on a.attrelid = c.oid and a.attname = w.column_name
          and a.attnum > 0 and not a.attisdropped
), made_from as (
    select asked.type_oid, asked.is_dropped, t.oid, t.typname, t.typnamespace, t.typtype, t.typbasetype,
           t.typcategory
    from asked join pg_catalog.pg_type t on t.oid = asked.oid
    union all
    select d.type_oid, d.is_dropped, t.oid, t.typname, t.typnamespace, t.typtype, t.typbasetype,
           t.typcategory
    from made_from d join pg_catalog.pg_type t on t.oid = d.typbasetype
    where d.typtype = 'd'
)
select m.type_oid, m.is_dropped, m.oid as base_oid, pg_catalog.format_type(m.type_oid, null) as name,
       m.typtype = 'b' and m.typcategory <> 'A'
       and m.typnamespace = 'pg_catalog'::regnamespace and m.typname not like 'reg%'
       and exists (
           select from pg_catalog.pg_opclass o
           join pg_catalog.pg_am am on am.oid = o.opcmethod and am.amname = 'btree'
           where o.opcdefault and (o.opcintype = m.oid or exists (
               select from pg_catalog.pg_cast k
               where k.castsource = m.oid and k.casttarget = o.opcintype
                 and k.castmethod = 'b' and k.castcontext = 'i'))) as has_order
from made_from m where m.typtype <> 'd'";

/// Parameters: schema, table, the possible `seq` columns in order of preference (text[]), the
/// version column, and the one `seq` column that counts only if a sequence fills it.
///
/// `attmissingval` is the value of a column in rows that are older than the column. It can differ between
/// partitions.
pub(crate) const SHAPE: &str = "
with recursive root as (
    select c.oid, c.relkind from pg_catalog.pg_class c
    join pg_catalog.pg_namespace n on n.oid = c.relnamespace
    where n.nspname = $1 and c.relname = $2 and c.relkind in ('r', 'p')
), tree as (
    select root.oid, root.relkind from root
    union all
    select c.oid, c.relkind from tree
    join pg_catalog.pg_inherits i on i.inhparent = tree.oid and not i.inhdetachpending
    join pg_catalog.pg_class c on c.oid = i.inhrelid
    where tree.relkind = 'p'
), leaf as (
    select tree.oid from tree where relkind <> 'p'
), whole_number as (
    with recursive made_from as (
        select a.attnum, t.oid, t.typtype, t.typbasetype
        from root join pg_catalog.pg_attribute a on a.attrelid = root.oid and not a.attisdropped
        join pg_catalog.pg_type t on t.oid = a.atttypid
        where a.attnum > 0 and a.attname = any ($3 || $4)
        union all
        select d.attnum, t.oid, t.typtype, t.typbasetype
        from made_from d join pg_catalog.pg_type t on t.oid = d.typbasetype
        where d.typtype = 'd'
    )
    select attnum from made_from where oid in (20, 21, 23)
), seq as (
    select a.attname, a.attnum,
           (a.attidentity <> '' or d.adbin is not null) and s.seqincrement = 1 as is_numbered,
           not a.attnotnull as is_nullable, s.seqcache, wanted.nth,
           s.seqrelid || '/' || pg_catalog.pg_relation_filenode(s.seqrelid) as numbering,
           exists (select from pg_catalog.pg_index i
               join pg_catalog.pg_class ic on ic.oid = i.indexrelid
               join pg_catalog.pg_am am on am.oid = ic.relam
               where i.indrelid = root.oid and i.indisvalid and am.amname = 'btree'
                 and i.indkey[0] = a.attnum and i.indoption[0] in (0, 3)
                 and (i.indpred is null or pg_catalog.pg_get_expr(i.indpred, i.indrelid)
                      = pg_catalog.format('(%I IS NOT NULL)', a.attname))) as is_indexed
    from root
    cross join pg_catalog.unnest($3) with ordinality as wanted (name, nth)
    join pg_catalog.pg_attribute a on a.attrelid = root.oid and a.attname = wanted.name
        and a.attnum in (select attnum from whole_number)
    left join pg_catalog.pg_attrdef d on d.adrelid = root.oid and d.adnum = a.attnum
        and pg_catalog.pg_get_expr(d.adbin, d.adrelid) like 'nextval(%'
    left join lateral (
        select s.seqrelid, s.seqcache, s.seqincrement
        from pg_catalog.pg_sequence s join pg_catalog.pg_depend o
          on o.classid = 'pg_catalog.pg_class'::regclass and o.objid = s.seqrelid
             and o.refobjid = root.oid and o.refobjsubid = a.attnum and o.deptype = 'i'
          or o.classid = 'pg_catalog.pg_attrdef'::regclass and o.objid = d.oid
             and o.refobjid = s.seqrelid limit 1) s on true
)
select root.oid,
       exists (select from pg_catalog.pg_attribute a
           join pg_catalog.pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
           where a.attrelid = root.oid and a.attname = 'inserted_xid' and not a.attisdropped
             and a.atttypid = 5069 and a.attnotnull and a.attgenerated = ''
             and pg_catalog.pg_get_expr(d.adbin, d.adrelid)
                 in ('pg_current_xact_id()', 'pg_catalog.pg_current_xact_id()')) as is_filled_in,
       (select coalesce(nullif(t.typbasetype, 0), t.oid) = 5069 from pg_catalog.pg_attribute a
           join pg_catalog.pg_type t on t.oid = a.atttypid where a.attrelid = root.oid
           and a.attname = 'inserted_xid' and not a.attisdropped) as is_xid8,
       array(select distinct (a.attmissingval::text::text[])[1]
           from leaf join pg_catalog.pg_attribute a on a.attrelid = leaf.oid
           where a.attname = 'inserted_xid' and a.atttypid = 5069 and a.atthasmissing)
           as missing_xids,
       (select pg_catalog.string_agg(leaf.oid::text, ',' order by leaf.oid) from leaf)
           as partitions,
       array(select leaf.oid from leaf where pg_catalog.pg_relation_size(leaf.oid) > 0) as filled,
       array(select tree.oid from tree where tree.oid <> root.oid) as below,
       array(select a.relid::oid from pg_catalog.pg_partition_ancestors(root.oid) a
           where a.relid <> root.oid) as above,
       (select pg_catalog.string_agg(
           leaf.oid || ':' || pg_catalog.pg_relation_filenode(leaf.oid), ',') from leaf) as files,
       (select pg_catalog.string_agg(i.inhrelid || ':' || i.xmin, ',')
           from pg_catalog.pg_inherits i join tree on i.inhrelid = tree.oid
           where i.inhrelid <> root.oid) as attached,
       (select max(pg_catalog.pg_relation_size(leaf.oid))
           / pg_catalog.current_setting('block_size')::bigint from leaf) as blocks,
       seq.attname::text as seq_column, seq.is_numbered, seq.seqcache, seq.is_indexed,
       seq.is_nullable, seq.numbering,
       exists (select from pg_catalog.pg_subscription_rel r
           where r.srrelid in (select tree.oid from tree)) as is_subscribed,
       exists (select from pg_catalog.pg_attribute a where a.attrelid = root.oid
           and a.attname = 'seq' and not a.attisdropped) as has_column_seq,
       exists (select from pg_catalog.pg_attribute a where a.attrelid = root.oid
           and a.attname = $4 and a.attnum in (select attnum from whole_number))
           as has_version
from root
left join lateral (
    select * from seq
    where seq.attname <> $5 or coalesce(seq.is_numbered, false)
    order by seq.nth limit 1) seq on true";

/// A condition: the row `e` was written before its partition was attached.
pub(crate) const WRITTEN_BEFORE_ATTACHED: &str = "\
    exists ( \
        select from pg_catalog.pg_inherits i \
        where i.inhrelid in (select relid from pg_catalog.pg_partition_ancestors(e.tableoid)) \
          and pg_catalog.age(i.xmin) > 0 \
          and (pg_catalog.age(e.xmin) > pg_catalog.age(i.xmin) \
               or e.xmin = i.xmin and e.cmin::text::bigint < i.cmin::text::bigint))";

/// Parameters: OIDs of tables (oid[]). Returns no row for a table that does not exist.
///
/// While a partition is being detached (`is_pending`), running transactions can still write to it
/// through its root.
pub(crate) const FORMER_PARTITIONS: &str = "
select c.oid, n.nspname::text as schema_name, c.relname::text as name, current_user::text as role,
       coalesce(pg_catalog.has_schema_privilege(n.oid, 'USAGE'), false) as may_use_schema,
       coalesce(pg_catalog.has_table_privilege(c.oid, 'SELECT'), false) as may_select,
       coalesce(pg_catalog.row_security_active(c.oid), false) as hides_rows,
       array(select c.oid union select a.relid::oid from pg_catalog.pg_partition_ancestors(c.oid) a)
           as within,
       exists (select from pg_catalog.pg_inherits i
               where i.inhrelid = c.oid and i.inhdetachpending) as is_pending
from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
where c.oid = any ($1) and c.relkind = 'r'
order by c.oid";

/// Parameters: schema and table (text).
pub(crate) const OID: &str = "
select c.oid from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
where n.nspname = $1 and c.relname = $2 and c.relkind in ('r', 'p')";

/// Parameters: OID of a sequence (oid). Returns no row if our role may not use the sequence's schema, or may
/// neither read nor use the sequence.
pub(crate) const SEQUENCE: &str = "
select n.nspname::text as schema_name, c.relname::text as name,
       pg_catalog.has_sequence_privilege(s.seqrelid, 'SELECT') as is_readable,
       pg_catalog.pg_sequence_last_value(s.seqrelid) as last_value
from pg_catalog.pg_sequence s
join pg_catalog.pg_class c on c.oid = s.seqrelid
join pg_catalog.pg_namespace n on n.oid = c.relnamespace
where s.seqrelid = $1
  and pg_catalog.has_schema_privilege(n.oid, 'USAGE')
  and pg_catalog.has_sequence_privilege(s.seqrelid, 'SELECT, USAGE')";
