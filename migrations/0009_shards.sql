-- Several relays on one database: each has its share of the keys, and a slot of its own.
--
-- Plain SQL for PostgreSQL 14 to 18; running it again changes nothing.

-- Names below are PostgreSQL's own, whatever the search path of the session is. Run the whole file
-- in one transaction (psql -1), as migration tools do.
set local search_path = pg_catalog, pg_temp;

set local lock_timeout = '10s';

alter table outbox.relay
    add column if not exists places_from pg_lsn;

comment on column outbox.relay.slot is
    'The slot; that of shard i of n ends in _iofn.';
comment on column outbox.relay.places_from is
    'Places in outbox.dispatch before this were given under another number of shards. Null: none were.';
comment on column outbox.dispatch.ordinal is
    'Place of the event among the inserts of its transaction. With n shards: nth * n + i, where the event is the nth that shard i sees; so mod(ordinal, n) tells whose it is.';
