-- Adds columns that record how far a recovery has got, so that the next recovery repeats fewer
-- events after an interruption.
--
-- Plain SQL for PostgreSQL 14 to 18; running it again changes nothing.

-- This statement makes each name without a schema refer to PostgreSQL's own objects. The statement lasts
-- until the end of the transaction, so run the whole file in one transaction (psql -1), as migration
-- tools do.
set local search_path = pg_catalog, pg_temp;

set local lock_timeout = '10s';

alter table outbox.capture
    add column if not exists recovery_progress jsonb;

comment on column outbox.capture.recovery_progress is
    'How far an unfinished recovery has read the table: rows of transactions below "below", with a seq up to "seq" (null: with any seq), in the partitions "partitions", are resolved. Null without such a recovery.';

alter table outbox.relay
    add column if not exists recovery_repeated_before pg_lsn;

comment on column outbox.relay.recovery_repeated_before is
    'If the unfinished recovery keeps the slot: before this position the stream contains rows that the recovery reads from the tables. Null if the recovery has created the slot.';
