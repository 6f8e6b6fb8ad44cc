-- Records from which physical tables the rows of a captured table come. The event ids of tables
-- that were dropped and created again depend on this record. With it, the relay also finds
-- partitions that were detached before all of their rows had an outcome.
--
-- Plain SQL for PostgreSQL 14 to 18; running it again changes nothing.

-- This statement makes each name without a schema refer to PostgreSQL's own objects. The statement lasts
-- until the end of the transaction, so run the whole file in one transaction (psql -1), as migration
-- tools do.
set local search_path = pg_catalog, pg_temp;

set local lock_timeout = '10s';

alter table outbox.capture
    add column if not exists id_suffixes jsonb,
    add column if not exists adoptions int not null default 0,
    add column if not exists detached oid[] not null default '{}',
    add column if not exists unread jsonb not null default '{}';

comment on column outbox.capture.id_suffixes is
    'By OID of a table: the text after `identity` in event ids of its rows without inserted_xid. For an OID that is missing here, the text is @OID, or @ADOPTIONS.OID after an adoption. Null: only table_oid is known, with an empty text.';
comment on column outbox.capture.adoptions is
    'How often the table moved to another server, where the same OIDs belong to other tables.';
comment on column outbox.capture.detached is
    'OIDs of tables that were partitions, or were the table itself, and may have rows without an outcome. Also new partitions that no audit has covered yet.';
comment on column outbox.capture.unread is
    'By OID in `detached`: the floor before a recovery that could not read the table. Its rows from this floor on may be unpublished.';
