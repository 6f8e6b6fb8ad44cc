-- Creates the tables for replays: published events that an operator wants to publish again.
--
-- Plain SQL for PostgreSQL 14 to 18; running it again changes nothing.

-- This statement makes each name without a schema refer to PostgreSQL's own objects. The statement lasts
-- until the end of the transaction, so run the whole file in one transaction (psql -1), as migration
-- tools do.
set local search_path = pg_catalog, pg_temp;

set local lock_timeout = '10s';

create table if not exists outbox.replay (
    name         text        primary key,
    criteria     text        not null,
    until_lsn    pg_lsn      not null,
    requested_at timestamptz not null default now(),
    requested_by text        not null default session_user,
    selected_at  timestamptz,
    ended_at     timestamptz,
    sent         bigint      not null default 0,
    quarantined  bigint      not null default 0,
    not_sent     bigint      not null default 0
);

comment on table outbox.replay is 'One row per `postrider replay`.';
comment on column outbox.replay.criteria is 'Which events, as JSON.';
comment on column outbox.replay.until_lsn is 'Events committed later are not replayed.';
comment on column outbox.replay.selected_at is 'When all its events were in outbox.replay_event.';
comment on column outbox.replay.ended_at is 'When the last event was published again, or the replay was cancelled.';
comment on column outbox.replay.sent is 'Events that were published again.';
comment on column outbox.replay.quarantined is 'Events that Pub/Sub refused this time, so that they went into quarantine.';
comment on column outbox.replay.not_sent is
    'Events that were not published again: they are no longer recorded as published, their row is gone, or an earlier event of the key was refused.';

-- The primary key has the order in which events are released: key by key.
create table if not exists outbox.replay_event (
    replay        text   not null references outbox.replay on delete cascade,
    topic         text   not null,
    ordering_key  text   not null,
    commit_lsn    pg_lsn not null,
    ordinal       int    not null,
    dispatched_at timestamptz,
    primary key (replay, topic, ordering_key, commit_lsn, ordinal)
);

create index if not exists replay_event_released on outbox.replay_event (replay, commit_lsn, ordinal)
    where dispatched_at is not null;

comment on table outbox.replay_event is
    'Events that a replay has selected, until they have been published again.';
comment on column outbox.replay_event.dispatched_at is
    'The dispatched_at of the event in outbox.dispatch when it was released to the relay; null before.';

-- Check first, because ALTER TABLE would lock the table on every run.
do $$
begin
    if not exists (
        select from pg_catalog.pg_attribute
        where attrelid = 'outbox.dispatch'::regclass and attname = 'replay' and not attisdropped
    ) then
        alter table outbox.dispatch add column replay text;
    end if;
end
$$;

comment on column outbox.dispatch.replay is
    'The last replay that released the event; its messages carry the name in the attribute `replay`.';

do $$
begin
    if exists (select from pg_catalog.pg_roles where rolname = 'postrider_relay') then
        grant select, insert, update on outbox.replay to postrider_relay;
        grant select, insert, update, delete on outbox.replay_event to postrider_relay;
    end if;
end
$$;
