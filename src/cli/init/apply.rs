//! Applies the migrations, one transaction each, and checks columns, publication and roles.
//!
//! Concurrent runs wait for each other: every transaction takes the same advisory lock before it
//! reads which migrations are applied.

use std::time::Duration;

use slot_manager::publication::{self, Problem};
use slot_manager::{Finding, Severity, quoted_identifier};
use tokio_postgres::error::SqlState;

use super::STATEMENT_TIMEOUT;
use super::script::{self, Migration, Payload};
use crate::capture::shape;
use crate::cli::check;
use crate::cli::findings::{finding, finding_with_remedy, from_error};
use crate::error::{Code, Error, Result};
use crate::map::TableSettings;
use crate::postgres::Sql;
use crate::settings::Settings;

/// Key of the advisory lock: "postride" in ASCII.
const LOCK: i64 = 0x706f_7374_7269_6465;

/// How long a migration waits for a lock, also for another `init`: below the limit of a statement.
const LOCK_TIMEOUT_S: u32 = 20;

/// The first migration that reads the captured tables; tables of the user must exist before it.
const FIRST_WITH_TABLES: i32 = 3;

/// Applies the migrations that are not applied yet.
pub(super) async fn migrations(
    sql: &mut Sql,
    settings: &Settings,
    payload: Payload,
) -> Result<Vec<Finding>> {
    let mut findings = Vec::new();
    for migration in script::migrations(settings, payload) {
        if migration.version == FIRST_WITH_TABLES {
            tables_exist(sql, settings).await?;
        }
        let outcome = apply(sql, &migration).await?;
        let what = format!("{:04} {}: {outcome}", migration.version, migration.name);
        findings.push(finding(Severity::Ok, "migration", what));
    }
    Ok(findings)
}

async fn apply(sql: &mut Sql, migration: &Migration) -> Result<&'static str> {
    let Migration { version, name, .. } = migration;
    let failed = |error| not_the_owner(error, &format!("migration {version:04} {name} failed"));
    let guard = script::guard();
    let transaction = sql.client_mut().transaction().await?;
    transaction
        .batch_execute(&format!("set local lock_timeout = '{LOCK_TIMEOUT_S}s'"))
        .await?;
    let locked = transaction
        .execute("select pg_advisory_xact_lock($1)", &[&LOCK])
        .await;
    if let Err(error) = locked {
        drop(transaction);
        return Err(locked_by(sql, error).await);
    }
    for statements in [guard.as_str(), script::VERSIONS, guard.as_str()] {
        transaction
            .batch_execute(statements)
            .await
            .map_err(failed)?;
    }
    let known = transaction
        .query_opt(
            "select from outbox.migrations where version = $1",
            &[version],
        )
        .await
        .map_err(failed)?
        .is_some();
    if known && !migration.repeats {
        return Ok("already done");
    }
    transaction
        .batch_execute(&migration.sql)
        .await
        .map_err(failed)?;
    transaction.batch_execute(&guard).await.map_err(failed)?;
    transaction
        .execute(
            "insert into outbox.migrations (version, name) values ($1, $2) \
             on conflict (version) do nothing",
            &[version, name],
        )
        .await
        .map_err(failed)?;
    transaction.commit().await.map_err(failed)?;
    Ok(if known { "already done" } else { "applied" })
}

/// The error when the advisory lock was not free. Any role can hold it, so it names the session.
async fn locked_by(sql: &Sql, error: tokio_postgres::Error) -> Error {
    const STATEMENT: &str = "\
        select 'process ' || l.pid || ', role ' || coalesce(a.usename, '?') \
        from pg_catalog.pg_locks l left join pg_catalog.pg_stat_activity a on a.pid = l.pid \
        where l.locktype = 'advisory' and l.granted and l.objsubid = 1 \
          and l.database = (select d.oid from pg_catalog.pg_database d \
                            where d.datname = current_database()) \
          and l.classid = ($1::bigint >> 32)::oid and l.objid = ($1::bigint & 4294967295)::oid";
    if error.code() != Some(&SqlState::LOCK_NOT_AVAILABLE) {
        return error.into();
    }
    let holder = sql.query_opt(STATEMENT, &[&LOCK]).await.ok().flatten();
    let holder = holder.map_or_else(|| "another session".to_owned(), |row| row.get(0));
    let what = format!("the lock of `postrider init` is held by {holder}");
    Error::new(Code::PostgresTimeout, what)
        .caused_by(error)
        .hint(
            "if that is another `init`, wait for it and run this again; otherwise end that session \
         with pg_terminate_backend",
        )
}

/// Gives a failed statement of `init` its own hint: run it as the owner, not as the relay's role.
fn not_the_owner(error: tokio_postgres::Error, what: &str) -> Error {
    let said = error.as_db_error().and_then(|error| error.hint());
    let said = said.map(str::to_owned);
    let inner = Error::from(error);
    let failed = Error::new(inner.code(), what).caused_by(inner);
    match (failed.code(), said) {
        (Code::PrivilegeMissing, Some(said)) => failed.hint(said),
        (Code::PrivilegeMissing, None) => failed.hint(
            "run it as the owner of the database and of the tables, such as \
             DATABASE_URL=postgres://postgres@HOST/DATABASE, not as the relay's role",
        ),
        _ => failed,
    }
}

async fn tables_exist(sql: &Sql, settings: &Settings) -> Result<()> {
    for table in &settings.tables {
        let name = table.table.to_string();
        let exists: bool = sql
            .query_one("select to_regclass($1) is not null", &[&name])
            .await?
            .get(0);
        if !exists {
            return Err(
                Error::new(Code::SchemaMissing, format!("table {name} does not exist"))
                    .hint("create it and run this again, or correct the setting that names it"),
            );
        }
    }
    Ok(())
}

/// Adds missing columns to the captured tables, and the index on `seq`, and reports what the tables
/// have afterwards.
pub(super) async fn columns(sql: &Sql, settings: &Settings) -> Result<Vec<Finding>> {
    let mut findings = Vec::new();
    for table in &settings.tables {
        add_columns(sql, table).await?;
        let Some(shape) = shape::look(sql, table).await? else {
            continue;
        };
        let seq = shape.seq.as_ref();
        if seq.is_some_and(|seq| seq.column == "seq" && !seq.is_indexed)
            && (!shape.is_partitioned() || is_small(sql, table).await?)
        {
            add_index(sql, table, shape.is_partitioned()).await?;
        }
        if let Some(shape) = shape::look(sql, table).await? {
            findings.extend(check::capture::columns(table, &shape));
        }
    }
    Ok(findings)
}

/// How long to wait for the lock on a table. New writers wait behind us meanwhile.
const TABLE_LOCK_TIMEOUT: &str = "1s";
/// How often to try, and the pause in which the writers go on.
const TABLE_LOCK_TRIES: u32 = 8;
const TABLE_LOCK_PAUSE: Duration = Duration::from_secs(1);

async fn add_columns(sql: &Sql, table: &TableSettings) -> Result<()> {
    let what = format!("cannot add columns to {}", table.table);
    let adding = format!(
        "set lock_timeout = '{TABLE_LOCK_TIMEOUT}'; {}",
        script::columns(table)
    );
    let mut tries = 1;
    loop {
        let added = sql.batch_execute(&adding).await;
        sql.batch_execute("reset lock_timeout").await?;
        match added {
            Ok(()) => return Ok(()),
            Err(error) if error.code() != Some(&SqlState::LOCK_NOT_AVAILABLE) => {
                return Err(not_the_owner(error, &what));
            }
            Err(error) if tries == TABLE_LOCK_TRIES => {
                return Err(locked_table(sql, table, &what, error).await);
            }
            Err(_) => tokio::time::sleep(TABLE_LOCK_PAUSE).await,
        }
        tries += 1;
    }
}

/// The error when a table stayed locked, with the oldest transaction that holds a lock on it.
async fn locked_table(
    sql: &Sql,
    table: &TableSettings,
    what: &str,
    error: tokio_postgres::Error,
) -> Error {
    const STATEMENT: &str = "\
        select coalesce('process ' || l.pid || ', role ' || coalesce(a.usename, '?'), \
                        'a prepared transaction') \
        from pg_catalog.pg_locks l left join pg_catalog.pg_stat_activity a on a.pid = l.pid \
        where l.granted and l.pid is distinct from pg_catalog.pg_backend_pid() \
          and l.database = (select d.oid from pg_catalog.pg_database d \
                            where d.datname = current_database()) \
          and (l.relation = pg_catalog.to_regclass($1) or l.relation in ( \
              select t.relid from pg_catalog.pg_partition_tree(pg_catalog.to_regclass($1)) t)) \
        order by a.xact_start limit 1";
    let name = table.table.to_string();
    let holder = sql.query_opt(STATEMENT, &[&name]).await.ok().flatten();
    let holder = holder.map_or_else(|| "other transactions".to_owned(), |row| row.get(0));
    let what = format!("{what}: {holder} kept it locked");
    Error::new(Code::PostgresTimeout, what)
        .caused_by(error)
        .hint("wait until that transaction has ended, or end it; then run this again")
}

/// Creates the index on `seq`. That may take as long as the table is large, so no limit applies. A
/// build that was cut off has left an invalid index, which is dropped first.
async fn add_index(sql: &Sql, table: &TableSettings, is_partitioned: bool) -> Result<()> {
    const INVALID: &str = "\
        select pg_catalog.format('drop index concurrently %I.%I', n.nspname, c.relname) \
        from pg_catalog.pg_index i \
        join pg_catalog.pg_class c on c.oid = i.indexrelid and c.relkind = 'i' \
        join pg_catalog.pg_namespace n on n.oid = c.relnamespace \
        where i.indrelid = pg_catalog.to_regclass($1) and not i.indisvalid \
          and pg_catalog.pg_get_indexdef(i.indexrelid, 1, false) = 'seq' \
          and pg_catalog.pg_get_expr(i.indpred, i.indrelid) = '(seq IS NOT NULL)'";
    let failed = |error| not_the_owner(error, &format!("cannot index {}", table.table));
    let name = table.table.to_string();
    sql.limit_statements(Duration::ZERO).await?;
    for row in sql.query(INVALID, &[&name]).await? {
        sql.batch_execute(row.get(0)).await.map_err(failed)?;
    }
    let statement = script::index(table, !is_partitioned);
    sql.batch_execute(&statement).await.map_err(failed)?;
    sql.limit_statements(STATEMENT_TIMEOUT).await?;
    Ok(())
}

/// Whether the table is small enough to index it before a writer notices: less than 64 MiB.
async fn is_small(sql: &Sql, table: &TableSettings) -> Result<bool> {
    const STATEMENT: &str = "\
        select coalesce(sum(pg_catalog.pg_relation_size(relid)), 0) < 64 << 20 \
        from pg_catalog.pg_partition_tree(pg_catalog.to_regclass($1))";
    let row = sql
        .query_one(STATEMENT, &[&table.table.to_string()])
        .await?;
    Ok(row.get(0))
}

/// Rounds of inspecting and changing the publication; a change may reveal the next problem.
const PUBLICATION_LOOKS: usize = 3;

/// Adds missing tables to the publication, makes it send the generated columns that are needed, and
/// reports its other problems.
pub(super) async fn publication(sql: &Sql, settings: &Settings) -> Result<Vec<Finding>> {
    let tables = settings.captured();
    let name = &settings.publication;
    let mut findings = Vec::new();
    let mut problems = Vec::new();
    for _ in 0..PUBLICATION_LOOKS {
        problems = publication::inspect(sql, name, &tables).await?.problems();
        let mut is_changed = false;
        for problem in &problems {
            let Some((trying, done)) = change(problem) else {
                continue;
            };
            sql.batch_execute(&problem.remedy())
                .await
                .map_err(|e| not_the_owner(e, &trying))?;
            findings.push(finding(Severity::Ok, "publication", done));
            is_changed = true;
        }
        if !is_changed {
            break;
        }
    }
    for problem in problems.iter().filter(|problem| change(problem).is_none()) {
        let (what, remedy) = (problem.to_string(), problem.remedy());
        let code = "publication-drift";
        findings.push(finding_with_remedy(Severity::Error, code, what, remedy));
    }
    if findings.is_empty() {
        let what = format!("publication {name} carries every captured table");
        findings.push(finding(Severity::Ok, "publication", what));
    }
    Ok(findings)
}

/// The texts for failure and success of a problem that `init` corrects itself. It makes only changes
/// that take nothing away from other readers of the publication.
fn change(problem: &Problem) -> Option<(String, String)> {
    match problem {
        Problem::TableNotPublished { publication, table } => Some((
            format!("cannot add {table} to publication {publication}"),
            format!("added {table} to publication {publication}"),
        )),
        Problem::ColumnsNotPublished {
            publication,
            needs_generated: true,
            by_list: false,
            ..
        } => Some((
            format!("cannot make publication {publication} send generated columns"),
            format!("publication {publication} sends stored generated columns"),
        )),
        _ => None,
    }
}

/// Checks that `outbox.events` has the requested payload type.
pub(super) async fn payload_type(sql: &Sql, wanted: Payload) -> Result<Option<Finding>> {
    let row = sql
        .query_opt(
            "select format_type(atttypid, null) from pg_catalog.pg_attribute \
             where attrelid = 'outbox.events'::regclass and attname = 'payload'",
            &[],
        )
        .await?;
    let found: Option<String> = row.map(|row| row.get(0));
    let wanted = match wanted {
        Payload::Jsonb => "jsonb",
        Payload::Bytea => "bytea",
    };
    Ok(found.filter(|found| found != wanted).map(|found| {
        finding_with_remedy(
            Severity::Warning,
            "payload-type",
            format!("outbox.events.payload already has type {found}, not {wanted}"),
            "init sets the type only when it creates the table; alter the column and outbox.emit yourself",
        )
    }))
}

/// The rights of a role that matter to the relay.
struct RoleRights {
    may_log_in: bool,
    may_replicate: bool,
}

async fn role(sql: &Sql, name: &str) -> Result<Option<RoleRights>> {
    let row = sql
        .query_opt(
            "select rolcanlogin, rolreplication or rolsuper or exists ( \
                 select from pg_catalog.pg_roles g where g.rolname = 'rds_replication' \
                 and pg_catalog.pg_has_role(r.oid, g.oid, 'member')) \
             from pg_catalog.pg_roles r where rolname = $1",
            &[&name],
        )
        .await?;
    Ok(row.map(|row| RoleRights {
        may_log_in: row.get(0),
        may_replicate: row.get(1),
    }))
}

/// Refuses a relay user that does not exist, before `init` changes anything.
pub(super) async fn relay_user_exists(sql: &Sql, name: &str) -> Result<()> {
    if role(sql, name).await?.is_some() {
        return Ok(());
    }
    Err(Error::new(
        Code::SettingInvalid,
        format!("--relay-user: there is no role {name}"),
    )
    .hint(format!(
        "create it: create role {} login replication password '...'",
        quoted_identifier(name)
    )))
}

/// Checks that the group roles exist, and reports the rights that the relay's own role still needs.
pub(super) async fn roles(sql: &Sql, relay_user: Option<&str>) -> Result<Vec<Finding>> {
    let mut findings = Vec::new();
    for name in ["postrider_writer", "postrider_relay"] {
        if role(sql, name).await?.is_none() {
            findings.push(finding_with_remedy(
                Severity::Warning,
                "role-missing",
                format!("role {name} is missing, and this role may not create it"),
                format!("as an administrator: create role {name}; then run this again"),
            ));
        }
    }
    if let (Some(name), true) = (relay_user, findings.is_empty()) {
        findings.extend(grant(sql, name).await?);
    }
    Ok(findings)
}

async fn grant(sql: &Sql, name: &str) -> Result<Vec<Finding>> {
    let quoted = quoted_identifier(name);
    let granting = sql
        .batch_execute(&format!("grant postrider_relay to {quoted}"))
        .await;
    if let Err(error) = granting {
        let error = not_the_owner(error, &format!("cannot grant postrider_relay to {name}"));
        return Ok(vec![from_error(&error)]);
    }
    let mut findings = vec![finding(
        Severity::Ok,
        "role",
        format!("role {name} is a member of postrider_relay"),
    )];
    let Some(RoleRights {
        may_log_in,
        may_replicate,
    }) = role(sql, name).await?
    else {
        return Ok(findings);
    };
    if !may_log_in {
        findings.push(finding_with_remedy(
            Severity::Warning,
            "role-without-login",
            format!("role {name} may not log in"),
            format!("alter role {quoted} with login password '...'"),
        ));
    }
    if !may_replicate {
        findings.push(finding_with_remedy(
            Severity::Warning,
            "replication-right-missing",
            format!("role {name} may not replicate, and REPLICATION is never inherited"),
            format!(
                "as a superuser (from PostgreSQL 16 on also a role with CREATEROLE and \
                 REPLICATION): alter role {quoted} with replication; on Amazon RDS: grant \
                 rds_replication to {quoted}"
            ),
        ));
    }
    Ok(findings)
}
