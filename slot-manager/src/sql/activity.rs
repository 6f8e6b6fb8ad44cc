//! Statements on sessions, locks and the slots that sessions read.

/// Parameters: slot name (text), server process (int4).
pub(crate) const CONFIRMED_BY_READER: &str = "
select confirmed_flush_lsn from pg_catalog.pg_replication_slots
where slot_name = $1 and active_pid = $2";

/// Parameters: slot name (text). One row if a session reads from the slot.
pub(crate) const END_READER: &str = "
select pg_catalog.pg_terminate_backend(active_pid) from pg_catalog.pg_replication_slots
where slot_name = $1 and active_pid is not null";

/// Parameters: server process (int4). One row while it reads from a slot.
pub(crate) const LAST_REPLY: &str = "
select (select r.reply_time from pg_catalog.pg_stat_replication r where r.pid = $1) as reply_time
from pg_catalog.pg_replication_slots s where s.active_pid = $1";

/// The start time is included because pids are reused.
pub(crate) const OWN_PROCESS: &str = "
select pg_catalog.pg_backend_pid() as pid,
       (select a.backend_start::text from pg_catalog.pg_stat_activity a
        where a.pid = pg_catalog.pg_backend_pid()) as started";

/// Parameters: server process (int4), its start (text). A process that shows no state counts as
/// working.
pub(crate) const IS_AT_WORK: &str = "
select count(*) > 0 as is_at_work from pg_catalog.pg_stat_activity
where pid = $1 and backend_start::text is not distinct from $2
  and wait_event_type is distinct from 'Client' and coalesce(state, '') not in
      ('idle', 'idle in transaction', 'idle in transaction (aborted)')";

/// Parameters: application name (text).
pub(crate) const BUSY_SESSIONS: &str = "
select count(*) as sessions from pg_catalog.pg_stat_activity
where application_name = left($1, 63) and datname = pg_catalog.current_database()
  and usename = session_user and state <> 'idle' and pid <> pg_catalog.pg_backend_pid()";

/// Parameters: application name (text).
pub(crate) const END_BUSY_SESSIONS: &str = "
select count(*) as sessions
from (select pg_catalog.pg_terminate_backend(pid) from pg_catalog.pg_stat_activity
      where application_name = left($1, 63) and datname = pg_catalog.current_database()
        and usename = session_user and state <> 'idle' and pid <> pg_catalog.pg_backend_pid()
      offset 0) ended";

/// Parameters: application name (text).
pub(crate) const SESSION_OF_ANOTHER_ROLE: &str = "
select pid, usename::text as role from pg_catalog.pg_stat_activity
where application_name = left($1, 63) and datname = pg_catalog.current_database()
  and usename is distinct from session_user
limit 1";

/// Parameter: key (int8). Returns whether this session has the lock now.
pub(crate) const TRY_ADVISORY_LOCK: &str = "select pg_try_advisory_lock($1)";

/// Parameter: key (int8).
pub(crate) const ADVISORY_UNLOCK: &str = "select pg_advisory_unlock($1)";

/// Parameters: key of an advisory lock (int8).
pub(crate) const ADVISORY_LOCK_HOLDER: &str = "
select l.pid, a.usename::text as role
from pg_catalog.pg_locks l left join pg_catalog.pg_stat_activity a on a.pid = l.pid
where l.locktype = 'advisory' and l.granted and l.objsubid = 1
  and l.database = (select d.oid from pg_catalog.pg_database d
                    where d.datname = pg_catalog.current_database())
  and l.classid = (($1 >> 32) & 4294967295)::oid and l.objid = ($1 & 4294967295)::oid
limit 1";

/// Parameters: quoted table name (text).
pub(crate) const TABLE_LOCK_HOLDER: &str = "
select l.pid, a.usename::text as role
from pg_catalog.pg_locks l left join pg_catalog.pg_stat_activity a on a.pid = l.pid
where l.granted and l.pid is distinct from pg_catalog.pg_backend_pid()
  and l.database = (select d.oid from pg_catalog.pg_database d
                    where d.datname = pg_catalog.current_database())
  and (l.relation = pg_catalog.to_regclass($1) or l.relation in (
      select t.relid from pg_catalog.pg_partition_tree(pg_catalog.to_regclass($1)) t))
order by a.xact_start
limit 1";
