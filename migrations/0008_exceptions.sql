-- Adds the column that records the mode of the relay: `full` or `exceptions`. With `exceptions`,
-- rows can be resolved although outbox.dispatch has no row for them.
--
-- Plain SQL for PostgreSQL 14 to 18; running it again changes nothing. outbox.relay has one row per
-- slot, so ALTER TABLE holds its lock only briefly. If another session holds a lock on outbox.relay
-- for 10 seconds, the script fails.

-- This statement makes each name without a schema refer to PostgreSQL's own objects. The statement lasts
-- until the end of the transaction, so run the whole file in one transaction (psql -1), as migration
-- tools do.
set local search_path = pg_catalog, pg_temp;

set local lock_timeout = '10s';

alter table outbox.relay
    add column if not exists dispatch text not null default 'full'
        constraint relay_dispatch check (dispatch in ('full', 'exceptions'));

