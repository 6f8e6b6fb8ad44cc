-- Adds columns that record how far the relay has compared the captured tables with outbox.dispatch.
--
-- Plain SQL for PostgreSQL 14 to 18; running it again changes nothing.

-- This statement makes each name without a schema refer to PostgreSQL's own objects. The statement lasts
-- until the end of the transaction, so run the whole file in one transaction (psql -1), as migration
-- tools do.
set local search_path = pg_catalog, pg_temp;

alter table outbox.relay
    add column if not exists audited_at timestamptz,
    add column if not exists audited_publication text;

comment on column outbox.relay.audited_at is
    'When every row of the captured tables was last known to have a record. Null: not since the first start.';
comment on column outbox.relay.audited_publication is
    'The publication and its tables in the catalog at that time. If they differ now, rows may be missing from the stream.';
