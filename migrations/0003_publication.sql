-- Creates the publication that the relay streams. The publication must exist before the slot. PostgreSQL
-- looks a publication up as it was at the WAL position that it decodes. So decoding fails at rows that were
-- inserted before the publication existed. PostgreSQL 18 does not fail: it skips these rows with only a
-- warning.
--
-- Needs ownership of the tables and CREATE on the database. The publication is created only if it is
-- missing, because dropping and recreating it would lose the rows in between. To capture another table:
--     alter publication postrider add table my_schema.my_outbox;
--     grant select on my_schema.my_outbox to postrider_relay;

-- This statement makes each name without a schema refer to PostgreSQL's own objects. The statement lasts
-- until the end of the transaction, so run the whole file in one transaction (psql -1), as migration
-- tools do.
set local search_path = pg_catalog, pg_temp;

do $$
begin
    if not exists (select from pg_catalog.pg_publication where pubname = 'postrider') then
        create publication postrider for table outbox.events
            with (publish = 'insert', publish_via_partition_root = true);
    end if;
end
$$;
