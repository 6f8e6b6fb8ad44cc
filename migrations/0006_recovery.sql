-- Adds columns with which a relay notices at its start that its slot was lost, and with which it
-- recovers.
--
-- Plain SQL for PostgreSQL 14 to 18; running it again changes nothing.

-- This statement makes each name without a schema refer to PostgreSQL's own objects. The statement lasts
-- until the end of the transaction, so run the whole file in one transaction (psql -1), as migration
-- tools do.
set local search_path = pg_catalog, pg_temp;

alter table outbox.relay
    add column if not exists confirmed_is_final boolean not null default false,
    add column if not exists recovering text,
    -- This column was never used, because max(committed_at) of outbox.dispatch has the same value.
    drop column if exists confirmed_commit_time;

comment on column outbox.relay.confirmed_lsn is
    'Confirmed position of the slot when the relay last recorded it: while events flow and at a clean stop, not while idle.';
comment on column outbox.relay.confirmed_is_final is
    'Whether nothing was confirmed after confirmed_lsn. Set at a clean stop. A slot beyond that position was recreated or advanced by somebody else.';
comment on column outbox.relay.recovering is
    'The reason why the next session of the relay has to create a new slot and publish the rows without a record from the tables. Null: no recovery is needed.';
