-- Records where in the WAL capturing began, so that a slot that was moved or made by hand before the first start
-- is noticed.
--
-- Plain SQL for PostgreSQL 14 to 18; running it again changes nothing.

-- Names below are PostgreSQL's own, under any search path. Run the whole file
-- in one transaction (psql -1), as migration tools do.
set local search_path = pg_catalog, pg_temp;

set local lock_timeout = '10s';

alter table outbox.capture
    add column if not exists since_lsn pg_lsn;

comment on column outbox.capture.since_lsn is
    'WAL position at which capturing began. If no relay has used the slot yet, a slot ahead of this position skips rows, and a slot behind it is older than the publication. Null if a relay or an older version began capturing.';
