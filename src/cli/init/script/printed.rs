//! Renders the script that `init` prints: all statements with comments, for psql or any other client.

use slot_manager::{SlotName, quoted_identifier, quoted_literal};

use super::guard::{CALL_GUARD, GUARD_BODY};
use super::{Migration, NewTable, PIN, TABLESPACE, VERSIONS, columns, index, migrations};
use crate::capture::claim::identity_of_first;
use crate::mapping::TableSettings;
use crate::settings::{Settings, Start};

/// Returns all statements as one commented script for psql or any other client.
pub(in crate::cli::init) fn script(
    settings: &Settings,
    new_table: NewTable,
    relay_user: Option<&str>,
    with_slot: bool,
    with_columns: bool,
) -> String {
    let mut text = String::from(
        "-- The database objects of Postrider. `postrider init --apply` runs these statements; so does\n\
         -- psql -v ON_ERROR_STOP=1 -f FILE, as the owner of the database. Running them again changes\n\
         -- nothing.\n\
         --\n\
         -- Names without a schema are PostgreSQL's own, also in the statements outside a transaction.\n\
         set search_path = pg_catalog, pg_temp;\n\n\
         -- Stops the script if a role that is not trusted could put its own objects in the place of ours.\n",
    );
    text += &format!(
        "create or replace function pg_temp.postrider_guard() returns void\n\
         language plpgsql set search_path = pg_catalog, pg_temp as $$\n{GUARD_BODY}$$;\n"
    );
    text += &format!(
        "\n-- PostgreSQL creates no partitioned table if default_tablespace names the database's own tablespace.\n{TABLESPACE}"
    );
    for Migration {
        version, name, sql, ..
    } in migrations(settings, new_table)
    {
        text += &format!(
            "\n-- {version:04} {name} {}\n\nbegin;\n\n",
            "-".repeat(80 - name.len())
        );
        text += &format!("{PIN}{CALL_GUARD}");
        if version == 1 {
            text += &format!("\n{VERSIONS}");
        }
        text += &format!(
            "\n{sql}\n\
             {CALL_GUARD}\
             insert into outbox.migrations (version, name) values ({version}, '{name}')\n    \
             on conflict (version) do nothing;\n\n\
             commit;\n"
        );
    }
    if with_columns {
        text += &columns_part(settings);
    }
    if new_table.partition.is_some() {
        text += DAYS_AHEAD;
    }
    if let Some(user) = relay_user {
        text += &format!(
            "\n-- The relay's own login role {}\n\n\
             grant postrider_relay to {user};\n\
             -- REPLICATION is never inherited; as a superuser (Amazon RDS: grant rds_replication):\n\
             alter role {user} with replication;\n",
            "-".repeat(61),
            user = quoted_identifier(user),
        );
    }
    if with_slot {
        text += &slot_part(settings);
    }
    text += "\nreset default_tablespace;\nreset search_path;\n";
    text
}

/// The part of the script that adds the first daily partitions.
const DAYS_AHEAD: &str = "
-- Daily partitions of today and the next seven days -------------------------------

select m.day, outbox.add_day(m.day) from outbox.missing_days() m (day);
";

fn columns_part(settings: &Settings) -> String {
    let mut text = format!(
        "\n-- Columns that identify and order the rows {}\n\n",
        "-".repeat(46)
    );
    for table in &settings.tables {
        text += &format!(
            "-- On a lock timeout run it again: writers wait while it waits.\n\
             begin;\n{PIN}set local lock_timeout = '1s';\n{}commit;\n\
             -- If the block above has added seq:\n-- {};\n",
            columns(table),
            index(table, true)
        );
    }
    text
}

fn slot_part(settings: &Settings) -> String {
    let mut text = format!(
        "\n-- The slot {}\n\n\
         -- Last, and outside a transaction: every row committed from now on is delivered. Needs\n\
         -- wal_level = logical and a role with REPLICATION. Waits until all running transactions\n\
         -- have ended. From then on PostgreSQL retains WAL until a relay has read it.\n\
         {}\n",
        "-".repeat(77),
        slot_statement(&settings.slot, settings.slot_failover),
    );
    text += "\n-- Run directly after the slot: records which rows the relay has to publish.\n";
    for table in &settings.tables {
        text += &capture_statement(table, settings);
    }
    text
}

fn slot_statement(slot: &SlotName, failover: bool) -> String {
    let failover = if failover { ", failover => true" } else { "" };
    format!(
        "select pg_catalog.pg_create_logical_replication_slot(\n           \
         slot_name => '{slot}', plugin => 'pgoutput'{failover})\n\
         where not exists (select from pg_catalog.pg_replication_slots where slot_name = '{slot}');"
    )
}

/// Returns the statement that adds the capture record of a table, unless the table has one. A relay that creates
/// the slot itself writes the same `since` and `floor`.
fn capture_statement(table: &TableSettings, settings: &Settings) -> String {
    let name = &table.table;
    let (schema, table) = (quoted_literal(&name.schema), quoted_literal(&name.name));
    let (since, floor) = match settings.start {
        Start::New => (
            "pg_current_snapshot()",
            "pg_snapshot_xmin(pg_current_snapshot())",
        ),
        Start::All => ("null", "'0'"),
    };
    format!(
        "insert into outbox.capture\n    \
         (identity, schema_name, table_name, table_oid, slot, since, floor, has_inserted_xid, instance)\n\
         select {identity}, {schema}, {table}, c.oid, '{slot}', {since}, {floor},\n    \
         exists (select from pg_catalog.pg_attribute a where a.attrelid = c.oid\n        \
         and a.attname = 'inserted_xid' and a.atttypid = 5069 and a.attnotnull), 'psql'\n\
         from pg_catalog.pg_class c where c.oid = {literal}::regclass\n    \
         and not exists (select from outbox.capture k where k.table_oid = c.oid)\n\
         on conflict do nothing;\n",
        identity = quoted_literal(&identity_of_first(name)),
        literal = quoted_literal(&name.to_string()),
        slot = settings.slot,
    )
}
