-- Adds the release from quarantine: a row that an operator has released is in the state 'released' until
-- its event is published.
--
-- Plain SQL for PostgreSQL 14 to 18; running it again changes nothing.

-- This statement makes each name without a schema refer to PostgreSQL's own objects. The statement lasts
-- until the end of the transaction, so run the whole file in one transaction (psql -1), as migration
-- tools do.
set local search_path = pg_catalog, pg_temp;

do $$
begin
    if not exists (
        select from pg_catalog.pg_constraint
        where conrelid = 'outbox.dispatch'::regclass and conname = 'dispatch_state'
          and pg_catalog.pg_get_constraintdef(oid) like '%released%'
    ) then
        -- NOT VALID saves PostgreSQL from reading the table under a lock. All existing rows satisfy the old
        -- constraint, which is narrower, so they satisfy this one too.
        alter table outbox.dispatch
            drop constraint if exists dispatch_state,
            add constraint dispatch_state
                check (state in ('published', 'quarantined', 'released', 'discarded')) not valid;
    end if;
end
$$;

-- The events in quarantine, ordered by key. The index contains only their rows, so a published row costs
-- only the evaluation of the condition. The relay queries the index every two seconds.
create index if not exists dispatch_quarantine on outbox.dispatch
    (state, (coalesce(topic, '')), (coalesce(ordering_key, '')), commit_lsn, ordinal)
    where state in ('quarantined', 'released');

comment on column outbox.dispatch.state is
    'published; quarantined; released: to be sent from quarantine; discarded.';
