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
        constraint relay_dispatch check (dispatch in ('full', 'exceptions')),
    add column if not exists exceptions_xid bigint,
    add column if not exists resolved_xid bigint;

comment on column outbox.relay.dispatch is
    'How the rows after resolved_xid were handled: full, each has a row in outbox.dispatch when it is delivered; exceptions, only what is set aside.';
comment on column outbox.relay.exceptions_xid is
    'The transaction since which outbox.dispatch holds exceptions only; null under dispatch = full.';
comment on column outbox.relay.resolved_xid is
    'Rows that were inserted by transactions older than this one have an outcome, recorded or not. Null: what is recorded has one.';
comment on column outbox.relay.audited_at is
    'When every row of the captured tables was last known to have an outcome. Null: not since the first start.';
