-- The outbox: the table that services insert into, in the transaction of their business change.
--
-- Insert-only by design. The relay reads inserts from the write-ahead log and keeps its own
-- record of what became of each event in outbox.dispatch (0002), so nobody needs to update a row.
-- Pruning deletes old rows that are recorded, as the owner of the table, in small steps.
--
-- Plain SQL for PostgreSQL 14 to 18; running it again changes nothing.
-- With opaque payloads (Protobuf, Avro) each `payload jsonb` below becomes `payload bytea`;
-- `postrider init --payload bytea` prints it that way.

-- Names below are PostgreSQL's own, under any search path. Run the whole file
-- in one transaction (psql -1), as migration tools do.
set local search_path = pg_catalog, pg_temp;

create schema if not exists outbox;

-- Two functions outbox.emit could not be told apart.
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

-- The order of insertion. Writers use it through the default of the column, so everybody may.
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
    -- Vacuum of an insert-only table is cheap (no index scan) and sets pages all-visible and
    -- frozen soon, while they are still in memory; pruning then leaves few dead rows behind.
    autovacuum_vacuum_insert_scale_factor = 0.05,
    autovacuum_vacuum_scale_factor = 0.05,
    autovacuum_analyze_scale_factor = 0.05
);
-- REPLICA IDENTITY stays DEFAULT (the primary key): NOTHING would save some WAL per pruned row,
-- but pruning would then fail as soon as another publication covers the table with its deletes.

comment on table outbox.events is
    'Transactional outbox, insert-only: each committed row becomes one Pub/Sub message. What became of it is in outbox.dispatch.';
comment on column outbox.events.id is 'Identity of the event; consumers deduplicate on it (attribute event_id).';
comment on column outbox.events.aggregatetype is 'Kind of business object; names the topic by default ({aggregatetype}.events).';
comment on column outbox.events.aggregateid is 'Business object; the ordering key. Null or empty: unordered.';
comment on column outbox.events.event_type is 'What happened, such as OrderPlaced.';
comment on column outbox.events.version is 'Counts the events of one aggregate; orders them when the table is read instead of the log.';
comment on column outbox.events.schema_version is 'Version of the payload''s schema.';
comment on column outbox.events.payload is 'The message body, sent byte for byte. Null: an empty body.';
comment on column outbox.events.headers is 'JSON object; each string in it becomes a message attribute.';
comment on column outbox.events.occurred_at is 'When it happened, by the writer''s transaction clock.';
comment on column outbox.events.inserted_xid is 'The transaction that inserted the row: tells rows from before the relay, and rows that were moved.';
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

-- Inserts one event and returns its id. Runs with the caller's rights (INSERT suffices).
-- The W3C trace context is taken from the settings outbox.traceparent and outbox.tracestate
-- (`set local outbox.traceparent = '00-...'`), unless the headers carry their own.
-- The search path is set so that no function or operator of the caller's search path is called. A
-- trigger of your own on the table sees it too: write names in it with their schema.
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
    -- A setting that was SET LOCAL in an earlier transaction reads as '' afterwards.
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
