#!/bin/sh
# Captures the output of pgoutput in each situation that the decoder is tested with.
#
#   PGHOST=... PGPORT=... PGUSER=... sh decoder/tests/capture.sh decoder/tests/fixtures/pg15
#
# Needs psql, and a superuser on a server with wal_level = logical that this script may write to. It
# creates and removes a database, a slot and a replication origin, each called decoder_capture. Each
# scenario becomes a file <name>.hex: a line with the server's version, and then one line per
# message, with the server's own LSN and transaction id and the bytes in hexadecimal.
set -eu
# UTF-8 text in any locale, times in UTC, and no notices about dropping objects that do not exist.
export PGCLIENTENCODING=UTF8 PGOPTIONS='-c TimeZone=UTC -c client_min_messages=warning'

out=${1:?usage: capture.sh OUT_DIR}
mkdir -p "$out"
name=decoder_capture
admin() { psql -X -q -At -v ON_ERROR_STOP=1 -d postgres "$@"; }
db() { psql -X -q -At -v ON_ERROR_STOP=1 -d "$name" "$@"; }

clean_up() {
    admin -o /dev/null \
        -c "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots
            WHERE slot_name = '$name'" \
        -c "SELECT pg_replication_origin_drop(roname) FROM pg_replication_origin
            WHERE roname = '$name'" \
        -c "DROP DATABASE IF EXISTS $name WITH (FORCE)"
}

# scenario NAME [PGOUTPUT_OPTIONS]: runs the SQL from standard input, writes the output of pgoutput.
scenario() {
    db -o /dev/null -c "SELECT pg_create_logical_replication_slot('$name', 'pgoutput')"
    db -o /dev/null
    {
        db -c "SELECT '# PostgreSQL ' || split_part(current_setting('server_version'), ' ', 1)"
        db -F ' ' -c "SELECT lsn, xid, encode(data, 'hex')
            FROM pg_logical_slot_peek_binary_changes('$name', NULL, NULL,
                'proto_version', '1', 'publication_names', 'p'${2:+, $2})"
    } > "$out/$1.hex"
    db -o /dev/null -c "SELECT pg_drop_replication_slot('$name')"
}

trap clean_up EXIT
clean_up
admin -c "CREATE DATABASE $name TEMPLATE template0 ENCODING 'UTF8' LC_COLLATE 'C' LC_CTYPE 'C'"

db <<'SQL'
CREATE SCHEMA shop;
CREATE TYPE shop.mood AS ENUM ('calm', 'glad');
CREATE DOMAIN shop.cents AS bigint CHECK (VALUE >= 0);
CREATE TABLE shop.outbox (
    id uuid PRIMARY KEY, aggregatetype text, aggregateid varchar(40), version bigint,
    schema_version int, payload jsonb, headers json, body bytea, occurred_at timestamptz,
    ready boolean, price numeric(10, 2), note text
);
CREATE TABLE shop.moods (id int PRIMARY KEY, mood shop.mood, price shop.cents);
CREATE TABLE shop.items (id int PRIMARY KEY, name text, notes text);
ALTER TABLE shop.items ALTER notes SET STORAGE EXTERNAL;
CREATE TABLE shop.full_items (id int PRIMARY KEY, name text);
ALTER TABLE shop.full_items REPLICA IDENTITY FULL;
CREATE TABLE shop.index_items (id int PRIMARY KEY, code text NOT NULL UNIQUE);
ALTER TABLE shop.index_items REPLICA IDENTITY USING INDEX index_items_code_key;
CREATE TABLE shop.nameless_items (id int, name text);
ALTER TABLE shop.nameless_items REPLICA IDENTITY NOTHING;
CREATE TABLE shop.orders (id int PRIMARY KEY);
CREATE TABLE shop.lines (id serial PRIMARY KEY, order_id int REFERENCES shop.orders);
CREATE TABLE shop."Größe" (id int PRIMARY KEY, "größe in m²" text);
CREATE TABLE shop.doubled (
    id int PRIMARY KEY, gone text, twice int GENERATED ALWAYS AS (id * 2) STORED, kept text
);
ALTER TABLE shop.doubled DROP gone;
CREATE TABLE shop.changing (id int PRIMARY KEY, first text);
CREATE TABLE shop.unpublished (id int PRIMARY KEY);
CREATE TABLE shop.parted (id int, region text, PRIMARY KEY (id, region)) PARTITION BY LIST (region);
CREATE TABLE shop.parted_east PARTITION OF shop.parted FOR VALUES IN ('east');
CREATE TABLE shop.parted_west (region text NOT NULL, id int NOT NULL);
ALTER TABLE shop.parted ATTACH PARTITION shop.parted_west FOR VALUES IN ('west');
CREATE PUBLICATION p FOR TABLE shop.outbox, shop.moods, shop.items, shop.full_items,
    shop.index_items, shop.orders, shop.lines, shop."Größe", shop.doubled, shop.changing,
    shop.nameless_items, shop.parted WITH (publish_via_partition_root = true);
SQL

outbox_rows="
INSERT INTO shop.outbox VALUES
    ('018f3a1e-7c2b-7d4e-9f60-0123456789ab', 'order', 'order-17', 9007199254740993, 2,
     '{\"total\": 12.50, \"name\": \"Zoë\", \"tags\": [null, true]}', '{\"a\" : \"b\"}',
     '\\x00ff10deadbeef', '2026-11-21 11:40:44.123456+00', true, -12.50, E'tab\\tquote\\' end'),
    ('ffffffff-ffff-ffff-ffff-ffffffffffff', '', NULL, NULL, NULL,
     NULL, NULL, '\\x', 'infinity', false, 'NaN', NULL);"

echo "$outbox_rows" | scenario insert_of_each_type
db -c "DELETE FROM shop.outbox"
echo "$outbox_rows" | scenario insert_of_each_type_in_binary "'binary', 'true'"

scenario own_data_types <<'SQL'
INSERT INTO shop.moods VALUES (1, 'glad', 1999);
SQL

scenario own_data_types_in_binary "'binary', 'true'" <<'SQL'
INSERT INTO shop.moods VALUES (1000, 'calm', 250);
SQL

scenario update_of_key_and_of_others <<'SQL'
INSERT INTO shop.items VALUES (1, 'one');
UPDATE shop.items SET name = 'uno' WHERE id = 1;
UPDATE shop.items SET id = 2 WHERE id = 1;
SQL

scenario update_and_delete_with_full_identity <<'SQL'
INSERT INTO shop.full_items VALUES (1, 'one'), (2, NULL);
UPDATE shop.full_items SET name = 'uno' WHERE id = 1;
DELETE FROM shop.full_items WHERE id = 2;
SQL

scenario update_and_delete_with_index_identity <<'SQL'
INSERT INTO shop.index_items VALUES (1, 'a');
UPDATE shop.index_items SET id = 2;
UPDATE shop.index_items SET code = 'b';
DELETE FROM shop.index_items;
SQL

scenario insert_without_identity <<'SQL'
INSERT INTO shop.nameless_items VALUES (1, 'one');
SQL

scenario unchanged_toast <<'SQL'
INSERT INTO shop.items VALUES (10, 'small', repeat('x', 3000));
UPDATE shop.items SET name = 'changed' WHERE id = 10;
SQL

scenario delete_by_key <<'SQL'
DELETE FROM shop.items WHERE id = 10;
SQL

scenario truncate_of_two_tables <<'SQL'
TRUNCATE shop.items, shop.full_items;
TRUNCATE shop.orders RESTART IDENTITY CASCADE;
SQL

scenario logical_messages "'messages', 'true'" <<'SQL'
BEGIN;
SELECT pg_logical_emit_message(true, 'inside', 'with the transaction');
SELECT pg_logical_emit_message(false, 'outside', '\x00ff'::bytea);
INSERT INTO shop.orders VALUES (1);
COMMIT;
BEGIN;
SELECT pg_logical_emit_message(true, 'inside', 'rolled back');
SELECT pg_logical_emit_message(false, '', 'survives a rollback');
ROLLBACK;
-- A rollback leaves its WAL unflushed, out of the slot's sight: a commit flushes it.
INSERT INTO shop.orders VALUES (8);
SQL

scenario origin <<SQL
SELECT pg_replication_origin_create('$name');
SELECT pg_replication_origin_session_setup('$name');
BEGIN;
SELECT pg_replication_origin_xact_setup('16/B374D848', '2026-01-01 00:00:00+00');
INSERT INTO shop.orders VALUES (2);
COMMIT;
SELECT pg_replication_origin_session_reset();
SQL

scenario column_added_between_transactions <<'SQL'
INSERT INTO shop.changing VALUES (1, 'a');
ALTER TABLE shop.changing ADD second int DEFAULT 5;
INSERT INTO shop.changing VALUES (2, 'b', 6);
ANALYZE shop.changing;
INSERT INTO shop.changing VALUES (3, 'c', 7);
SQL

scenario column_dropped_within_a_transaction <<'SQL'
BEGIN;
INSERT INTO shop.changing VALUES (4, 'd', 8);
ALTER TABLE shop.changing DROP first;
INSERT INTO shop.changing VALUES (5, 9);
COMMIT;
SQL

scenario dropped_and_generated_columns <<'SQL'
INSERT INTO shop.doubled (id, kept) VALUES (21, 'k');
SQL

scenario names_beyond_ascii <<'SQL'
INSERT INTO shop."Größe" VALUES (1, 'zwölf');
SQL

scenario empty_transaction <<'SQL'
INSERT INTO shop.unpublished VALUES (1);
INSERT INTO shop.orders VALUES (3);
SQL

scenario savepoint_rolled_back <<'SQL'
BEGIN;
INSERT INTO shop.orders VALUES (4);
SAVEPOINT a;
INSERT INTO shop.orders VALUES (5);
ROLLBACK TO a;
SAVEPOINT b;
INSERT INTO shop.orders VALUES (6);
RELEASE b;
COMMIT;
BEGIN;
INSERT INTO shop.orders VALUES (7);
ROLLBACK;
SQL

scenario partitions_published_as_their_root <<'SQL'
INSERT INTO shop.parted VALUES (1, 'east'), (2, 'west');
UPDATE shop.parted SET region = 'west' WHERE id = 1;
DELETE FROM shop.parted WHERE id = 2;
SQL
