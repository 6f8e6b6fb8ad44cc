-- Keeps the messages as which an event was published before a replay published it again.
--
-- Plain SQL for PostgreSQL 14 to 18; running it again changes nothing.

-- Names below are PostgreSQL's own, under any search path. Run the whole file
-- in one transaction (psql -1), as migration tools do.
set local search_path = pg_catalog, pg_temp;

set local lock_timeout = '10s';

alter table outbox.dispatch
    add column if not exists earlier_messages jsonb;

comment on column outbox.dispatch.earlier_messages is
    'Messages as which the event was published before its last replay, oldest first, as [{message_id, published_at, replay}]; the first and the last nine are kept. Null if it was never replayed.';
