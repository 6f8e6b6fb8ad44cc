-- Adds two columns to the capture records: the transaction before which events may lack a dispatch row, and a
-- fingerprint of the publication at the beginning of the capture.
--
-- Plain SQL for PostgreSQL 14 to 18; running it again changes nothing.

-- This statement makes each name without a schema refer to PostgreSQL's own objects. The statement lasts
-- until the end of the transaction, so run the whole file in one transaction (psql -1), as migration
-- tools do.
set local search_path = pg_catalog, pg_temp;

set local lock_timeout = '10s';

alter table outbox.capture
    add column if not exists recorded_from xid8 not null default '0',
    add column if not exists publication text;

comment on column outbox.capture.recorded_from is
    'Rows of older transactions may have been published without a record (dispatch = exceptions), so they are never compared with outbox.dispatch again.';
comment on column outbox.capture.publication is
    'Fingerprint of the publication when capturing began. If it has changed before the first session, the tables are compared.';
