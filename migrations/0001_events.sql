-- The outbox: the table into which services insert events, in the transaction of their business change.
--
-- The table is insert-only. The relay reads inserts from the WAL and records the outcome of each event in
-- outbox.dispatch (0002), so no role needs to update a row. Only pruning deletes rows, and only old rows
-- whose events are resolved.
--
-- Plain SQL for PostgreSQL 14 to 18; running it again changes nothing. For opaque payloads (Protobuf,
-- Avro) each `payload jsonb` below becomes `payload bytea`; `postrider init --payload bytea` prints the
-- file that way.

-- This statement makes each name without a schema refer to PostgreSQL's own objects. The statement lasts
-- until the end of the transaction, so run the whole file in one transaction (psql -1), as migration
-- tools do.
set local search_path = pg_catalog, pg_temp;

create schema if not exists outbox;

-- Stop if outbox.emit exists with another payload type: with two functions of this name, PostgreSQL could
-- not tell which one a call means.
do $$
declare
    found_type constant text := (
        select format_type(p.proargtypes[3], null) from pg_catalog.pg_proc p
        where p.pronamespace = 'outbox'::regnamespace and p.proname = 'emit'
          and pg_get_function_identity_arguments(p.oid) not like '%, payload jsonb, %'
        limit 1);
begin
    if found_type is not null then
        raise exception 'there is a function outbox.emit whose payload is %', found_type
            using errcode = 'duplicate_function',
                  hint = format('Run `postrider init` with --payload %s, or drop that function.', found_type);
    end if;
end
$$;

-- Numbers the rows in the order of insertion. Column defaults run with the rights of the writer, so every
-- role may use the sequence.
create sequence if not exists outbox.events_seq_seq;
grant usage on sequence outbox.events_seq_seq to public;

create table if not exists outbox.events (
    id             uuid        primary key default gen_random_uuid(),
    aggregatetype  text        not null,
    aggregateid    text,
    event_type     text        not null,
    version        bigint,
    schema_version int         not null default 1,
    payload jsonb,
    headers        jsonb,
    occurred_at    timestamptz not null default now(),
    inserted_xid   xid8        not null default pg_current_xact_id(),
    seq            bigint      not null default nextval('outbox.events_seq_seq')
) with (
    -- Vacuuming an insert-only table is cheap, because no index needs a scan. Vacuum soon, while the
    -- pages are still in memory: it marks them all-visible and frozen. After pruning, vacuum also runs
    -- soon, which keeps the number of dead rows low.
    autovacuum_vacuum_insert_scale_factor = 0.05,
    autovacuum_vacuum_scale_factor = 0.05,
    autovacuum_analyze_scale_factor = 0.05
);
-- REPLICA IDENTITY stays DEFAULT (the primary key). NOTHING would save some WAL per pruned row, but
-- pruning would fail as soon as another publication publishes deletes of this table.

comment on table outbox.events is
    'Transactional outbox, insert-only: each committed row becomes one Pub/Sub message. What became of it is in outbox.dispatch.';
comment on column outbox.events.id is 'Identity of the event; consumers deduplicate on it (attribute event_id).';
comment on column outbox.events.aggregatetype is 'Kind of business object; names the topic by default ({aggregatetype}.events).';
comment on column outbox.events.aggregateid is 'Business object; the ordering key. Null or empty: unordered.';
comment on column outbox.events.event_type is 'What happened, such as OrderPlaced.';
comment on column outbox.events.version is 'Counts the events of one aggregate; orders them when they are read from the table instead of the WAL.';
comment on column outbox.events.schema_version is 'Version of the payload''s schema.';
comment on column outbox.events.payload is 'The message body, sent byte for byte. Null: an empty body.';
comment on column outbox.events.headers is 'JSON object; each string in it becomes a message attribute.';
comment on column outbox.events.occurred_at is 'When it happened, by the writer''s transaction clock.';
comment on column outbox.events.inserted_xid is 'The transaction that inserted the row; shows which rows are older than the capture or were moved.';
comment on column outbox.events.seq is 'Order of insertion: the order of a recovery.';

create or replace function outbox.refuse_change() returns trigger
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
    raise exception '% on %.% refused: the outbox is insert-only', tg_op, tg_table_schema, tg_table_name
        using errcode = 'restrict_violation',
              hint = case tg_op
                  when 'TRUNCATE' then
                      'Rows that were not published yet would be lost. To prune, DELETE old rows that outbox.dispatch records, in small steps, as the owner.'
                  else
                      'An event is a fact: insert a new one that corrects it. What became of an event is in outbox.dispatch.'
              end;
end
$$;

comment on function outbox.refuse_change() is
    'Trigger function that keeps a table insert-only; may be attached to other captured tables too.';

create or replace trigger insert_only
    before update or truncate on outbox.events
    for each statement execute function outbox.refuse_change();

-- Inserts one event and returns its id. Runs with the caller's rights (INSERT is enough). Takes the W3C
-- trace context from the settings outbox.traceparent and outbox.tracestate (`set local outbox.traceparent
-- = '00-...'`), unless the headers contain one.
--
-- The function sets its search path so that it calls no function or operator from the caller's search
-- path. A trigger of your own on the table runs with this search path too, so write names in the trigger
-- with their schema.
create or replace function outbox.emit(
    aggregatetype  text,
    aggregateid    text,
    event_type     text,
    payload jsonb,
    headers        jsonb default null,
    version        bigint default null,
    schema_version int default 1,
    id             uuid default gen_random_uuid()
) returns uuid
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    -- After a transaction that ran SET LOCAL has ended, the setting reads as ''.
    traceparent constant text := nullif(current_setting('outbox.traceparent', true), '');
    tracestate  constant text := nullif(current_setting('outbox.tracestate', true), '');
begin
    if traceparent is not null then
        headers := jsonb_strip_nulls(
                jsonb_build_object('traceparent', traceparent, 'tracestate', tracestate))
            || coalesce(headers, '{}');
    end if;
    id := coalesce(id, gen_random_uuid());
    insert into outbox.events
        (id, aggregatetype, aggregateid, event_type, version, schema_version, payload, headers)
    values
        (emit.id, emit.aggregatetype, emit.aggregateid, emit.event_type, emit.version,
         coalesce(emit.schema_version, 1), emit.payload, emit.headers);
    return id;
end
$$;
