-- Creates two group roles. Grant them to your own login roles:
--
--     grant postrider_writer to my_service;
--     create role my_relay login replication password '...' in role postrider_relay;
--
-- REPLICATION is an attribute of a role and is never inherited, so the login role of the relay needs it
-- too (Amazon RDS: grant rds_replication; Cloud SQL: alter role my_relay with replication). If this script
-- is allowed to, it also gives REPLICATION to postrider_relay. Then `alter role postrider_relay login
-- password '...'` makes a working relay role in one step.
--
-- Roles belong to the whole cluster, and often only administrators are allowed to create them. If this
-- script is not allowed to create a role, it prints a notice and skips the role's grants: create the role
-- and run the script again.

-- This statement makes each name without a schema refer to PostgreSQL's own objects. The statement lasts
-- until the end of the transaction, so run the whole file in one transaction (psql -1), as migration
-- tools do.
set local search_path = pg_catalog, pg_temp;

do $$
declare
    wanted record;
begin
    for wanted in
        select * from (values
            ('postrider_writer', 'nologin'),
            ('postrider_relay', 'nologin replication'),
            -- Managed services may refuse REPLICATION. A server may also refuse it if our role has
            -- only CREATEROLE. In both cases, create the role without REPLICATION.
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

-- Set the search path of the functions again, because the functions of an earlier version used the
-- search path of the caller.
alter function outbox.emit set search_path = pg_catalog, pg_temp;
alter function outbox.refuse_change set search_path = pg_catalog, pg_temp;

revoke all on function outbox.emit from public;

do $$
begin
    if exists (select from pg_catalog.pg_roles where rolname = 'postrider_writer') then
        -- Grant only once. Another grant would write the schema's row in pg_namespace again. To a relay this
        -- looks like a renamed schema, so it would compare its tables.
        if not has_schema_privilege('postrider_writer', 'outbox', 'usage') then
            grant usage on schema outbox to postrider_writer;
        end if;
        -- Grant every column, including columns of your own, except inserted_xid and seq. These two must
        -- get their defaults, because the relay relies on them.
        revoke insert on outbox.events from postrider_writer;
        execute (
            select format('grant insert (%s) on outbox.events to postrider_writer',
                          string_agg(quote_ident(a.attname), ', ' order by a.attnum))
            from pg_catalog.pg_attribute a
            where a.attrelid = 'outbox.events'::regclass and a.attnum > 0 and not a.attisdropped
              and a.attname not in ('inserted_xid', 'seq')
        );
        -- Needed for INSERT ... RETURNING id, which many libraries generate.
        grant select (id) on outbox.events to postrider_writer;
        grant execute on function outbox.emit to postrider_writer;
    end if;
    if exists (select from pg_catalog.pg_roles where rolname = 'postrider_relay') then
        if not has_schema_privilege('postrider_relay', 'outbox', 'usage') then
            grant usage on schema outbox to postrider_relay;
        end if;
        grant select on outbox.events, outbox.dispatch, outbox.relay to postrider_relay;
        -- The quarantine commands need UPDATE. The role cannot write to outbox.events. Only `postrider
        -- init --apply` with the setting `prune_after` also grants the role the right to delete rows.
        grant insert, update on outbox.dispatch, outbox.relay to postrider_relay;
    end if;
end
$$;
