-- dispatch = exceptions: which rows have their outcome though outbox.dispatch has no row of them.
--
-- Plain SQL for PostgreSQL 14 to 18; running it again changes nothing. The table has one row for
-- each slot: the lock that this takes is short, and whoever holds it up is not waited for.

-- Names below are PostgreSQL's own, whatever the search path of the session is. Run the whole file
-- in one transaction (psql -1), as migration tools do.
set local search_path = pg_catalog, pg_temp;

set local lock_timeout = '10s';

alter table outbox.relay
    add column if not exists dispatch text not null default 'full'
        constraint relay_dispatch check (dispatch in ('full', 'exceptions'));

