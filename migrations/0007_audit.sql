-- How far the relay has compared the captured tables with outbox.dispatch.
--
-- Plain SQL for PostgreSQL 14 to 18; running it again changes nothing.

alter table outbox.relay
    add column if not exists audited_at timestamptz,
    add column if not exists audited_publication text,
    add column if not exists audit_marks jsonb;

comment on column outbox.relay.audited_at is
    'When every row of the captured tables was last known to have a record. Null: not since the first start, and rows without a record are from before it.';
comment on column outbox.relay.audited_publication is
    'The publication and its tables as the catalog had them at that time; when they differ now, rows may not have been streamed.';
comment on column outbox.relay.audit_marks is
    'Blocks of each table that are compared: its oid, file and number of blocks.';
