//! Applies the migrations, each in its own transaction. Also adds missing columns and daily partitions, adds
//! missing tables to the publication, and grants the relay's role its rights.
//!
//! Concurrent runs wait for each other: every transaction takes the same advisory lock before it
//! reads which migrations are applied.

mod columns;
mod days;

use slot_manager::privileges::{self, RoleRights};
use slot_manager::publication::{self, Problem};
use slot_manager::{Finding, Severity, activity, quoted_identifier, table};
use tokio_postgres::error::SqlState;

use super::script::{self, Migration, NewTable, Payload};
use crate::cli::findings::{finding, finding_with_remedy, from_error};
use crate::error::{Code, Error, Result};
use crate::postgres::Sql;
use crate::settings::Settings;

pub(super) use columns::columns;
pub(super) use days::days;

/// Key of the advisory lock: "postride" in ASCII.
const LOCK: i64 = 0x706f_7374_7269_6465;

/// How long a migration waits for a lock, including the lock of another `init`. It is shorter than the
/// statement timeout, so that the error can name the session that holds the lock.
const LOCK_TIMEOUT_S: u32 = 20;

/// Version of the first migration whose statements contain the names of the captured tables. `init` checks that
/// the user's own tables exist before it applies this migration.
const FIRST_WITH_TABLES: i32 = 3;

/// Applies the migrations that are not applied yet, and those that every run repeats.
pub(super) async fn migrations(
    sql: &mut Sql,
    settings: &Settings,
    new_table: NewTable,
) -> Result<Vec<Finding>> {
    let mut findings = Vec::new();
    for migration in script::migrations(settings, new_table) {
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

/// Returns the error for an advisory lock that was not free. Any role can take this lock, so the error names the
/// session that holds it.
async fn locked_by(sql: &Sql, error: tokio_postgres::Error) -> Error {
    if error.code() != Some(&SqlState::LOCK_NOT_AVAILABLE) {
        return error.into();
    }
    let holder = activity::advisory_lock_holder(sql, LOCK)
        .await
        .ok()
        .flatten();
    let holder = holder.map_or_else(|| "another session".to_owned(), |one| one.to_string());
    let what = format!("the lock of `postrider init` is held by {holder}");
    Error::new(Code::PostgresTimeout, what)
        .caused_by(error)
        .hint(
            "if that is another `init`, wait for it and run this again; otherwise end that session \
         with pg_terminate_backend",
        )
}

/// Returns the error for a failed statement of `init`. If PostgreSQL gives a hint, as the guard does, keeps this hint.
/// Otherwise, if a privilege is missing, the hint is to run `init` as the owner, not as the relay's role.
fn not_the_owner(error: tokio_postgres::Error, what: &str) -> Error {
    let said = error.as_db_error().and_then(|error| error.hint());
    let said = said.map(str::to_owned);
    let inner = Error::from(error);
    let failed = Error::new(inner.code(), what).caused_by(inner);
    match (failed.code(), said) {
        (_, Some(said)) => failed.hint(said),
        (Code::PrivilegeMissing, None) => failed.hint(
            "run it as the owner of the database and of the tables, such as \
             DATABASE_URL=postgres://postgres@HOST/DATABASE, not as the relay's role",
        ),
        _ => failed,
    }
}

async fn tables_exist(sql: &Sql, settings: &Settings) -> Result<()> {
    for settings in &settings.tables {
        let name = settings.table.to_string();
        if !table::exists(sql, &name).await? {
            return Err(
                Error::new(Code::SchemaMissing, format!("table {name} does not exist"))
                    .hint("create it and run this again, or correct the setting that names it"),
            );
        }
    }
    Ok(())
}

/// Maximum number of times that `init` inspects and changes the publication. More than one, because a change may
/// reveal the next problem.
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
    let others = problems.iter().filter(|problem| change(problem).is_none());
    findings.extend(others.map(drift));
    if findings.is_empty() {
        let what = format!("publication {name} contains every captured table");
        findings.push(finding(Severity::Ok, "publication", what));
    }
    Ok(findings)
}

/// Reports a problem of the publication that `init` does not correct.
fn drift(problem: &Problem) -> Finding {
    let (what, remedy) = (problem.to_string(), problem.remedy());
    finding_with_remedy(Severity::Error, "publication-drift", what, remedy)
}

/// Returns two texts for a problem that `init` corrects: one if the correction fails, one if it succeeds. `None`
/// for a problem that `init` leaves to the operator, because the correction could affect other readers of the
/// publication.
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
    let found = table::type_of_column(sql, "outbox.events", "payload").await?;
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

/// Refuses a relay user that does not exist, before `init` changes anything.
pub(super) async fn relay_user_exists(sql: &Sql, name: &str) -> Result<()> {
    if privileges::of_role(sql, name).await?.is_some() {
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

/// Checks that the group roles exist, and grants `postrider_relay` to the relay's own role. Reports the
/// rights that this role still needs.
pub(super) async fn roles(sql: &Sql, relay_user: Option<&str>) -> Result<Vec<Finding>> {
    let mut findings = Vec::new();
    for name in ["postrider_writer", "postrider_relay"] {
        if privileges::of_role(sql, name).await?.is_none() {
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
    let inherit = privileges::inherit_statement(sql, name, "postrider_relay").await?;
    let member = format!("role {name} is a member of postrider_relay");
    let mut findings = vec![match inherit {
        None => finding(Severity::Ok, "role", member),
        Some(statement) => finding_with_remedy(
            Severity::Warning,
            "role-without-inherit",
            format!("{member}, but does not inherit its rights"),
            statement,
        ),
    }];
    let Some(RoleRights {
        may_log_in,
        may_replicate,
    }) = privileges::of_role(sql, name).await?
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
            "replication-right",
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
