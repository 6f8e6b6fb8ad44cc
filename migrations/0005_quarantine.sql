-- Release from quarantine: a row that an operator has asked for is 'released' until it is sent.
--
-- Plain SQL for PostgreSQL 14 to 18; running it again changes nothing.

-- Names below are PostgreSQL's own, under any search path. Run the whole file
-- in one transaction (psql -1), as migration tools do.
set local search_path = pg_catalog, pg_temp;

do $$
begin
    if not exists (
        select from pg_catalog.pg_constraint
        where conrelid = 'outbox.dispatch'::regclass and conname = 'dispatch_state'
          and pg_catalog.pg_get_constraintdef(oid) like '%released%'
    ) then
        -- NOT VALID: every row there is keeps to the narrower rule, so the table need not be read
        -- under a lock.
        alter table outbox.dispatch
            drop constraint if exists dispatch_state,
            add constraint dispatch_state
                check (state in ('published', 'quarantined', 'released', 'discarded')) not valid;
    end if;
end
$$;

-- What is in quarantine, key by key in order. Holds those rows alone: a published row costs the
-- evaluation of the condition and no more. The relay looks into it every two seconds.
create index if not exists dispatch_quarantine on outbox.dispatch
    (state, (coalesce(topic, '')), (coalesce(ordering_key, '')), commit_lsn, ordinal)
    where state in ('quarantined', 'released');

comment on column outbox.dispatch.state is
    'published; quarantined; released: to be sent from quarantine; discarded.';
