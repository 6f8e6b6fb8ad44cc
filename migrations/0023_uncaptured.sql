-- Adds a column with the partitions of a table that was captured earlier and that the settings no longer
-- name.
--
-- Plain SQL for PostgreSQL 14 to 18; running it again changes nothing.

-- Names without a schema below mean PostgreSQL's own objects, under any search path. Run the whole file in
-- one transaction (psql -1), as migration tools do.
set local search_path = pg_catalog, pg_temp;

set local lock_timeout = '10s';

alter table outbox.capture
    add column if not exists uncaptured jsonb not null default '{}';

comment on column outbox.capture.uncaptured is
    'Partitions of an earlier captured table that the settings no longer name, by OID, each with its floor: rows of older transactions are resolved. If a partition is captured again, its rows from that floor on are published.';
