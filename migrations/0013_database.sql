-- Records the database in which the relay served its slot, so that a relay refuses to run on a copy of
-- the database on the same server.
--
-- Plain SQL for PostgreSQL 14 to 18; running it again changes nothing.

-- This statement makes each name without a schema refer to PostgreSQL's own objects. The statement lasts
-- until the end of the transaction, so run the whole file in one transaction (psql -1), as migration
-- tools do.
set local search_path = pg_catalog, pg_temp;

set local lock_timeout = '10s';

alter table outbox.relay
    add column if not exists database_oid oid;

comment on column outbox.relay.database_oid is
    'Oid of the database in pg_database. If the current one is different, this database is a copy. Null if an older version wrote the row.';
