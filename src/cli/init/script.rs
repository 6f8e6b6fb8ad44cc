//! Renders the SQL of `postrider init`: the migrations, adapted to the settings.
//!
//! The files under `migrations/` are complete for the default settings and also work with any other
//! migration tool. This module renders the parts that depend on settings: the payload's type, the
//! publication's name and tables, and the grants on the user's own tables.

mod events;
mod guard;
mod printed;

use slot_manager::{QualifiedName, quoted_identifier, quoted_literal};

use crate::mapping::TableSettings;
use crate::settings::Settings;

pub(in crate::cli) use events::{NewTable, Partition, Payload};
pub(super) use guard::guard;
pub(super) use printed::script;

/// One migration. Running a migration again does no harm.
#[derive(Debug)]
pub(super) struct Migration {
    pub(super) version: i32,
    pub(super) name: &'static str,
    pub(super) sql: String,
    /// Whether each `init --apply` runs the migration again. A migration must run again if it depends on the
    /// settings, or on roles, which belong to the whole cluster and not to the database.
    pub(super) repeats: bool,
}

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
const CONDITION: &str = include_str!("../../../migrations/0015_condition.sql");
const REPLAY: &str = include_str!("../../../migrations/0016_replay.sql");
const PRUNING: &str = include_str!("../../../migrations/0017_pruning.sql");
const SINCE_LSN: &str = include_str!("../../../migrations/0018_since_lsn.sql");
const DAYS: &str = include_str!("../../../migrations/0019_days.sql");
const TABLE_OIDS: &str = include_str!("../../../migrations/0020_table_oids.sql");
const EARLIER_MESSAGES: &str = include_str!("../../../migrations/0021_earlier_messages.sql");
const RECOVERY_PROGRESS: &str = include_str!("../../../migrations/0022_recovery_progress.sql");
const UNCAPTURED: &str = include_str!("../../../migrations/0023_uncaptured.sql");
const SETTLED: &str = include_str!("../../../migrations/0024_settled.sql");

/// The names that the files under `migrations/` use.
const DEFAULT_PUBLICATION: &str = "postrider";
const DEFAULT_TABLE: &str = "outbox.events";

/// The first statement of every migration. After it, every name without a schema refers to PostgreSQL's own
/// function, operator, type or table.
const PIN: &str = "set local search_path = pg_catalog, pg_temp;\n";

/// Clears `default_tablespace` for the session if it names the tablespace of the database. Although tables are created
/// there anyway, PostgreSQL refuses to create a partitioned table or index with this setting.
pub(super) const TABLESPACE: &str = "\
do $$
begin
    if current_setting('default_tablespace') = (
        select t.spcname from pg_catalog.pg_database d
            join pg_catalog.pg_tablespace t on t.oid = d.dattablespace
        where d.datname = current_database()
    ) then
        perform set_config('default_tablespace', '', false);
    end if;
end
$$;
";

/// Creates the table of applied migrations. `init --apply` runs these statements before each migration; the
/// printed script runs them once.
pub(super) const VERSIONS: &str = "\
create schema if not exists outbox;
create table if not exists outbox.migrations (
    version    int         primary key,
    name       text        not null,
    applied_at timestamptz not null default now()
);
comment on table outbox.migrations is 'Which migrations `postrider init` has applied.';
";

/// Returns every migration, in order.
pub(super) fn migrations(settings: &Settings, new_table: NewTable) -> Vec<Migration> {
    let migration = |version, name, sql: String, repeats| Migration {
        version,
        name,
        sql,
        repeats,
    };
    vec![
        migration(1, "events", events::events(new_table), false),
        migration(2, "dispatch", DISPATCH.to_owned(), false),
        migration(3, "publication", publication(settings), true),
        migration(4, "roles", roles(settings), true),
        migration(5, "quarantine", QUARANTINE.to_owned(), false),
        migration(6, "recovery", RECOVERY.to_owned(), false),
        migration(7, "audit", AUDIT.to_owned(), false),
        migration(8, "exceptions", EXCEPTIONS.to_owned(), false),
        migration(10, "one_relay", ONE_RELAY.to_owned(), false),
        migration(11, "capture", CAPTURE.to_owned(), true),
        migration(12, "capture_history", CAPTURE_HISTORY.to_owned(), false),
        migration(13, "database", DATABASE.to_owned(), true),
        migration(14, "unfinished_recovery", UNFINISHED.to_owned(), false),
        migration(15, "condition", CONDITION.to_owned(), false),
        migration(16, "replay", REPLAY.to_owned(), true),
        migration(17, "pruning", PRUNING.to_owned(), false),
        migration(18, "since_lsn", SINCE_LSN.to_owned(), false),
        migration(19, "days", days(settings), true),
        migration(20, "table_oids", TABLE_OIDS.to_owned(), false),
        migration(21, "earlier_messages", EARLIER_MESSAGES.to_owned(), false),
        migration(22, "recovery_progress", RECOVERY_PROGRESS.to_owned(), false),
        migration(23, "uncaptured", UNCAPTURED.to_owned(), false),
        migration(24, "settled", SETTLED.to_owned(), false),
    ]
}

/// Returns the statements that add missing columns to a captured table. They do not rewrite the table.
///
/// - `inserted_xid` identifies a row. All old rows get the same `inserted_xid`. If the table is captured already,
///   the statements also store this value in the capture record, because a later rewrite of the table erases
///   the value from the catalogue.
/// - `seq` orders the rows. A table does not get this column if a sequence already fills its id. Every role may use
///   the sequence of `seq`, because a column default runs with the rights of the role that inserts the row.
pub(super) fn columns(table: &TableSettings) -> String {
    let name = &table.table;
    let oid = format!("{}::regclass", quoted_literal(&name.to_string()));
    let seq = match &table.columns.seq {
        None => seq_column(name, &oid, table.columns.id.as_deref().unwrap_or("id")),
        // The settings say which column numbers the rows, or that there is none, so do not add `seq`.
        Some(_) => String::new(),
    };
    do_block(&format!(
        "    if not exists (select from pg_catalog.pg_attribute where attrelid = {oid}\n               \
                 and attname = 'inserted_xid' and not attisdropped) then\n        \
                 alter table {name} add column inserted_xid xid8 not null\n            \
                     default pg_catalog.pg_current_xact_id();\n        \
                 -- Old rows get the id of this transaction.\n        \
                 update outbox.capture set has_inserted_xid = true,\n            \
                     added_xids = added_xids || pg_catalog.pg_current_xact_id()\n        \
                 where table_oid = {oid}\n           \
                    or schema_name = {schema_literal} and table_name = {name_literal};\n    \
             end if;\n{seq}",
        schema_literal = quoted_literal(&name.schema),
        name_literal = quoted_literal(&name.name),
    ))
}

/// Returns the statements that add a column `seq`. They change nothing if the table already has a column with this
/// name, or if a sequence with increment 1 fills its id.
fn seq_column(name: &QualifiedName, oid: &str, id: &str) -> String {
    let sequence = QualifiedName::new(&name.schema, format!("{}_seq_seq", short(&name.name)));
    format!(
        "    if not exists (\n        \
                 select from pg_catalog.pg_attribute a\n        \
                 left join pg_catalog.pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum\n        \
                 where a.attrelid = {oid} and not a.attisdropped\n          \
                   and (a.attname = 'seq' or a.attname = {id} and a.atttypid in (20, 21, 23)\n               \
                        and (a.attidentity <> ''\n               \
                             or pg_catalog.pg_get_expr(d.adbin, d.adrelid) like 'nextval(%')\n               \
                        and exists (select from pg_catalog.pg_sequence s join pg_catalog.pg_depend o\n                 \
                          on o.classid = 'pg_catalog.pg_class'::regclass and o.objid = s.seqrelid\n                     \
                             and o.refobjid = a.attrelid and o.refobjsubid = a.attnum and o.deptype = 'i'\n                  \
                          or o.classid = 'pg_catalog.pg_attrdef'::regclass and o.objid = d.oid\n                     \
                             and o.refobjid = s.seqrelid\n                 \
                          where s.seqincrement = 1))) then\n        \
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

/// Returns the statement that creates the index along which a recovery reads the table. With `concurrently`,
/// the statement must run outside a transaction, and does not block writers. PostgreSQL chooses a free name
/// for the index, because a fixed name might already belong to the index of another table.
pub(super) fn index(table: &TableSettings, concurrently: bool) -> String {
    let name = &table.table;
    let concurrently = if concurrently { " concurrently" } else { "" };
    format!("create index{concurrently} on {name} (seq) where seq is not null")
}

/// Returns at most the first 48 bytes of a name, to leave room for a suffix: PostgreSQL truncates names to 63
/// bytes.
fn short(name: &str) -> &str {
    let end = (0..=48).rev().find(|end| name.is_char_boundary(*end));
    &name[..end.unwrap_or(0).min(name.len())]
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

/// Returns the statements as an anonymous block. Chooses a delimiter that does not occur in the statements. For
/// example, a quoted name may contain `$$`, which would end a block with the delimiter `$$` early.
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

/// Returns the statements for the roles and their grants. If `prune_after` is set, the relay also gets
/// the right to delete rows.
fn roles(settings: &Settings) -> String {
    let mut sql = ROLES.to_owned() + &grants(settings);
    if settings.prune_after.is_some() {
        let tables = settings.tables.iter().map(|table| table.table.to_string());
        let tables: Vec<String> = tables.chain(["outbox.dispatch".to_owned()]).collect();
        let body = format!(
            "    if exists (select from pg_catalog.pg_roles where rolname = 'postrider_relay') then\n        \
                     grant delete on {} to postrider_relay;\n    \
                 end if;\n",
            tables.join(", ")
        );
        sql += "\n-- The relay prunes (`prune_after`).\n";
        sql += &do_block(&body);
    }
    sql
}

/// Returns the functions for daily partitions. If `prune_after` is set and `outbox.events` is captured and
/// has daily partitions, the relay also gets the right to add and drop days.
fn days(settings: &Settings) -> String {
    let is_captured = |table: &TableSettings| table.table.to_string() == DEFAULT_TABLE;
    let mut sql = DAYS.to_owned();
    if settings.prune_after.is_some() && settings.tables.iter().any(is_captured) {
        sql += "\n-- The relay prunes (`prune_after`).\n";
        sql += &do_block(
            "    if exists (select from pg_catalog.pg_roles where rolname = 'postrider_relay')\n       \
                     and exists (select from outbox.days()) then\n        \
                     grant execute on function outbox.add_day(date), outbox.lock_day(oid, date),\n            \
                         outbox.drop_day(oid, date) to postrider_relay;\n    \
                 end if;\n",
        );
    }
    sql
}

/// Returns the grants on captured tables other than `outbox.events`; an empty text if there are none.
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

#[cfg(test)]
mod tests;
