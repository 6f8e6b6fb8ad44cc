//! The SQL of `postrider init`: the migrations, rendered for the settings.
//!
//! The files under `migrations/` are complete for the default settings and also work with any other
//! migration tool. This module renders the parts that depend on settings: the payload's type, the
//! publication's name and tables, and the grants on the user's own tables.

use slot_manager::{QualifiedName, SlotName, quoted_identifier, quoted_literal};

use crate::map::TableSettings;
use crate::settings::{Settings, Start};

/// The type of the payload column of `outbox.events`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(in crate::cli) enum Payload {
    /// For JSON; PostgreSQL validates it
    Jsonb,
    /// For Protobuf, Avro and similar formats; sent byte for byte
    Bytea,
}

/// One step of the schema. Each is safe to run again.
#[derive(Debug)]
pub(super) struct Migration {
    pub(super) version: i32,
    pub(super) name: &'static str,
    pub(super) sql: String,
    /// Whether each `init --apply` runs it, because it depends on the settings or on objects outside
    /// the database (roles belong to the whole cluster).
    pub(super) repeats: bool,
}

const EVENTS: &str = include_str!("../../../migrations/0001_events.sql");
const DISPATCH: &str = include_str!("../../../migrations/0002_dispatch.sql");
const PUBLICATION: &str = include_str!("../../../migrations/0003_publication.sql");
const AUDIT: &str = include_str!("../../../migrations/0007_audit.sql");
const ROLES: &str = include_str!("../../../migrations/0004_roles.sql");
const QUARANTINE: &str = include_str!("../../../migrations/0005_quarantine.sql");
const RECOVERY: &str = include_str!("../../../migrations/0006_recovery.sql");
const EXCEPTIONS: &str = include_str!("../../../migrations/0008_exceptions.sql");
const ONE_RELAY: &str = include_str!("../../../migrations/0010_one_relay.sql");
const CAPTURE: &str = include_str!("../../../migrations/0011_capture.sql");
const CAPTURE_HISTORY: &str = include_str!("../../../migrations/0012_capture_history.sql");
const DATABASE: &str = include_str!("../../../migrations/0013_database.sql");
const UNFINISHED: &str = include_str!("../../../migrations/0014_unfinished_recovery.sql");

/// The names used in the files.
const DEFAULT_PUBLICATION: &str = "postrider";
const DEFAULT_TABLE: &str = "outbox.events";

/// Makes every name without a schema refer to PostgreSQL's own function, operator, type or table. Each
/// file begins with this statement, and so does each rendered part.
const PIN: &str = "set local search_path = pg_catalog, pg_temp;\n";

/// Refuses to run when an untrusted role owns the schema or anything in it, or may create objects
/// there. Such a role could attack the role that runs this: statements on a table run its triggers,
/// and `if not exists` and `or replace` accept an object that is already there.
///
/// It runs before each migration, and again after its objects exist and before they are used: a
/// transaction that began while its role still had the right may have created one of them meanwhile.
///
/// Trusted are superusers, the owner of the database, the current role, and roles that the current
/// role is a member of. A superuser is a member of every role, so membership does not count if the
/// current role is a superuser.
const GUARD_BODY: &str = "\
declare
    found record;
begin
    for found in
        with owned as (
            select n.oid as schema,
                   'Run this as role %s, or drop it, or give it to the owner of the database.' as hint
            from pg_catalog.pg_namespace n where n.nspname = 'outbox'
        )
        select o.what || coalesce(r.rolname, 'PUBLIC') as what,
               pg_catalog.format(o.hint, coalesce(pg_catalog.quote_ident(r.rolname), 'public')) as hint
        from (
            select 1 as place, n.nspowner as role, 'schema outbox belongs to role ' as what,
                   'Run this as role %s, or give the schema to the owner of the database.' as hint
            from pg_catalog.pg_namespace n where n.nspname = 'outbox'
            union all
            select 2, c.relowner, 'outbox.' || c.relname || ' belongs to role ', owned.hint
            from owned
            join pg_catalog.pg_class c on c.relnamespace = owned.schema and c.relkind not in ('i', 'I')
            union all
            select 2, p.proowner, 'function outbox.' || p.proname || ' belongs to role ', owned.hint
            from owned
            join pg_catalog.pg_proc p on p.pronamespace = owned.schema
            union all
            select 2, t.typowner, 'type outbox.' || t.typname || ' belongs to role ', owned.hint
            from owned
            join pg_catalog.pg_type t on t.typnamespace = owned.schema
            where t.typrelid = 0 and t.typelem = 0
            union all
            select 3, a.grantee, 'the right to create objects in schema outbox has role ',
                   'Revoke it: revoke create on schema outbox from %s.'
            from pg_catalog.pg_namespace n, pg_catalog.aclexplode(n.nspacl) a
            where n.nspname = 'outbox' and a.privilege_type = 'CREATE'
        ) o
        left join pg_catalog.pg_roles r on r.oid = o.role
        where r.oid is null
           or not r.rolsuper
          and r.rolname <> current_user
          and r.oid <> (select d.datdba from pg_catalog.pg_database d where d.datname = current_database())
          and ((select me.rolsuper from pg_catalog.pg_roles me where me.rolname = current_user)
               or not pg_catalog.pg_has_role(r.oid, 'usage'))
        order by o.place
    loop
        raise exception '%, which is not trusted', found.what
            using errcode = 'insufficient_privilege', hint = found.hint;
    end loop;
end
";

/// [`GUARD_BODY`] as a statement.
pub(super) fn guard() -> String {
    format!("do $$\n{GUARD_BODY}$$;\n")
}

/// The calls of the guard in the printed script, which defines it once as a function of the session.
const CALL_GUARD: &str = "do $$ begin perform pg_temp.postrider_guard(); end $$;\n";

/// Creates the table of applied migrations. Runs before each migration.
pub(super) const VERSIONS: &str = "\
create schema if not exists outbox;
create table if not exists outbox.migrations (
    version    int         primary key,
    name       text        not null,
    applied_at timestamptz not null default now()
);
comment on table outbox.migrations is 'Which migrations `postrider init` has applied.';
";

/// Every migration, in order.
pub(super) fn migrations(settings: &Settings, payload: Payload) -> Vec<Migration> {
    let migration = |version, name, sql: String, repeats| Migration {
        version,
        name,
        sql,
        repeats,
    };
    vec![
        migration(1, "events", events(payload), false),
        migration(2, "dispatch", DISPATCH.to_owned(), false),
        migration(3, "publication", publication(settings), true),
        migration(4, "roles", ROLES.to_owned() + &grants(settings), true),
        migration(5, "quarantine", QUARANTINE.to_owned(), false),
        migration(6, "recovery", RECOVERY.to_owned(), false),
        migration(7, "audit", AUDIT.to_owned(), false),
        migration(8, "exceptions", EXCEPTIONS.to_owned(), false),
        migration(10, "one_relay", ONE_RELAY.to_owned(), false),
        migration(11, "capture", CAPTURE.to_owned(), true),
        migration(12, "capture_history", CAPTURE_HISTORY.to_owned(), false),
        migration(13, "database", DATABASE.to_owned(), true),
        migration(14, "unfinished_recovery", UNFINISHED.to_owned(), false),
    ]
}

/// Adds the columns that identify and order the rows of a captured table, if they are missing. Neither
/// rewrites the table. If the table is captured already, its record learns how its old rows look: a
/// rewrite of the table erases it from the catalog. A table without a numbered id gets a column `seq`. Every writer may use its
/// sequence, because column defaults run with the writer's rights.
pub(super) fn columns(table: &TableSettings) -> String {
    let name = &table.table;
    let oid = format!("{}::regclass", quoted_literal(&name.to_string()));
    let seq = match &table.columns.seq {
        None => seq_column(name, &oid, table.columns.id.as_deref().unwrap_or("id")),
        // The settings name another column, or none.
        Some(_) => String::new(),
    };
    do_block(&format!(
        "    if not exists (select from pg_catalog.pg_attribute where attrelid = {oid}\n               \
                 and attname = 'inserted_xid' and not attisdropped) then\n        \
                 alter table {name} add column inserted_xid xid8 not null\n            \
                     default pg_catalog.pg_current_xact_id();\n        \
                 -- Old rows show this transaction as theirs.\n        \
                 update outbox.capture set has_inserted_xid = true,\n            \
                     added_xids = added_xids || pg_catalog.pg_current_xact_id()\n        \
                 where table_oid = {oid}\n           \
                    or schema_name = {schema_literal} and table_name = {name_literal};\n    \
             end if;\n{seq}",
        schema_literal = quoted_literal(&name.schema),
        name_literal = quoted_literal(&name.name),
    ))
}

/// Adds a column `seq`, unless a numbered id or another column called so exists.
fn seq_column(name: &QualifiedName, oid: &str, id: &str) -> String {
    let sequence = QualifiedName::new(&name.schema, format!("{}_seq_seq", short(&name.name)));
    format!(
        "    if not exists (\n        \
                 select from pg_catalog.pg_attribute a\n        \
                 left join pg_catalog.pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum\n        \
                 where a.attrelid = {oid} and not a.attisdropped\n          \
                   and (a.attname = 'seq' or a.attname = {id} and a.atttypid in (20, 21, 23)\n               \
                        and (a.attidentity <> ''\n               \
                             or pg_catalog.pg_get_expr(d.adbin, d.adrelid) like 'nextval(%'))) then\n        \
                 alter table {name} add column seq bigint;\n        \
                 create sequence if not exists {sequence};\n        \
                 if not exists (\n            \
                     select from pg_catalog.pg_class s, pg_catalog.pg_class t, pg_catalog.pg_roles r\n            \
                     where s.oid = pg_catalog.to_regclass({literal}) and s.relkind = 'S' and t.oid = {oid}\n              \
                       and r.oid = s.relowner and (r.oid = t.relowner or r.rolname = current_user or r.rolsuper)) then\n            \
                     raise exception '% already exists and belongs to another role than the table', {literal}\n                \
                         using errcode = 'insufficient_privilege', hint = 'Drop or rename it.';\n        \
                 end if;\n        \
                 alter table {name} alter column seq set default pg_catalog.nextval({literal});\n        \
                 grant usage on sequence {sequence} to public;\n    \
             end if;\n",
        id = quoted_literal(id),
        literal = quoted_literal(&sequence.to_string()),
    )
}

/// The index that a recovery reads by. Run it outside a transaction, so that writers are not blocked.
/// PostgreSQL chooses a free name: a name of ours might belong to the index of another table.
pub(super) fn index(table: &TableSettings, concurrently: bool) -> String {
    let name = &table.table;
    let concurrently = if concurrently { " concurrently" } else { "" };
    format!("create index{concurrently} on {name} (seq) where seq is not null")
}

/// The first 48 bytes of a name: leaves room for a suffix, since PostgreSQL cuts names at 63 bytes.
fn short(name: &str) -> &str {
    let end = (0..=48).rev().find(|end| name.is_char_boundary(*end));
    &name[..end.unwrap_or(0).min(name.len())]
}

fn events(payload: Payload) -> String {
    match payload {
        Payload::Jsonb => EVENTS.to_owned(),
        // Comments stay unchanged: one of them describes this replacement.
        Payload::Bytea => EVENTS
            .lines()
            .map(|line| {
                if line.starts_with("--") {
                    format!("{line}\n")
                } else {
                    format!("{}\n", line.replace("payload jsonb", "payload bytea"))
                }
            })
            .collect(),
    }
}

fn publication(settings: &Settings) -> String {
    let is_default = settings.publication == DEFAULT_PUBLICATION
        && settings
            .tables
            .iter()
            .all(|table| table.table.to_string() == DEFAULT_TABLE);
    if is_default {
        return PUBLICATION.to_owned();
    }
    let name = &settings.publication;
    let tables: Vec<String> = settings
        .tables
        .iter()
        .map(|t| t.table.to_string())
        .collect();
    let mut body = format!(
        "    if not exists (select from pg_catalog.pg_publication where pubname = {literal}) then\n        \
                 create publication {identifier} for table {tables}\n            \
                     with (publish = 'insert', publish_via_partition_root = true);\n    \
             end if;\n",
        literal = quoted_literal(name),
        identifier = quoted_identifier(name),
        tables = tables.join(", "),
    );
    for table in &settings.tables {
        body += &add_table(name, &table.table);
    }
    format!(
        "-- The relay streams this publication. It must exist before the slot: rows inserted after the\n\
         -- slot and before the publication cannot be streamed.\n\n{PIN}{}",
        do_block(&body)
    )
}

/// Statements as an anonymous block. The delimiter must not occur in the statements: a quoted name may
/// contain `$$`, which would end the block early.
fn do_block(body: &str) -> String {
    let tags = std::iter::once("$$".to_owned()).chain((1..).map(|n| format!("$block_{n}$")));
    let tag = tags.into_iter().find(|tag| !body.contains(tag));
    let tag = tag.expect("invariant: a finite text holds finitely many delimiters");
    format!("do {tag}\nbegin\n{body}end\n{tag};\n")
}

fn add_table(publication: &str, table: &QualifiedName) -> String {
    format!(
        "    if not exists (select from pg_catalog.pg_publication_tables\n                   \
         where pubname = {} and schemaname = {} and tablename = {}) then\n        \
         alter publication {} add table {table};\n    \
         end if;\n",
        quoted_literal(publication),
        quoted_literal(&table.schema),
        quoted_literal(&table.name),
        quoted_identifier(publication),
    )
}

/// Grants on captured tables other than `outbox.events`; empty when there are none.
fn grants(settings: &Settings) -> String {
    let others: Vec<&QualifiedName> = settings
        .tables
        .iter()
        .map(|table| &table.table)
        .filter(|table| table.to_string() != DEFAULT_TABLE)
        .collect();
    if others.is_empty() {
        return String::new();
    }
    let statements: Vec<String> = others
        .iter()
        .map(|table| {
            format!(
                "        if not has_schema_privilege('postrider_relay', {literal}, 'usage') then\n            \
                     grant usage on schema {schema} to postrider_relay;\n        \
                 end if;\n        \
                 grant select on {table} to postrider_relay;\n",
                literal = quoted_literal(&table.schema),
                schema = quoted_identifier(&table.schema)
            )
        })
        .collect();
    let body = format!(
        "    if exists (select from pg_catalog.pg_roles where rolname = 'postrider_relay') then\n\
         {}    end if;\n",
        statements.concat()
    );
    format!(
        "\n-- The relay also reads the other captured tables. Their writers need no grant here.\n{}",
        do_block(&body)
    )
}

/// All statements as one commented script for psql or any other client.
pub(super) fn script(
    settings: &Settings,
    payload: Payload,
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
         -- Stops the script if a role that is not trusted could put its own objects under ours.\n",
    );
    text += &format!(
        "create or replace function pg_temp.postrider_guard() returns void\n\
         language plpgsql set search_path = pg_catalog, pg_temp as $$\n{GUARD_BODY}$$;\n"
    );
    for Migration {
        version, name, sql, ..
    } in migrations(settings, payload)
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
        text += &format!(
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
        text += &format!(
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
    }
    text += "\nreset search_path;\n";
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

/// The capture record that the relay itself writes when it creates the slot.
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
        identity = quoted_literal(&format!("{}.{}", name.schema, name.name)),
        literal = quoted_literal(&name.to_string()),
        slot = settings.slot,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(pairs: &[(&str, &str)]) -> Settings {
        let env = pairs
            .iter()
            .map(|(k, v)| ((*k).into(), (*v).into()))
            .collect();
        Settings::load(None, &env, &[]).unwrap()
    }

    #[test]
    fn the_default_settings_render_the_files_unchanged() {
        let rendered = migrations(&settings(&[]), Payload::Jsonb);
        let texts: Vec<&str> = rendered.iter().map(|m| m.sql.as_str()).collect();
        assert_eq!(
            texts,
            [
                EVENTS,
                DISPATCH,
                PUBLICATION,
                ROLES,
                QUARANTINE,
                RECOVERY,
                AUDIT,
                EXCEPTIONS,
                ONE_RELAY,
                CAPTURE,
                CAPTURE_HISTORY,
                DATABASE,
                UNFINISHED
            ]
        );
        let versions: Vec<i32> = rendered.iter().map(|m| m.version).collect();
        assert_eq!(versions, [1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 13, 14]);
    }

    #[test]
    fn payload_bytea_changes_the_table_and_the_function() {
        let sql = events(Payload::Bytea);
        assert_eq!(
            sql.lines()
                .filter(|line| line.trim() == "payload bytea,")
                .count(),
            2
        );
        assert!(
            !sql.lines()
                .any(|line| !line.starts_with("--") && line.contains("payload jsonb"))
        );
    }

    #[test]
    fn the_names_in_the_settings_are_quoted_where_sql_needs_it() {
        let settings = settings(&[
            ("POSTRIDER_PUBLICATION", "Shop's \"events\""),
            ("POSTRIDER_TABLE", "sales.\"Outbox\""),
        ]);
        let sql = publication(&settings);
        assert!(
            sql.contains("create publication \"Shop's \"\"events\"\"\" for table sales.\"Outbox\"")
        );
        assert!(sql.contains("where pubname = 'Shop''s \"events\"'"));
        assert!(sql.contains("schemaname = 'sales' and tablename = 'Outbox'"));
        assert!(grants(&settings).contains("grant select on sales.\"Outbox\" to postrider_relay;"));
    }

    #[test]
    fn a_quoted_name_cannot_end_its_do_block() {
        let settings = settings(&[
            ("POSTRIDER_PUBLICATION", "a$$b"),
            ("POSTRIDER_TABLE", "sales.\"$block_1$\""),
        ]);
        assert!(publication(&settings).ends_with("end\n$block_2$;\n"));
        assert!(grants(&settings).ends_with("end\n$$;\n"));
    }

    #[test]
    fn the_slot_comes_after_the_publication_and_can_be_left_out() {
        let settings = settings(&[("POSTRIDER_SLOT", "mine")]);
        let sql = script(&settings, Payload::Jsonb, Some("shop relay"), true, true);
        let slot = sql.find("slot_name => 'mine'").unwrap();
        assert!(sql.find("create publication").unwrap() < slot);
        assert!(sql.rfind("commit;").unwrap() < slot);
        assert!(sql.contains("grant postrider_relay to \"shop relay\";"));
        let without = script(&settings, Payload::Jsonb, None, false, false);
        assert!(!without.contains("pg_create_logical_replication_slot"));
    }
}
