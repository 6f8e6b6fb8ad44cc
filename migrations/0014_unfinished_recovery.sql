-- Adds columns with which a relay continues an unfinished recovery of an earlier session, with the same
-- slot.
--
-- Plain SQL for PostgreSQL 14 to 18; running it again changes nothing.

-- This statement makes each name without a schema refer to PostgreSQL's own objects. The statement lasts
-- until the end of the transaction, so run the whole file in one transaction (psql -1), as migration
-- tools do.
set local search_path = pg_catalog, pg_temp;

set local lock_timeout = '10s';

alter table outbox.relay
    add column if not exists recovery_lsn      pg_lsn,
    add column if not exists recovery_snapshot pg_snapshot;

comment on column outbox.relay.recovery_lsn is
    'Consistent point of the slot that the unfinished recovery has created. Null if there is no recovery to continue.';
comment on column outbox.relay.recovery_snapshot is
    'Snapshot at recovery_lsn: the recovery publishes the rows of transactions that it shows, and the slot streams all later ones.';
