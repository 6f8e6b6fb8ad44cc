-- The publication that the relay streams. It must exist before the slot: PostgreSQL looks a
-- publication up as of the log position that it decodes, so rows inserted before it existed fail to
-- decode, and PostgreSQL 18 skips them silently.
--
-- Needs ownership of the tables and CREATE on the database. Created only when missing: dropping
-- and recreating it loses the rows in between. To capture another table:
--     alter publication postrider add table my_schema.my_outbox;
--     grant select on my_schema.my_outbox to postrider_relay;

-- Names below are PostgreSQL's own, under any search path. Run the whole file
-- in one transaction (psql -1), as migration tools do.
set local search_path = pg_catalog, pg_temp;

do $$
begin
    if not exists (select from pg_catalog.pg_publication where pubname = 'postrider') then
        create publication postrider for table outbox.events
            with (publish = 'insert', publish_via_partition_root = true);
    end if;
end
$$;
