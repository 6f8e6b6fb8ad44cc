-- Adds columns in which the relay records why it does not deliver, for commands that cannot reach its
-- HTTP port.
--
-- Plain SQL for PostgreSQL 14 to 18; running it again changes nothing.

-- This statement makes each name without a schema refer to PostgreSQL's own objects. The statement lasts
-- until the end of the transaction, so run the whole file in one transaction (psql -1), as migration
-- tools do.
set local search_path = pg_catalog, pg_temp;

set local lock_timeout = '10s';

alter table outbox.relay
    add column if not exists condition    jsonb,
    add column if not exists condition_at timestamptz;

comment on column outbox.relay.condition is
    'What holds up the delivery: state, error code, hint and failing topics. Null while events are delivered.';
comment on column outbox.relay.condition_at is
    'When condition was written. A relay that is held up writes it every 30 seconds.';
