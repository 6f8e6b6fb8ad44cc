-- Records the WAL position at which the capture began. With it, a relay notices at its first start that
-- the slot was moved, or was created by hand at another position.
--
-- Plain SQL for PostgreSQL 14 to 18; running it again changes nothing.

-- This statement makes each name without a schema refer to PostgreSQL's own objects. The statement lasts
-- until the end of the transaction, so run the whole file in one transaction (psql -1), as migration
-- tools do.
set local search_path = pg_catalog, pg_temp;

set local lock_timeout = '10s';

alter table outbox.capture
    add column if not exists since_lsn pg_lsn;

comment on column outbox.capture.since_lsn is
    'WAL position at which capturing began. If no relay has used the slot yet, a slot ahead of this position skips rows, and a slot behind it is older than the publication. Null if a relay or an older version began capturing.';
