-- Adds a column with the former tables whose rows all have an outcome. Events in quarantine may still need
-- their rows in such a table, and the rows come back if the table is attached again or gets its name back.
--
-- Plain SQL for PostgreSQL 14 to 18; running it again changes nothing.

-- Names without a schema below mean PostgreSQL's own objects, under any search path. Run the whole file in
-- one transaction (psql -1), as migration tools do.
set local search_path = pg_catalog, pg_temp;

set local lock_timeout = '10s';

do $$
begin
    if exists (select from pg_attribute where attrelid = 'outbox.capture'::regclass
               and attname = 'settled' and not attisdropped) then
        return;
    end if;
    alter table outbox.capture add column settled jsonb not null default '{}';
    -- Earlier versions forgot these tables. But the record still knows the tables that had the captured name
    -- before, because the ids of their events depend on them.
    update outbox.capture c set settled = (
        select coalesce(jsonb_object_agg(k.oid, pg_current_wal_insert_lsn()), '{}')
        from jsonb_object_keys(c.id_suffixes) k (oid)
        where case when k.oid ~ '^[0-9]+$' then exists (
            select from pg_class t where t.oid = k.oid::oid and t.relkind = 'r'
                and t.oid <> c.table_oid and t.oid <> all (c.detached)
                and t.oid <> all (coalesce(string_to_array(c.partitions, ',')::oid[], '{}'))) end)
    where c.id_suffixes is not null;
end $$;

comment on column outbox.capture.settled is
    'Tables that were partitions, or were the table itself, and whose rows all have an outcome, by OID. The value is the end of the WAL when this became known: all records of their rows are older. At most 256 tables that still exist.';
