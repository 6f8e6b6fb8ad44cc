-- Adds columns in which a relay that prunes (`prune_after`) records how its last run ended. `postrider
-- status` shows them.
--
-- Plain SQL for PostgreSQL 14 to 18; running it again changes nothing.

-- This statement makes each name without a schema refer to PostgreSQL's own objects. The statement lasts
-- until the end of the transaction, so run the whole file in one transaction (psql -1), as migration
-- tools do.
set local search_path = pg_catalog, pg_temp;

set local lock_timeout = '10s';

alter table outbox.relay
    add column if not exists pruning   jsonb,
    add column if not exists pruned_at timestamptz;

comment on column outbox.relay.pruning is
    'How the relay''s last run of pruning ended: rows, records, error code. Null if it does not prune.';
comment on column outbox.relay.pruned_at is 'When that run ended.';
