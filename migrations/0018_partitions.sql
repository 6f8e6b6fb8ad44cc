-- Daily partitions of outbox.events, if `postrider init --partition daily` created it: functions that add
-- partitions ahead and drop old ones. A relay that prunes (`prune_after`) and `postrider prune` call them.
--
-- They run with the rights of the owner, because only the owner of a table may add and drop its
-- partitions. Nobody else may call them until `postrider init --apply` with `prune_after` grants it to the
-- relay. They touch nothing but daily partitions of outbox.events.
--
-- Plain SQL for PostgreSQL 14 to 18; running it again changes nothing.

-- Names below are PostgreSQL's own, under any search path. Run the whole file
-- in one transaction (psql -1), as migration tools do.
set local search_path = pg_catalog, pg_temp;

-- Adds the partitions of today and the next days (UTC) that are missing; returns how many it added.
-- `create table` and `attach partition` rather than `create table ... partition of`: the latter would hold
-- up every insert while it waits for its lock on outbox.events.
create or replace function outbox.add_partitions(days_ahead int) returns int
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    day   date;
    name  text;
    added int := 0;
begin
    if to_regclass('outbox.events_default') is null or not exists (
        select from pg_partitioned_table p
        join pg_attribute a on a.attrelid = p.partrelid and a.attnum = p.partattrs[0] and a.attname = 'created_at'
        where p.partrelid = 'outbox.events'::regclass and p.partstrat = 'r' and p.partnatts = 1) then
        return 0;
    end if;
    for day in
        select (now() at time zone 'UTC')::date + i from generate_series(0, least(days_ahead, 31)) i
    loop
        name := 'events_' || to_char(day, 'YYYYMMDD');
        continue when to_regclass(format('outbox.%I', name)) is not null;
        begin
            execute format(
                'create table outbox.%I (like outbox.events including all) with (
                     autovacuum_vacuum_insert_scale_factor = 0.05,
                     autovacuum_vacuum_scale_factor = 0.05,
                     autovacuum_analyze_scale_factor = 0.05)', name);
            execute format(
                'create trigger insert_only before update or truncate on outbox.%I
                     for each statement execute function outbox.refuse_change()', name);
            execute format(
                'alter table outbox.events attach partition outbox.%I for values from (%L) to (%L)',
                name, day::timestamp at time zone 'UTC', (day + 1)::timestamp at time zone 'UTC');
            added := added + 1;
        exception
            -- Rows of that day are in the default partition already, and stay there; or another session has
            -- just added the partition.
            when check_violation or duplicate_table or unique_violation then null;
        end;
    end loop;
    return added;
end
$$;

-- Keeps writers away from a partition of a past day until the transaction ends. Returns false if there is no
-- such partition.
create or replace function outbox.lock_partition(name text) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    if name !~ '^events_[0-9]{8}$'
       or right(name, 8) >= to_char(now() at time zone 'UTC', 'YYYYMMDD')
       or to_regclass(format('outbox.%I', name)) is null then
        return false;
    end if;
    execute format('lock table only outbox.%I in share mode', name);
    return exists (
        select from pg_inherits
        where inhparent = 'outbox.events'::regclass and inhrelid = to_regclass(format('outbox.%I', name)));
end
$$;

-- Drops a partition of a past day. The caller first locks it with outbox.lock_partition in the same
-- transaction, and checks that none of its rows is needed.
create or replace function outbox.drop_partition(name text) returns void
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    if outbox.lock_partition(name) then
        execute format('drop table outbox.%I', name);
    end if;
end
$$;

revoke all on function outbox.add_partitions, outbox.lock_partition, outbox.drop_partition from public;

comment on function outbox.add_partitions is 'Adds the missing daily partitions of outbox.events, up to this many days ahead.';
comment on function outbox.lock_partition is 'Keeps writers away from a past daily partition of outbox.events until the transaction ends.';
comment on function outbox.drop_partition is 'Drops a past daily partition of outbox.events.';

select outbox.add_partitions(3);
