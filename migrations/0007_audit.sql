-- How far the relay has compared the captured tables with outbox.dispatch.
--
-- Plain SQL for PostgreSQL 14 to 18; running it again changes nothing.

-- Names below are PostgreSQL's own, whatever the search path of the session is. Run the whole file
-- in one transaction (psql -1), as migration tools do.
set local search_path = pg_catalog, pg_temp;

alter table outbox.relay
    -- Set when the row is made, at the first start: transactions that began earlier have ended, or
    -- are streamed.
    add column if not exists first_xid bigint not null
        default pg_snapshot_xmin(pg_current_snapshot())::text::bigint,
    add column if not exists audited_at timestamptz,
    add column if not exists audited_publication text,
    add column if not exists audit_marks jsonb;

comment on column outbox.relay.first_xid is
    'The oldest transaction of the time of the first start. Rows of older ones that have no record are from before it.';
comment on column outbox.relay.audited_at is
    'When every row of the captured tables was last known to have a record. Null: not since the first start.';
comment on column outbox.relay.audited_publication is
    'The publication and its tables as the catalog had them at that time; when they differ now, rows may not have been streamed.';
comment on column outbox.relay.audit_marks is
    'Blocks of each table that are compared: its oid, file and number of blocks.';
