//! Every SQL statement of this crate, except the one that `table_shape.rs` builds from the name of a sequence.
//! This file contains the statements on slots, publications and the server; the submodules contain the others.
//! The comment of a statement lists its parameters. The function that sends it documents the result.
//!
//! Each statement runs unchanged on PostgreSQL 14 to 18, except `create_slot`. Columns that only
//! later versions have are read from `to_jsonb(row)`, where a missing column is NULL instead of an
//! error. Catalogue tables and most catalogue functions are schema-qualified, so that no object earlier
//! in the `search_path` can replace them. For operators and functions without a schema, such as
//! `count`, the caller pins `search_path`.
//!
//! The statements find partitions in `pg_inherits`, not by `pg_partition_tree`. `pg_partition_tree` locks all
//! partitions, but not their parent, until the transaction ends. So it would wait for every DDL statement on a
//! partition. It could also deadlock with a DROP of a partition, which locks the parent first. Only
//! `pg_relation_size`, which reads the size of a partition, still waits for DDL statements. It releases its own
//! lock at once.
//!
//! Times to be displayed are returned as text in UTC (RFC 3339). Times for arithmetic are returned as an
//! age in seconds, so the clocks of the server and the client need not agree.

use std::time::Duration;

use crate::SlotName;

/// The name of a role, a database or a prepared transaction, as text that PostgreSQL can send from our database.
///
/// All databases of a cluster share these names, but each database has its own encoding. PostgreSQL stores a name in
/// the encoding of the database in which the name was given. If our database has another encoding, the name may
/// contain bytes that are invalid in our database, and a statement that sends them fails.
///
/// A UTF-8 or LATIN1 database can send every byte. For a database with any other encoding, this expression writes
/// bytes that are not ASCII as escapes such as `\351`.
macro_rules! shared_name {
    ($name:literal) => {
        concat!(
            "case when pg_catalog.getdatabaseencoding() in ('UTF8', 'LATIN1') then ",
            $name,
            "::text else pg_catalog.encode(pg_catalog.decode(pg_catalog.replace(",
            $name,
            "::text, E'\\\\', E'\\\\\\\\'), 'escape'), 'escape') end"
        )
    };
}

pub(crate) mod activity;
pub(crate) mod table;

/// Parameters: slot name, or NULL for all slots (text).
///
/// On a standby server, where `pg_current_wal_lsn()` fails, `server_lsn` is the later of the received and the
/// replayed position. The replayed position is later while the server replays WAL from an archive.
///
/// `holder_silent_seconds` is the time since the polling session of the relay last began or ended a statement.
/// The statement finds this session by its name, [`supervisor_name`](crate::activity::supervisor_name).
pub(crate) const SLOTS: &str = concat!("
with server as materialized (
    select case
        when pg_catalog.pg_is_in_recovery() then
            greatest(pg_catalog.pg_last_wal_receive_lsn(), pg_catalog.pg_last_wal_replay_lsn())
        else pg_catalog.pg_current_wal_lsn()
    end as lsn
)
select s.slot_name::text,
       s.plugin::text,
       s.slot_type,
       ", shared_name!("s.database"), " as database,
       coalesce(s.database = pg_catalog.current_database(), false) as in_this_database,
       s.temporary,
       s.active,
       s.active_pid,
       s.wal_status,
       s.safe_wal_size,
       s.two_phase,
       s.confirmed_flush_lsn,
       s.restart_lsn,
       s.catalog_xmin::text::bigint as catalog_xmin,
       s.xmin::text::bigint as xmin,
       (j.columns ->> 'conflicting')::boolean as conflicting,
       j.columns ->> 'invalidation_reason' as invalidation_reason,
       pg_catalog.to_char((j.columns ->> 'inactive_since')::timestamptz at time zone 'UTC',
               'YYYY-MM-DD\"T\"HH24:MI:SS.MS\"Z\"') as inactive_since,
       extract(epoch from pg_catalog.clock_timestamp()
               - (j.columns ->> 'inactive_since')::timestamptz)::float8 as inactive_seconds,
       (j.columns ->> 'failover')::boolean as failover,
       (j.columns ->> 'synced')::boolean as synced,
       server.lsn as server_lsn,
       a.application_name as holder_application_name,
       pg_catalog.host(a.client_addr) as holder_client_addr,
       ", shared_name!("a.usename"), " as holder_user,
       pg_catalog.to_char(a.backend_start at time zone 'UTC',
               'YYYY-MM-DD\"T\"HH24:MI:SS.MS\"Z\"') as holder_since,
       p.silent_seconds as holder_silent_seconds
from pg_catalog.pg_replication_slots s
cross join server
cross join lateral (select pg_catalog.to_jsonb(s) as columns) j
left join pg_catalog.pg_stat_activity a on a.pid = s.active_pid
left join lateral (
    select extract(epoch from pg_catalog.clock_timestamp() - max(b.state_change))::float8 as silent_seconds
    from pg_catalog.pg_stat_activity b
    where b.application_name = 'postrider supervisor ' || s.active_pid and b.usename = a.usename) p on true
where $1 is null or s.slot_name = $1
order by s.slot_name");

/// Returns two statements for one simple-protocol message, in which they share an implicit transaction.
/// The first statement sets a timeout for the second one. The timeout ends with the transaction.
///
/// The argument `failover` exists only from PostgreSQL 17 on, so the statement has it only if `failover`
/// is true.
pub(crate) fn create_slot(name: &SlotName, failover: bool, timeout: Duration) -> String {
    // PostgreSQL treats 0 as "no timeout".
    let timeout_ms = i32::try_from(timeout.as_millis())
        .unwrap_or(i32::MAX)
        .max(1);
    let failover = if failover { ", failover => true" } else { "" };
    format!(
        "set local statement_timeout = {timeout_ms}; \
         select lsn::text from pg_catalog.pg_create_logical_replication_slot(\
             slot_name => '{name}', plugin => 'pgoutput', temporary => false, \
             twophase => false{failover})"
    )
}

/// Parameters: slot name (text).
pub(crate) const DROP_SLOT: &str = "select pg_catalog.pg_drop_replication_slot($1)";

/// Parameters: slot name (text), position (pg_lsn). Returns the position reached.
pub(crate) const ADVANCE_SLOT: &str =
    "select end_lsn from pg_catalog.pg_replication_slot_advance($1, $2)";

/// The setting to check when the server refuses logical decoding with
/// OBJECT_NOT_IN_PREREQUISITE_STATE.
pub(crate) const WAL_LEVEL: &str = "select pg_catalog.current_setting('wal_level')";

/// Parameters: slot name or NULL (text), minimum age in seconds (float8).
///
/// Lists only transactions with an xid: a new slot waits for them, and an existing slot must be able to decode
/// them from their start. A transaction whose age our role is not allowed to see is listed with a NULL age.
pub(crate) const RETENTION: &str = concat!(
    "
select kind, pid, ",
    shared_name!("name"),
    " as name, ",
    shared_name!("database"),
    " as database,
       ",
    shared_name!("user_name"),
    " as user_name, application_name, age_seconds
from (
    select case
               when a.state in ('idle in transaction', 'idle in transaction (aborted)')
               then 'idle-in-transaction' else 'transaction'
           end as kind,
           a.pid, null::text as name, a.datname::text as database, a.usename::text as user_name,
           a.application_name,
           extract(epoch from pg_catalog.clock_timestamp() - a.xact_start)::float8 as age_seconds
    from pg_catalog.pg_stat_activity a
    where a.backend_xid is not null and a.pid <> pg_catalog.pg_backend_pid()
    union all
    select 'prepared-transaction', null, p.gid, p.database::text, p.owner::text, null,
           extract(epoch from pg_catalog.clock_timestamp() - p.prepared)::float8
    from pg_catalog.pg_prepared_xacts p
    union all
    select 'other-slot', o.active_pid, o.slot_name::text, o.database::text, null, null, null
    from pg_catalog.pg_replication_slots o
    join pg_catalog.pg_replication_slots s on o.restart_lsn < s.restart_lsn
    where s.slot_name = $1
) holders
where age_seconds is null or age_seconds >= $2
order by age_seconds desc nulls last, kind, pid, holders.name"
);

/// Parameters: publication (text), schemas and names of the captured tables (two text[]).
///
/// Returns one row for each table, or a single row if no table is given. The column `fingerprint` reveals a
/// change even if somebody undoes the change before the next check, because every update of a catalogue row
/// changes its `xmin`. A trigger called `ts_insert_blocker` marks a hypertable of TimescaleDB.
pub(crate) const PUBLICATION: &str = "
select p.oid, p.puballtables, p.pubinsert, p.pubupdate, p.pubdelete, p.pubtruncate, p.pubviaroot,
       w.nth,
       c.oid as table_oid,
       coalesce(c.relkind = 'p', false) as partitioned,
       array(with recursive tree (oid) as (
                 select c.oid union all
                 select i.inhrelid from tree join pg_catalog.pg_inherits i
                     on i.inhparent = tree.oid and not i.inhdetachpending
                 where c.relkind = 'p')
             select pg_catalog.concat_ws(':', i.inhrelid, i.xmin)
             from tree join pg_catalog.pg_inherits i on i.inhrelid = tree.oid
             where tree.oid <> c.oid order by i.inhrelid) as partitions,
       array(select a.attname::text from pg_catalog.pg_attribute a
             where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped) as table_columns,
       array(select a.attname::text from pg_catalog.pg_attribute a
             where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
               and case v.stored_are_published when true then a.attgenerated not in ('', 's')
                                               else a.attgenerated <> '' end) as never_published,
       array(select a.attname::text from pg_catalog.pg_attribute a
             where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
               and v.stored_are_published and a.attgenerated = 's') as generated,
       v.stored_are_published,
       coalesce(c.relkind = 'r' and (
           exists (select from pg_catalog.pg_inherits i where i.inhparent = c.oid)
           or exists (select from pg_catalog.pg_trigger g
                      where g.tgrelid = c.oid and g.tgname = 'ts_insert_blocker')), false) as has_children,
       part.kind as unstreamed_kind, part.schema_name as unstreamed_schema, part.name as unstreamed_name,
       root.schema_name as root_schema, root.name as root_name,
       t.tablename is not null as published,
       j.columns ->> 'rowfilter' as row_filter,
       case when j.columns ? 'attnames' then
           array(select pg_catalog.jsonb_array_elements_text(j.columns -> 'attnames'))
       end as published_columns,
       pg_catalog.to_jsonb(r) ->> 'prattrs' is not null as has_column_list,
       p.puballtables or r.oid is not null as traced,
       pg_catalog.concat_ws(' ', p.oid, p.xmin, c.oid, r.oid, r.xmin, y.xmin, n.xmin) as fingerprint
from (values (pg_catalog.current_setting('server_version_num')::int >= 180000))
         v (stored_are_published)
left join pg_catalog.pg_publication p on p.pubname = $1
left join unnest($2, $3) with ordinality as w (schema_name, table_name, nth) on true
left join pg_catalog.pg_namespace n on n.nspname = w.schema_name
left join pg_catalog.pg_class c
       on c.relnamespace = n.oid and c.relname = w.table_name and c.relkind in ('r', 'p', 'f', 'v', 'm')
left join lateral (
    with recursive tree (oid) as (
        select c.oid union all
        select i.inhrelid from tree join pg_catalog.pg_inherits i on i.inhparent = tree.oid
        where c.relkind = 'p')
    select case l.relkind when 'f' then 'foreign table' when 'v' then 'view'
                          when 'm' then 'materialized view'
                          else case l.relpersistence when 'u' then 'unlogged table'
                                                     else 'temporary table' end end as kind,
           s.nspname::text as schema_name, l.relname::text as name
    from tree join pg_catalog.pg_class l on l.oid = tree.oid
              join pg_catalog.pg_namespace s on s.oid = l.relnamespace
    where l.relkind not in ('r', 'p')
       or l.relpersistence <> 'p' and (l.relkind = 'r' or l.oid = c.oid)
    order by l.oid <> c.oid, l.oid limit 1) part on true
left join lateral (
    with recursive up (oid) as (
        select c.oid where c.relispartition union all
        select i.inhparent from up join pg_catalog.pg_inherits i on i.inhrelid = up.oid)
    select s.nspname::text as schema_name, l.relname::text as name
    from up join pg_catalog.pg_class l on l.oid = up.oid and l.oid <> c.oid
            join pg_catalog.pg_namespace s on s.oid = l.relnamespace
            join unnest($2, $3) other (schema_name, table_name)
              on other.schema_name = s.nspname and other.table_name = l.relname
    limit 1) root on true
left join pg_catalog.pg_type y on y.oid = c.reltype
left join pg_catalog.pg_publication_rel r on r.prpubid = p.oid and r.prrelid = c.oid
left join pg_catalog.pg_publication_tables t
       on t.pubname = p.pubname and t.schemaname = w.schema_name and t.tablename = w.table_name
left join lateral (select pg_catalog.to_jsonb(t) as columns) j on true
order by w.nth";

/// On a standby server, only the timeline of the last restart point is known.
pub(crate) const CLUSTER: &str = "
select (select system_identifier from pg_catalog.pg_control_system()) as system_identifier,
       case
           when pg_catalog.pg_is_in_recovery() then
               (select timeline_id from pg_catalog.pg_control_checkpoint())
           else
               ('x' || left(pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_lsn()), 8))
                   ::bit(32)::int
       end as timeline,
       pg_catalog.current_setting('server_version_num')::int as version_num,
       pg_catalog.pg_is_in_recovery() as in_recovery,
       pg_catalog.current_database()::text as database,
       (select oid from pg_catalog.pg_database
        where datname = pg_catalog.current_database()) as database_oid";

/// Parameters: names of settings (text[]). Returns no row for a setting that this version lacks.
pub(crate) const SETTINGS: &str = "
select name, setting from pg_catalog.pg_settings where name = any ($1)";

/// Returns the attributes of our two roles, and how many connections, walsenders and slots are in use.
///
/// We have two roles: the login role (`session_user`) and the current role (`current_user`). They differ after
/// `ALTER ROLE ... SET role`. PostgreSQL uses the login role for replication sessions and for the limits of
/// connections. It uses the current role for everything else.
///
/// A role may replicate if it has the attribute REPLICATION or SUPERUSER. On Amazon RDS, a role may also replicate if
/// it is a member of `rds_replication`.
pub(crate) const ROLE_AND_USAGE: &str = "
with replicating as (
    select r.oid from pg_catalog.pg_roles r
    where r.rolreplication or r.rolsuper or exists (
        select from pg_catalog.pg_roles g
        where g.rolname = 'rds_replication' and pg_catalog.pg_has_role(r.oid, g.oid, 'member'))
)
select r.rolname::text as role,
       l.rolname::text as login_role,
       l.oid in (select oid from replicating) as may_replicate,
       r.oid in (select oid from replicating) as may_drop_slots,
       pg_catalog.pg_has_role(r.oid, 'pg_read_all_stats', 'usage') as may_read_stats,
       l.rolsuper as superuser,
       l.rolconnlimit::bigint as role_limit,
       d.datconnlimit::bigint as database_limit,
       (select count(*) from pg_catalog.pg_stat_activity a
        where a.usesysid = l.oid and a.pid <> pg_catalog.pg_backend_pid()) as role_connections,
       (select count(*) from pg_catalog.pg_stat_activity a
        where a.datid = d.oid and a.usesysid is not null
          and a.pid <> pg_catalog.pg_backend_pid()) as database_connections,
       (select count(*) from pg_catalog.pg_stat_activity a
        where a.backend_type = 'client backend'
          and a.pid <> pg_catalog.pg_backend_pid()) as client_connections,
       (select count(*) from pg_catalog.pg_stat_replication) as wal_senders,
       (select count(*) from pg_catalog.pg_replication_slots) as slots
from pg_catalog.pg_roles r
join pg_catalog.pg_roles l on l.rolname = session_user
join pg_catalog.pg_database d on d.datname = pg_catalog.current_database()
where r.rolname = current_user";

/// Parameters: schemas and names (two text[]).
pub(crate) const TABLE_RIGHTS: &str = "
select w.nth,
       coalesce(pg_catalog.has_schema_privilege(n.oid, 'USAGE'), false) as may_use_schema,
       coalesce(pg_catalog.has_table_privilege(c.oid, 'SELECT'), false) as may_select,
       coalesce(pg_catalog.has_table_privilege(c.oid, 'INSERT'), false) as may_insert,
       coalesce(pg_catalog.has_table_privilege(c.oid, 'UPDATE'), false) as may_update,
       coalesce(pg_catalog.row_security_active(c.oid), false) as hides_rows,
       c.oid is not null as exists,
       coalesce(c.relpersistence = 'u', false) as is_unlogged
from unnest($1, $2) with ordinality as w (schema_name, table_name, nth)
left join pg_catalog.pg_namespace n on n.nspname = w.schema_name
left join pg_catalog.pg_class c
       on c.relnamespace = n.oid and c.relname = w.table_name and c.relkind in ('r', 'p')
order by w.nth";

/// The pid of the server process that answers.
pub(crate) const BACKEND_PID: &str = "select pg_catalog.pg_backend_pid()";

/// Parameters: quoted table names (text[]).
pub(crate) const INSERTED_ROWS: &str = "
with recursive tables (oid) as (
    select pg_catalog.to_regclass(name)::oid from pg_catalog.unnest($1) name
    union
    select i.inhrelid from tables join pg_catalog.pg_inherits i on i.inhparent = tables.oid
)
select coalesce(pg_catalog.sum(pg_catalog.pg_stat_get_tuples_inserted(oid)), 0)::bigint as rows
from tables";

/// The end of the WAL, including WAL that is not flushed yet.
pub(crate) const WAL_END: &str = "select pg_catalog.pg_current_wal_insert_lsn() as wal_end";

/// The end of the WAL that has been written to the operating system.
pub(crate) const WRITTEN_WAL_END: &str = "select pg_catalog.pg_current_wal_lsn() as wal_end";

pub(crate) const CLOCK: &str = "select pg_catalog.clock_timestamp() as shown";

pub(crate) const SERVER_ENCODING: &str =
    "select pg_catalog.current_setting('server_encoding') as server_encoding";

pub(crate) const TRACKS_COMMIT_TIMES: &str =
    "select pg_catalog.current_setting('track_commit_timestamp') = 'on' as tracks";
