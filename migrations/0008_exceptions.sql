-- dispatch = exceptions: records which rows have their outcome although outbox.dispatch has no row of
-- them.
--
-- Plain SQL for PostgreSQL 14 to 18; running it again changes nothing. The table has one row for
-- each slot, so the lock is short; if another session holds it up, the script gives up.

-- Names below are PostgreSQL's own, under any search path. Run the whole file
-- in one transaction (psql -1), as migration tools do.
set local search_path = pg_catalog, pg_temp;

set local lock_timeout = '10s';

alter table outbox.relay
    add column if not exists dispatch text not null default 'full'
        constraint relay_dispatch check (dispatch in ('full', 'exceptions'));

