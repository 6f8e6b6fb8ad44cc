-- The outcome of each event, and how far the relay has got. Only the relay and `postrider` commands write
-- here.
--
-- Plain SQL for PostgreSQL 14 to 18; running it again changes nothing.

-- This statement makes each name without a schema refer to PostgreSQL's own objects. The statement lasts
-- until the end of the transaction, so run the whole file in one transaction (psql -1), as migration
-- tools do.
set local search_path = pg_catalog, pg_temp;

-- One row per event. The key is the event's position: the LSN of its commit and its ordinal among the
-- inserts of that transaction. Rows arrive in roughly this order, so the key's index grows at its right
-- edge, and after a restart the relay reads the rows after the confirmed position as one range.
--
-- Measured on PostgreSQL 15: 300,000 rows in batches of 1,000, one commit each; microseconds of backend
-- CPU and bytes of WAL per row; the better of two runs on a busy machine with 2 cores:
--
--     indexes                          INSERT ... unnest ... ON CONFLICT    COPY BINARY
--     primary key                              5.7 us   316 B              4.4 us   219 B
--     primary key, hash (event_id)             8.5 us   408 B              6.1 us   311 B
--     primary key, btree (event_id)           10.4 us   406 B              7.8 us   309 B
--
-- The index on event_id is worth its cost. Without it, each lookup of one event, and the search for
-- events without a record, would read the whole table. A hash index costs less than a btree index, also
-- on a table of 4 million rows (COPY: 8.4 against 9.1 us), and only equality is needed. As an enum or
-- "char", `state` would save 4 % of the table, but readers would need a cast. The fill factor stays 100,
-- because a row is updated only when an operator releases, replays or discards its event. The columns
-- with the widest alignment come first, so that there is no padding between them.
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
    -- As for outbox.events: vacuum soon, while the pages are still in memory.
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
comment on column outbox.dispatch.ordinal is 'Number of the event among the inserts of its transaction, from 1.';
comment on column outbox.dispatch.attempts is 'Publish requests with which Pub/Sub may have stored the event; requests that Pub/Sub refused do not count.';
comment on column outbox.dispatch.event_id is 'The event''s id; for ids that are not uuids outbox.event_uuid(identity, id, inserted_xid).';
comment on column outbox.dispatch.state is 'published, quarantined or discarded.';
comment on column outbox.dispatch.message_id is 'Pub/Sub''s id of the message.';
comment on column outbox.dispatch.source_id is 'schema.table:id where the id is not a uuid; else null.';
comment on column outbox.dispatch.error is 'Why the event is not published.';

-- One row per slot. The relay uses the row to notice that something is wrong with the slot, and operators can
-- look at it. The row never decides where the relay resumes: only the slot's confirmed_flush_lsn does.
create table if not exists outbox.relay (
    slot                  text        primary key,
    system_identifier     text        not null,
    timeline              int         not null,
    confirmed_lsn         pg_lsn,
    confirmed_commit_time timestamptz,
    instance              text        not null,
    since                 timestamptz not null default now(),
    updated_at            timestamptz not null default now()
) with (fillfactor = 50); -- rows are updated often: leave room for HOT updates

comment on table outbox.relay is
    'Which relay serves which slot, on which cluster, and how far it has confirmed.';
comment on column outbox.relay.system_identifier is
    'As IDENTIFY_SYSTEM prints it (unsigned). If the current one is different, this database is a copy.';
comment on column outbox.relay.timeline is 'Timeline of the cluster when last seen; grows at each promotion.';
comment on column outbox.relay.instance is 'Host name and process id of the relay.';
comment on column outbox.relay.since is 'When that instance took the slot.';
