-- Lets a relay notice at its start that its slot was lost, and recover.
--
-- Plain SQL for PostgreSQL 14 to 18; running it again changes nothing.

-- Names below are PostgreSQL's own, under any search path. Run the whole file
-- in one transaction (psql -1), as migration tools do.
set local search_path = pg_catalog, pg_temp;

alter table outbox.relay
    add column if not exists confirmed_is_final boolean not null default false,
    add column if not exists recovering text,
    -- Never written; max(committed_at) of outbox.dispatch says it.
    drop column if exists confirmed_commit_time;

comment on column outbox.relay.confirmed_lsn is
    'Confirmed position of the slot when last written down: while events flow and at a clean stop, not while idle.';
comment on column outbox.relay.confirmed_is_final is
    'Whether nothing was confirmed after confirmed_lsn: written at a clean stop. A slot further on than that was made anew or advanced by somebody else.';
comment on column outbox.relay.recovering is
    'Not null: the rows without a record are still to be delivered from the tables; why. The next session of the relay makes a new slot and does so.';
