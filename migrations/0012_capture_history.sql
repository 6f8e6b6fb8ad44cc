-- What a capture record says about earlier times: how far events may lack a record, and what the
-- publication was like when capturing began.
--
-- Plain SQL for PostgreSQL 14 to 18; running it again changes nothing.

-- Names below are PostgreSQL's own, under any search path. Run the whole file
-- in one transaction (psql -1), as migration tools do.
set local search_path = pg_catalog, pg_temp;

set local lock_timeout = '10s';

alter table outbox.capture
    add column if not exists recorded_from xid8 not null default '0',
    add column if not exists publication text;

comment on column outbox.capture.recorded_from is
    'Rows of older transactions may have been published without a record (dispatch = exceptions), so they are never compared with outbox.dispatch again.';
comment on column outbox.capture.publication is
    'Fingerprint of the publication when capturing began. If it has changed before the first session, the tables are compared.';
