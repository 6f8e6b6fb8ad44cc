//! Statements on sessions, on locks, and on slots in use.

/// Parameters: slot name (text), server process (int4).
pub(crate) const CONFIRMED_BY_READER: &str = "
select confirmed_flush_lsn from pg_catalog.pg_replication_slots
where slot_name = $1 and active_pid = $2";

/// Parameters: slot name (text). Returns one row if a session reads from the slot.
pub(crate) const END_READER: &str = "
select pg_catalog.pg_terminate_backend(active_pid) from pg_catalog.pg_replication_slots
where slot_name = $1 and active_pid is not null";

/// Parameters: pid of a server process (int4). Returns one row while this process reads from a
/// slot.
pub(crate) const LAST_REPLY: &str = "
select (select r.reply_time from pg_catalog.pg_stat_replication r where r.pid = $1) as reply_time
from pg_catalog.pg_replication_slots s where s.active_pid = $1";

/// Returns the start time too, because pids are reused.
pub(crate) const OWN_PROCESS: &str = "
select pg_catalog.pg_backend_pid() as pid,
       (select a.backend_start::text from pg_catalog.pg_stat_activity a
        where a.pid = pg_catalog.pg_backend_pid()) as started";

/// Parameters: pid of a server process (int4), its start time (text). A process whose state our role is not
/// allowed to see counts as busy.
pub(crate) const IS_AT_WORK: &str = "
select count(*) > 0 as is_at_work from pg_catalog.pg_stat_activity
where pid = $1 and backend_start::text is not distinct from $2
  and wait_event_type is distinct from 'Client' and coalesce(state, '') not in
      ('idle', 'idle in transaction', 'idle in transaction (aborted)')";

/// Parameters: application name (text), quoted table name (text). For sessions of other roles, the statement
/// checks their locks on the table, because PostgreSQL may hide the states of these sessions from our role.
pub(crate) const BUSY_SESSIONS: &str = "
select count(*) as sessions from pg_catalog.pg_stat_activity a
where a.application_name = left($1, 63) and a.datname = pg_catalog.current_database()
  and a.pid <> pg_catalog.pg_backend_pid()
  and case when a.usename = session_user then a.state <> 'idle'
      else pg_catalog.has_table_privilege(a.usesysid, pg_catalog.to_regclass($2), 'update')
           and exists (select from pg_catalog.pg_locks l
                       where l.pid = a.pid and l.relation = pg_catalog.to_regclass($2))
      end";

/// Parameters: application name (text).
pub(crate) const END_BUSY_SESSIONS: &str = "
select count(*) as sessions
from (select pg_catalog.pg_terminate_backend(pid) from pg_catalog.pg_stat_activity
      where application_name = left($1, 63) and datname = pg_catalog.current_database()
        and usename = session_user and state <> 'idle' and pid <> pg_catalog.pg_backend_pid()
      offset 0) ended";

/// Parameters: application name (text), quoted table name (text).
pub(crate) const SESSION_OF_A_STRANGER: &str = concat!(
    "
select pid, ",
    shared_name!("usename"),
    " as role from pg_catalog.pg_stat_activity
where application_name = left($1, 63) and datname = pg_catalog.current_database()
  and usename is distinct from session_user
  and not coalesce(
      pg_catalog.has_table_privilege(usesysid, pg_catalog.to_regclass($2), 'update'), false)
limit 1"
);

/// Parameters: key (int8). Returns whether this session has the lock now.
pub(crate) const TRY_ADVISORY_LOCK: &str = "select pg_try_advisory_lock($1)";

/// Parameters: key (int8).
pub(crate) const ADVISORY_UNLOCK: &str = "select pg_advisory_unlock($1)";

/// Parameters: key of an advisory lock (int8).
pub(crate) const ADVISORY_LOCK_HOLDER: &str = concat!(
    "
select l.pid, ",
    shared_name!("a.usename"),
    " as role
from pg_catalog.pg_locks l left join pg_catalog.pg_stat_activity a on a.pid = l.pid
where l.locktype = 'advisory' and l.granted and l.objsubid = 1
  and l.database = (select d.oid from pg_catalog.pg_database d
                    where d.datname = pg_catalog.current_database())
  and l.classid = (($1 >> 32) & 4294967295)::oid and l.objid = ($1 & 4294967295)::oid
limit 1"
);

/// Parameters: quoted table name (text).
pub(crate) const TABLE_LOCK_HOLDER: &str = concat!(
    "
with recursive tree (oid) as (
    select pg_catalog.to_regclass($1)::oid
    union all
    select i.inhrelid from tree join pg_catalog.pg_inherits i on i.inhparent = tree.oid
)
select l.pid, ",
    shared_name!("a.usename"),
    " as role
from pg_catalog.pg_locks l left join pg_catalog.pg_stat_activity a on a.pid = l.pid
where l.granted and l.pid is distinct from pg_catalog.pg_backend_pid()
  and l.database = (select d.oid from pg_catalog.pg_database d
                    where d.datname = pg_catalog.current_database())
  and l.relation in (select oid from tree)
order by a.xact_start
limit 1"
);

/// Parameters: server process (int4). Returns one row while the process waits for a synchronous standby
/// server.
pub(crate) const SYNCHRONOUS_STANDBY_WAIT: &str = "
select extract(epoch from pg_catalog.clock_timestamp() - query_start)::float8 as waited_seconds
from pg_catalog.pg_stat_activity where pid = $1 and wait_event = 'SyncRep'";

/// Parameters: server process (int4). If the process waits for a lock, returns one row per transaction that
/// blocks it (at least one row). If the process waits for no lock, returns no row.
///
/// `pg_blocking_pids` shows every prepared transaction as process 0. So the second half of `blockers` looks
/// for holders of the same lock that have no process: these are prepared transactions. A prepared transaction
/// also holds the lock on its own xid, which identifies the transaction in `pg_prepared_xacts`.
pub(crate) const LOCK_WAIT: &str = concat!("
with waiting as materialized (
    select l.*, extract(epoch from pg_catalog.clock_timestamp() - l.waitstart)::float8 as waited_seconds
    from pg_catalog.pg_locks l where l.pid = $1 and not l.granted limit 1
), blockers as (
    select case
               when a.state in ('idle in transaction', 'idle in transaction (aborted)')
               then 'idle-in-transaction' else 'transaction'
           end as kind,
           b.pid, null::text as name, a.datname::text as database, a.usename::text as user_name,
           a.application_name,
           extract(epoch from pg_catalog.clock_timestamp() - a.xact_start)::float8 as age_seconds
    from (select distinct pg_catalog.unnest(pg_catalog.pg_blocking_pids(pid)) as pid from waiting) b
    left join pg_catalog.pg_stat_activity a on a.pid = b.pid
    where b.pid <> 0
    union all
    select distinct 'prepared-transaction', null::int4, p.gid, p.database::text, p.owner::text, null,
           extract(epoch from pg_catalog.clock_timestamp() - p.prepared)::float8
    from waiting w
    join pg_catalog.pg_locks h on h.granted and h.pid is null and h.locktype = w.locktype
         and (h.database, h.relation, h.transactionid) is not distinct from
             (w.database, w.relation, w.transactionid)
    join pg_catalog.pg_locks x on x.pid is null and x.locktype = 'transactionid'
         and x.virtualtransaction = h.virtualtransaction
    join pg_catalog.pg_prepared_xacts p on p.transaction = x.transactionid
)
select w.waited_seconds, w.relation::regclass::text as relation, b.kind, b.pid,
       ", shared_name!("b.name"), " as name, ", shared_name!("b.database"), " as database, ", shared_name!("b.user_name"), " as user_name,
       b.application_name, b.age_seconds
from waiting w left join blockers b on true
order by b.age_seconds desc nulls last, b.pid");

/// Parameters: pid of a walsender (int4). Returns one row for each slot in `synchronized_standby_slots` that has
/// not received all WAL, or one row without a slot if all have. Returns no row if there is no such walsender. The
/// names in the setting can be quoted, so the statement removes the quotes.
pub(crate) const WALSENDER_WAIT: &str = "
with named as (
    select pg_catalog.btrim(n.name, ' \"') as name
    from pg_catalog.unnest(pg_catalog.string_to_array(
             pg_catalog.current_setting('synchronized_standby_slots', true), ',')) n(name)
), behind as (
    select n.name, s.slot_name is null as is_missing, coalesce(s.slot_type = 'logical', false) as is_logical,
           coalesce(s.wal_status = 'lost' or s.restart_lsn is null, false) as is_invalid,
           coalesce(s.active, false) as is_read
    from named n left join pg_catalog.pg_replication_slots s on s.slot_name = n.name
    where n.name <> '' and (s.slot_name is null or s.slot_type = 'logical' or s.restart_lsn is null
          or s.restart_lsn < pg_catalog.pg_current_wal_flush_lsn() or s.wal_status = 'lost')
)
select r.sent_lsn, a.wait_event = 'WaitForStandbyConfirmation' as is_for_standbys, b.*
from pg_catalog.pg_stat_replication r
join pg_catalog.pg_stat_activity a on a.pid = r.pid
left join behind b on true
where r.pid = $1
order by b.name";
