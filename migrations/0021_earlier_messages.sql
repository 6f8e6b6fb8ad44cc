-- Adds a column for the earlier messages of an event that a replay has published again.
--
-- Plain SQL for PostgreSQL 14 to 18; running it again changes nothing.

-- This statement makes each name without a schema refer to PostgreSQL's own objects. The statement lasts
-- until the end of the transaction, so run the whole file in one transaction (psql -1), as migration
-- tools do.
set local search_path = pg_catalog, pg_temp;

set local lock_timeout = '10s';

alter table outbox.dispatch
    add column if not exists earlier_messages jsonb;

comment on column outbox.dispatch.earlier_messages is
    'The earlier messages of a replayed event, oldest first, as [{message_id, published_at, replay}]; the first and the last nine are kept. Null if the event was never replayed.';
