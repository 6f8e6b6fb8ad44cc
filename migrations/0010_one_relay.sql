-- Allows one relay per database. The migration 0009 no longer exists: it allowed several relays on
-- one database ("shards"), and was removed before a release. This migration undoes 0009 in a
-- database where it was applied.
--
-- Plain SQL for PostgreSQL 14 to 18; running it again changes nothing.

-- This statement makes each name without a schema refer to PostgreSQL's own objects. The statement lasts
-- until the end of the transaction, so run the whole file in one transaction (psql -1), as migration
-- tools do.
set local search_path = pg_catalog, pg_temp;

set local lock_timeout = '10s';

alter table outbox.relay
    drop column if exists places_from;

comment on column outbox.relay.slot is 'The replication slot.';
comment on column outbox.dispatch.ordinal is 'Number of the event among the inserts of its transaction, from 1.';
