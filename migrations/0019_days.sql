-- Creates functions that list, add and drop daily partitions of outbox.events.
--
-- They do nothing unless outbox.events is partitioned by range on occurred_at, as `postrider init
-- --partition daily` creates it. Whether a partition may be dropped depends on its bounds, never on its
-- name.
--
-- The relay's role owns no table, so the functions that change something run with the rights of the owner
-- of outbox.events. They have no parameter for a table name. They accept only partitions of outbox.events
-- with the bounds of exactly one day. They drop only days that are over, and add only today and the next
-- seven days.
--
-- Plain SQL for PostgreSQL 14 to 18; running it again changes nothing.

-- This statement makes each name without a schema refer to PostgreSQL's own objects. The statement lasts
-- until the end of the transaction, so run the whole file in one transaction (psql -1), as migration
-- tools do.
set local search_path = pg_catalog, pg_temp;

create or replace function outbox.days(
    out partition oid,
    out name text,
    out day date,
    out from_time timestamptz,
    out to_time timestamptz,
    out is_default boolean
) returns setof record
language sql stable
set search_path = pg_catalog, pg_temp
set timezone = 'UTC'
set datestyle = 'ISO'
as $$
    with root as (
        select p.partrelid, p.partdefid
        from pg_catalog.pg_partitioned_table p
        join pg_catalog.pg_attribute a on a.attrelid = p.partrelid and a.attnum = p.partattrs[0]
        where p.partrelid = to_regclass('outbox.events')
          and p.partstrat = 'r' and p.partnatts = 1
          and a.attname = 'occurred_at' and a.atttypid = 'timestamptz'::regtype
    ), parts as (
        select c.oid, format('%I.%I', n.nspname, c.relname) as name, c.oid = root.partdefid as is_default,
               c.relkind = 'r' and c.relpersistence = 'p' as is_plain,
               regexp_match(
                   pg_get_expr(c.relpartbound, c.oid),
                   '^FOR VALUES FROM \((?:''([^'']+)''|MINVALUE)\) TO \((?:''([^'']+)''|MAXVALUE)\)$') as bounds
        from root
        join pg_catalog.pg_inherits i on i.inhparent = root.partrelid and not i.inhdetachpending
        join pg_catalog.pg_class c on c.oid = i.inhrelid
        join pg_catalog.pg_namespace n on n.oid = c.relnamespace
    ), bounded as (
        select parts.*,
               case when bounds is not null then coalesce(bounds[1]::timestamptz, '-infinity') end as lower,
               case when bounds is not null then coalesce(bounds[2]::timestamptz, 'infinity') end as upper
        from parts
    )
    select oid, name,
           case when is_plain and isfinite(lower) and isfinite(upper) and lower >= 'epoch'::timestamptz
                     and lower = date_trunc('day', lower) and upper = lower + interval '1 day'
                then lower::date end,
           lower, upper, is_default
    from bounded
$$;

comment on function outbox.days() is
    'The partitions of outbox.events. `day` is null unless the bounds are one whole day in UTC and the partition is a plain table. No rows: the table is not partitioned by occurred_at.';

create or replace function outbox.missing_days() returns setof date
language sql stable
set search_path = pg_catalog, pg_temp
set timezone = 'UTC'
set datestyle = 'ISO'
as $$
    with known as materialized (select * from outbox.days()),
    wanted as (
        select (now() at time zone 'UTC')::date + n as day from generate_series(0, 7) n
    )
    select w.day from wanted w
    where exists (select from known)
      -- If another program such as pg_partman created the newest partition, it creates the next one too.
      -- Its partitions have other names.
      and coalesce((select k.day is not null and k.name = 'outbox.events_' || to_char(k.day, 'YYYYMMDD')
                    from known k where k.to_time is not null order by k.to_time desc limit 1), true)
      and not exists (select from known k
                      where k.from_time < (w.day + 1)::timestamp at time zone 'UTC'
                        and k.to_time > w.day::timestamp at time zone 'UTC')
    order by w.day
$$;

comment on function outbox.missing_days() is
    'The days from today (UTC) to seven days ahead that no partition of outbox.events covers. Always empty if the newest partition is not a day, or does not have the name that outbox.add_day gives it.';

-- Fails unless it runs with the rights of the owner of outbox.events. Adding and dropping partitions may run
-- code of that owner, such as the functions of a constraint, and this code must not get the rights of another
-- role.
create or replace function outbox.require_days_owner() returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
    owner constant name := (select pg_get_userbyid(c.relowner) from pg_catalog.pg_class c
                            where c.oid = to_regclass('outbox.events'));
begin
    if owner <> current_user then
        raise exception 'outbox.events belongs to %, and the functions that add and drop days to %', owner, current_user
            using errcode = 'insufficient_privilege', hint = format(
                'ALTER FUNCTION outbox.add_day(date) OWNER TO %1$I; '
                'ALTER FUNCTION outbox.lock_day(oid, date) OWNER TO %1$I; '
                'ALTER FUNCTION outbox.drop_day(oid, date) OWNER TO %1$I', owner);
    end if;
end
$$;

comment on function outbox.require_days_owner() is
    'Part of outbox.add_day, outbox.lock_day and outbox.drop_day.';

-- Adds a partition for one day. Returns `added`, or the reason why it added none:
--
--     covered   outbox.missing_days does not return the day, for example because a partition covers it
--     taken     another table has the name
--     rows      rows of that day are in the default partition
--     large     the default partition is larger than 16 MiB, or is not a plain table
--
-- ATTACH reads the default partition while inserts into it wait, so the default partition must be small. A
-- CHECK constraint that excludes the day would save the reading, but inserts of that day would then fail
-- until the new partition is attached.
create or replace function outbox.add_day(day date) returns text
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set timezone = 'UTC'
set datestyle = 'ISO'
set lock_timeout = '100ms'
set default_tablespace = ''
set default_table_access_method = 'heap'
as $$
declare
    small_bytes constant bigint := 16 * 1024 * 1024;
    lower constant timestamptz := day::timestamp at time zone 'UTC';
    upper constant timestamptz := (day + 1)::timestamp at time zone 'UTC';
    leaf constant text := format('outbox.%I', 'events_' || to_char(day, 'YYYYMMDD'));
    rest record;
    has_rows boolean;
begin
    perform outbox.require_days_owner();
    -- Only one session adds days at a time. Inserts do not wait for this lock.
    lock table only outbox.events in share update exclusive mode;
    if not exists (select from outbox.missing_days() m (day) where m.day = add_day.day) then
        return 'covered';
    end if;
    if to_regclass(leaf) is not null then
        return 'taken';
    end if;
    select d.partition, d.name, c.relkind into rest
    from outbox.days() d join pg_catalog.pg_class c on c.oid = d.partition where d.is_default;
    if found then
        if rest.relkind <> 'r' or pg_relation_size(rest.partition) > small_bytes then
            return 'large';
        end if;
        execute format('select exists (select from only %s where occurred_at >= $1 and occurred_at < $2)', rest.name)
            into has_rows using lower, upper;
        if has_rows then
            return 'rows';
        end if;
    end if;
    execute format(
        'create table %s (like outbox.events including all excluding identity excluding comments) with ('
        'autovacuum_vacuum_insert_scale_factor = 0.05, autovacuum_vacuum_scale_factor = 0.05, '
        'autovacuum_analyze_scale_factor = 0.05)', leaf);
    if exists (select from pg_catalog.pg_trigger
               where tgrelid = 'outbox.events'::regclass and tgname = 'insert_only' and not tgisinternal) then
        execute format('create trigger insert_only before update or truncate on %s '
                       'for each statement execute function outbox.refuse_change()', leaf);
    end if;
    -- Attach last, because ATTACH locks the default partition.
    execute format('alter table outbox.events attach partition %s for values from (%L) to (%L)',
                   leaf, lower, upper);
    return 'added';
end
$$;

comment on function outbox.add_day(date) is
    'Adds a daily partition to outbox.events. Its lock delays an insert for at most 0.1 s.';

-- Whether our transaction holds the lock of outbox.lock_day. Requires READ COMMITTED: with any other
-- isolation level, the transaction would see the catalogue as it was at its beginning, for example with
-- partitions that have been detached since.
create or replace function outbox.holds_day(partition oid, day date) returns boolean
language sql
set search_path = pg_catalog, pg_temp
as $$
    select current_setting('transaction_isolation') = 'read committed'
       and exists (select from outbox.days() d where d.partition = $1 and d.day = $2)
       and exists (select from pg_catalog.pg_locks l
                   where l.locktype = 'relation' and l.relation = $1 and l.mode = 'ShareRowExclusiveLock'
                     and l.granted
                     and l.pid = pg_backend_pid()
                     and l.database = (select d.oid from pg_catalog.pg_database d
                                       where d.datname = current_database()))
$$;

comment on function outbox.holds_day(oid, date) is 'Part of outbox.lock_day and outbox.drop_day.';

create or replace function outbox.lock_day(partition oid, day date) returns boolean
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set timezone = 'UTC'
set datestyle = 'ISO'
set lock_timeout = '2s'
as $$
declare
    known text;
begin
    perform outbox.require_days_owner();
    if not has_table_privilege(session_user, 'outbox.events', 'delete') then
        raise exception 'role % may not delete from outbox.events', session_user
            using errcode = 'insufficient_privilege',
                  hint = format('GRANT DELETE ON outbox.events TO %I', session_user);
    end if;
    select d.name into known from outbox.days() d
    where d.partition = lock_day.partition and d.day = lock_day.day
      and d.day < (now() at time zone 'UTC')::date;
    if not found then
        return false;
    end if;
    begin
        -- This lock mode conflicts with itself, so two sessions that prune cannot both hold the lock and
        -- then wait for each other.
        execute format('lock table only %s in share row exclusive mode', known);
    exception when undefined_table then
        return false; -- dropped while we waited
    end;
    -- Check again, because another table may have got the name in the meantime.
    return outbox.holds_day(partition, day);
end
$$;

comment on function outbox.lock_day(oid, date) is
    'Locks the rows of a past day against all changes, until the end of the transaction. False: there is no such partition.';

create or replace function outbox.drop_day(partition oid, day date) returns void
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set timezone = 'UTC'
set datestyle = 'ISO'
set lock_timeout = '100ms'
as $$
declare
    known text;
begin
    perform outbox.require_days_owner();
    -- While our transaction holds the lock, no other session can rename, detach or replace the partition.
    if not outbox.holds_day(partition, day) or day >= (now() at time zone 'UTC')::date then
        raise exception 'partition % is not locked by outbox.lock_day', partition
            using errcode = 'object_not_in_prerequisite_state';
    end if;
    select d.name into strict known from outbox.days() d where d.partition = drop_day.partition;
    -- Refuse if another session waits for the partition. That session already has a lock on outbox.events,
    -- and DROP would wait for this lock: a deadlock, for which PostgreSQL could end the other session's
    -- transaction. A session that begins to wait after this check is safe. It looks for deadlocks only after
    -- deadlock_timeout (1 s), and DROP gives up sooner (lock_timeout). A session that waits in
    -- outbox.lock_day (share row exclusive) has no other lock, so it does not count.
    if exists (select from pg_catalog.pg_locks l
               where l.locktype = 'relation' and l.relation = drop_day.partition and not l.granted
                 and l.mode <> 'ShareRowExclusiveLock'
                 and l.database = (select d.oid from pg_catalog.pg_database d
                                   where d.datname = current_database())) then
        raise exception 'another session waits for %', known using errcode = 'object_in_use';
    end if;
    execute format('drop table %s', known);
end
$$;

comment on function outbox.drop_day(oid, date) is
    'Drops the partition of a past day, which outbox.lock_day has locked. Each lock delays an insert for at most 0.1 s.';

revoke all on function outbox.add_day(date), outbox.lock_day(oid, date), outbox.drop_day(oid, date) from public;

-- Make the owner of the table the owner of the functions, if another role applies this migration.
do $$
declare
    owner constant name := (select pg_get_userbyid(c.relowner) from pg_catalog.pg_class c
                            where c.oid = to_regclass('outbox.events'));
begin
    if owner <> current_user then
        -- The functions below run with the owner's privileges, and call these.
        execute format('grant execute on function outbox.days(), outbox.missing_days(), '
                       'outbox.holds_day(oid, date), outbox.require_days_owner() to %I', owner);
        execute format('alter function outbox.add_day(date) owner to %I', owner);
        execute format('alter function outbox.lock_day(oid, date) owner to %I', owner);
        execute format('alter function outbox.drop_day(oid, date) owner to %I', owner);
    end if;
exception
    when insufficient_privilege then
        raise notice 'days cannot be added or dropped: %', sqlerrm
            using hint = format('As a superuser, or as %I: apply this migration again.', owner);
end
$$;

do $$
begin
    if exists (select from pg_catalog.pg_roles where rolname = 'postrider_relay') then
        grant execute on function outbox.days(), outbox.missing_days() to postrider_relay;
    end if;
end
$$;
