-- One relay per database. The migration 0009 is gone: it was for several relays on one database
-- ("shards"), and was removed before a release. Where it was applied, this takes it back.
--
-- Plain SQL for PostgreSQL 14 to 18; running it again changes nothing.

-- Names below are PostgreSQL's own, under any search path. Run the whole file
-- in one transaction (psql -1), as migration tools do.
set local search_path = pg_catalog, pg_temp;

set local lock_timeout = '10s';

alter table outbox.relay
    drop column if exists places_from;

comment on column outbox.relay.slot is 'The replication slot.';
comment on column outbox.dispatch.ordinal is 'Place of the event among the inserts of its transaction.';
