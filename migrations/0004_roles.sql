-- Two group roles: grant them to your own login roles.
--
--     grant postrider_writer to my_service;
--     create role my_relay login replication password '...' in role postrider_relay;
--
-- REPLICATION is an attribute of a role and is never inherited: the login role of the relay needs
-- it itself (Amazon RDS: grant rds_replication; Cloud SQL: alter role my_relay with replication).
-- postrider_relay has it as well where this script may give it, so that
-- `alter role postrider_relay login password '...'` makes a working relay role in one step.
--
-- Roles belong to the whole cluster, and often only administrators may create them. If this script
-- may not create one, it says so and skips the grants: create the role and run the script again.

-- Names below are PostgreSQL's own, under any search path. Run the whole file
-- in one transaction (psql -1), as migration tools do.
set local search_path = pg_catalog, pg_temp;

do $$
declare
    wanted record;
begin
    for wanted in
        select * from (values
            ('postrider_writer', 'nologin'),
            ('postrider_relay', 'nologin replication'),
            -- Managed services and plain CREATEROLE may refuse REPLICATION: then without.
            ('postrider_relay', 'nologin')
        ) as roles (name, attributes)
    loop
        continue when exists (select from pg_catalog.pg_roles where rolname = wanted.name);
        begin
            execute format('create role %I %s', wanted.name, wanted.attributes);
        exception
            when insufficient_privilege then
                raise notice 'role % (%) was not created: %', wanted.name, wanted.attributes, sqlerrm
                    using hint = format('Ask an administrator to run: create role %I %s; and apply this migration again.',
                                        wanted.name, wanted.attributes);
            when duplicate_object or unique_violation then
                null; -- another session made it just now
        end;
    end loop;
end
$$;

-- Those of an earlier version took names from the search path of the caller.
alter function outbox.emit set search_path = pg_catalog, pg_temp;
alter function outbox.refuse_change set search_path = pg_catalog, pg_temp;

revoke all on function outbox.emit from public;

do $$
begin
    if exists (select from pg_catalog.pg_roles where rolname = 'postrider_writer') then
        -- Not again: a relay would take it for a renamed schema, and compare its tables.
        if not has_schema_privilege('postrider_writer', 'outbox', 'usage') then
            grant usage on schema outbox to postrider_writer;
        end if;
        -- Each column of the event, yours too, but never inserted_xid and seq: they come from their
        -- defaults, and the relay relies on them.
        revoke insert on outbox.events from postrider_writer;
        execute (
            select format('grant insert (%s) on outbox.events to postrider_writer',
                          string_agg(quote_ident(a.attname), ', ' order by a.attnum))
            from pg_catalog.pg_attribute a
            where a.attrelid = 'outbox.events'::regclass and a.attnum > 0 and not a.attisdropped
              and a.attname not in ('inserted_xid', 'seq')
              -- Writers may not set the column that decides the partition.
              and not exists (select from pg_catalog.pg_partitioned_table p
                              where p.partrelid = a.attrelid and a.attnum = any (p.partattrs))
        );
        -- For INSERT ... RETURNING id, which many libraries write by themselves.
        grant select (id) on outbox.events to postrider_writer;
        grant execute on function outbox.emit to postrider_writer;
    end if;
    if exists (select from pg_catalog.pg_roles where rolname = 'postrider_relay') then
        if not has_schema_privilege('postrider_relay', 'outbox', 'usage') then
            grant usage on schema outbox to postrider_relay;
        end if;
        grant select on outbox.events, outbox.dispatch, outbox.relay to postrider_relay;
        -- UPDATE serves the quarantine commands. No write on outbox.events: a relay that prunes gets the
        -- right to delete from `postrider init --apply` with the setting `prune_after`.
        grant insert, update on outbox.dispatch, outbox.relay to postrider_relay;
    end if;
end
$$;
