-- How far the relay has compared the captured tables with outbox.dispatch.
--
-- Plain SQL for PostgreSQL 14 to 18; running it again changes nothing.

-- Names below are PostgreSQL's own, under any search path. Run the whole file
-- in one transaction (psql -1), as migration tools do.
set local search_path = pg_catalog, pg_temp;

alter table outbox.relay
    add column if not exists audited_at timestamptz,
    add column if not exists audited_publication text;

comment on column outbox.relay.audited_at is
    'When every row of the captured tables was last known to have a record. Null: not since the first start.';
comment on column outbox.relay.audited_publication is
    'The publication and its tables as the catalog had them at that time; when they differ now, rows may not have been streamed.';
