-- Creates the table that says which rows of each captured table the relay must publish: one row per
-- table.
--
-- Plain SQL for PostgreSQL 14 to 18; running it again changes nothing.

-- This statement makes each name without a schema refer to PostgreSQL's own objects. The statement lasts
-- until the end of the transaction, so run the whole file in one transaction (psql -1), as migration
-- tools do.
set local search_path = pg_catalog, pg_temp;

set local lock_timeout = '10s';

create table if not exists outbox.capture (
    identity         text        primary key,
    schema_name      text        not null,
    table_name       text        not null,
    table_oid        oid         not null,
    slot             text        not null,
    since            pg_snapshot,
    floor            xid8        not null default '0',
    floor_seq        bigint,
    numbering        text,
    partitions       text,
    has_inserted_xid boolean     not null,
    added_xids       xid8[]      not null default '{}',
    instance         text        not null,
    captured_at      timestamptz not null default now()
) with (fillfactor = 50); -- rows are updated often: leave room for HOT updates

comment on table outbox.capture is
    'One row per captured table: since when and through which slot it is captured, and up to where its rows are resolved.';
comment on column outbox.capture.identity is
    'schema.table when the table was first captured. Never changes, because event ids are derived from it.';
comment on column outbox.capture.slot is
    'The slot that owns the table. A relay on another slot is refused.';
comment on column outbox.capture.since is
    'Transactions that had ended when capturing began: their rows are never published. Null: all rows are.';
comment on column outbox.capture.floor is
    'Every row of an older transaction is resolved: published, set aside, or from before the capture.';
comment on column outbox.capture.floor_seq is
    'Rows up to this seq usually belong to transactions before the floor, so scans begin here. Null when a recovery has just relied on it.';
comment on column outbox.capture.numbering is
    'The sequence that numbered the rows when floor_seq was recorded, and its file. A different sequence may give lower numbers.';
comment on column outbox.capture.partitions is
    'Oids of the partitions that were compared with outbox.dispatch.';
comment on column outbox.capture.has_inserted_xid is
    'Whether the table has had the column inserted_xid.';
comment on column outbox.capture.added_xids is
    'The values of inserted_xid in rows that are older than this column, if it was added later.';

-- Drop the columns that outbox.capture replaces.
alter table outbox.relay
    drop column if exists first_xid,
    drop column if exists resolved_xid,
    drop column if exists exceptions_xid,
    drop column if exists audit_marks;

comment on column outbox.relay.dispatch is
    'How rows from outbox.capture.floor on were handled: full, each delivered row has a row in outbox.dispatch; exceptions, only rows that were set aside have one.';
comment on column outbox.relay.audited_at is
    'When the floors in outbox.capture were last raised. Null: not since the first start.';

-- Drop the earlier version of the function below, which had no parameter `inserted_xid`.
drop function if exists outbox.event_uuid(text, text);

-- Returns the MD5 hash of the text in UTF-8, for a database with another encoding. The relay hashes the same
-- bytes. A text that cannot be converted to UTF-8 is hashed unchanged, so that the statement does not fail.
-- The relay never publishes the row of such a text. A block with EXCEPTION cannot run in a parallel query.
create or replace function outbox.utf8_md5(text) returns uuid
language plpgsql immutable parallel unsafe
set search_path = pg_catalog, pg_temp
as $$
begin
    return md5(convert_to($1, 'UTF8'))::uuid;
exception
    when untranslatable_character or character_not_in_repertoire then
        return md5($1)::uuid;
end
$$;

comment on function outbox.utf8_md5(text) is 'Part of outbox.event_uuid, for a database that is not UTF-8.';

-- Computes the event_id of a row whose id is not a uuid. `identity` is the identity in outbox.capture.
-- `inserted_xid` is null for a table without that column. Not parallel safe either, because it calls the function
-- above.
create or replace function outbox.event_uuid(identity text, id text, inserted_xid xid8 default null)
returns uuid
language sql immutable parallel unsafe
return case
    when id is null then null
    when pg_catalog.getdatabaseencoding() = 'UTF8' then
        pg_catalog.md5(identity || ':' || id || coalesce(':' || inserted_xid::text, ''))::uuid
    else
        outbox.utf8_md5(identity || ':' || id || coalesce(':' || inserted_xid::text, ''))
end;

comment on function outbox.event_uuid(text, text, xid8) is
    'Event id under which outbox.dispatch records a row whose id is not a uuid, by the identity of its table, its id and its inserted_xid.';

do $$
begin
    if exists (select from pg_catalog.pg_roles where rolname = 'postrider_relay') then
        grant select, insert, update on outbox.capture to postrider_relay;
        -- Only needed if somebody has revoked the default right of all roles to call new functions.
        grant execute on function outbox.event_uuid(text, text, xid8), outbox.utf8_md5(text) to postrider_relay;
    end if;
end
$$;
