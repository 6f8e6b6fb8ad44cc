-- What became of each event, and where the relay stands. Written by the relay only.
--
-- Plain SQL for PostgreSQL 14 to 18; running it again changes nothing.

-- Names below are PostgreSQL's own, under any search path. Run the whole file
-- in one transaction (psql -1), as migration tools do.
set local search_path = pg_catalog, pg_temp;

-- One row per event. The key is the event's place in the log: the position of its commit and its
-- ordinal among the inserts of that transaction. Rows arrive in about that order, so the key's
-- index grows at its right edge, and a restart reads what lies past the confirmed position as one
-- range.
--
-- Measured on PostgreSQL 15: 300,000 rows in batches of 1,000, one commit each; microseconds of
-- backend CPU and bytes of WAL for each row; the better of two runs on a busy machine of 2 cores:
--
--     indexes                          INSERT ... unnest ... ON CONFLICT    COPY BINARY
--     primary key                              5.7 us   316 B              4.4 us   219 B
--     primary key, hash (event_id)             8.5 us   408 B              6.1 us   311 B
--     primary key, btree (event_id)           10.4 us   406 B              7.8 us   309 B
--
-- An index on event_id is worth its price: without it each look-up of one event, and the search
-- for events without a record, reads the whole table. Hash costs less than btree, also on a table
-- of 4 million rows (COPY: 8.4 against 9.1 us), and equality is all that is asked of it.
-- As an enum or "char", state would save 4 % of the table, and readers would need a cast.
-- The fill factor stays 100: a row is updated only when someone releases it from quarantine.
-- Columns stand widest alignment first: no padding between them.
create table if not exists outbox.dispatch (
    commit_lsn    pg_lsn      not null,
    committed_at  timestamptz not null,
    dispatched_at timestamptz not null default now(),
    ordinal       int         not null,
    attempts      int         not null,
    event_id      uuid        not null,
    state         text        not null
        constraint dispatch_state check (state in ('published', 'quarantined', 'discarded')),
    topic         text,
    ordering_key  text,
    message_id    text,
    source_id     text,
    error         text,
    constraint dispatch_pkey primary key (commit_lsn, ordinal)
) with (
    -- As for outbox.events: vacuum soon and cheaply, while the pages are still in memory.
    autovacuum_vacuum_insert_scale_factor = 0.05,
    autovacuum_vacuum_scale_factor = 0.05,
    autovacuum_analyze_scale_factor = 0.05
);

create index if not exists dispatch_event_id on outbox.dispatch using hash (event_id);

comment on table outbox.dispatch is
    'One row per event of the captured tables: was it published, when, as which message.';
comment on column outbox.dispatch.commit_lsn is 'Position of the commit record of the event''s transaction.';
comment on column outbox.dispatch.committed_at is 'When the event''s transaction was committed.';
comment on column outbox.dispatch.dispatched_at is 'When the outcome was known.';
comment on column outbox.dispatch.ordinal is 'Place of the event among the inserts of its transaction.';
comment on column outbox.dispatch.attempts is 'Publish requests that carried the event.';
comment on column outbox.dispatch.event_id is 'The event''s id; for ids that are not uuids outbox.event_uuid(identity, id, inserted_xid).';
comment on column outbox.dispatch.state is 'published, quarantined or discarded.';
comment on column outbox.dispatch.message_id is 'Pub/Sub''s id of the message.';
comment on column outbox.dispatch.source_id is 'schema.table:id where the id is not a uuid; else null.';
comment on column outbox.dispatch.error is 'Why the event is not published.';

-- One row per slot. A tripwire and something to look at, never a second source of truth: the
-- position to resume from is the slot's confirmed_flush_lsn.
create table if not exists outbox.relay (
    slot                  text        primary key,
    system_identifier     text        not null,
    timeline              int         not null,
    confirmed_lsn         pg_lsn,
    confirmed_commit_time timestamptz,
    instance              text        not null,
    since                 timestamptz not null default now(),
    updated_at            timestamptz not null default now()
) with (fillfactor = 50); -- updated in place, again and again: room for HOT updates

comment on table outbox.relay is
    'Which relay serves which slot, on which cluster, and how far it has confirmed.';
comment on column outbox.relay.system_identifier is
    'As IDENTIFY_SYSTEM prints it (unsigned). Another one means: this database is a copy.';
comment on column outbox.relay.timeline is 'Timeline of the cluster when last seen; grows at each promotion.';
comment on column outbox.relay.instance is 'Host name and process id of the relay.';
comment on column outbox.relay.since is 'When that instance took the slot.';
