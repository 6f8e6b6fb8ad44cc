//! Finds out what roles may do.

use tokio_postgres::types::Type;
use tokio_postgres::{Client, Row};

use crate::query::TypedParameter;
use crate::shown_name::shown;
use crate::slot::get;
use crate::sql::table as sql;
use crate::{QualifiedName, SlotError, query, quoted_identifier};

/// The privileges that our role needs on a table.
#[derive(Debug, Clone)]
pub struct TableNeed {
    /// The table.
    pub table: QualifiedName,
    /// Names of privileges, such as `SELECT`.
    pub privileges: &'static [&'static str],
}

/// Returns the statements that give our role the needed privileges that it lacks: grants, and, for
/// tables whose row-level security applies to the role, `ALTER ROLE ... BYPASSRLS`. Ignores tables
/// that do not exist.
///
/// # Errors
/// [`SlotError::Database`].
pub async fn missing_grants(
    client: &Client,
    needs: &[TableNeed],
) -> Result<Vec<String>, SlotError> {
    let action = "reading the role's grants";
    let needed: Vec<(&QualifiedName, &str)> = needs
        .iter()
        .flat_map(|need| {
            need.privileges
                .iter()
                .map(|privilege| (&need.table, *privilege))
        })
        .collect();
    let schemas: Vec<&str> = needed
        .iter()
        .map(|(table, _)| table.schema.as_str())
        .collect();
    let names: Vec<&str> = needed
        .iter()
        .map(|(table, _)| table.name.as_str())
        .collect();
    let privileges: Vec<&str> = needed.iter().map(|(_, privilege)| *privilege).collect();
    let parameters: [TypedParameter<'_>; 3] = [
        (&schemas, Type::TEXT_ARRAY),
        (&names, Type::TEXT_ARRAY),
        (&privileges, Type::TEXT_ARRAY),
    ];
    let rows = query::all(client, action, sql::MISSING_PRIVILEGES, &parameters).await?;
    let mut statements = Vec::new();
    let mut lacking: Vec<(&QualifiedName, Vec<&str>)> = Vec::new();
    let mut role = String::new();
    for ((table, privilege), row) in needed.into_iter().zip(&rows) {
        role = quoted_identifier(&shown(row, "role")?.unwrap_or_default());
        if get(row, "lacks_schema")? {
            let schema = quoted_identifier(&table.schema);
            add_once(
                &mut statements,
                format!("GRANT USAGE ON SCHEMA {schema} TO {role}"),
            );
        }
        if get(row, "hides_rows")? {
            add_once(&mut statements, format!("ALTER ROLE {role} BYPASSRLS"));
        }
        if get(row, "lacks_privilege")? {
            match lacking.iter_mut().find(|(lacked, _)| *lacked == table) {
                Some((_, privileges)) => privileges.push(privilege),
                None => lacking.push((table, vec![privilege])),
            }
        }
    }
    // Write one statement for all tables that lack the same privileges.
    while let Some((_, privileges)) = lacking.first().cloned() {
        let (same, others): (Vec<_>, Vec<_>) = lacking
            .into_iter()
            .partition(|(_, lacked)| *lacked == privileges);
        let tables: Vec<String> = same.iter().map(|(table, _)| table.to_string()).collect();
        let (privileges, tables) = (privileges.join(", "), tables.join(", "));
        statements.push(format!("GRANT {privileges} ON {tables} TO {role}"));
        lacking = others;
    }
    Ok(statements)
}

fn add_once(statements: &mut Vec<String>, statement: String) {
    if !statements.contains(&statement) {
        statements.push(statement);
    }
}

/// Returns the GRANT for those of the `functions`, such as `outbox.add_day(date)`, that our role may not call;
/// `None` if it may call all of them. Functions that do not exist are ignored.
///
/// # Errors
/// [`SlotError::Database`], also when the role has no right to use the schema of a function.
pub async fn missing_execute(
    client: &Client,
    functions: &[&str],
) -> Result<Option<String>, SlotError> {
    let action = "reading the role's grants";
    let parameters = [(&functions as _, Type::TEXT_ARRAY)];
    let rows = query::all(client, action, sql::MISSING_EXECUTE, &parameters).await?;
    let Some(first) = rows.first() else {
        return Ok(None);
    };
    let role = quoted_identifier(&shown(first, "role")?.unwrap_or_default());
    let names = rows.iter().map(|row| get(row, "name"));
    let names: Vec<&str> = names.collect::<Result<_, _>>()?;
    let names = names.join(", ");
    Ok(Some(format!("GRANT EXECUTE ON FUNCTION {names} TO {role}")))
}

/// The privileges of a role that matter to a relay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RoleRights {
    /// Whether the role may log in.
    pub may_log_in: bool,
    /// Whether the role may use replication slots.
    pub may_replicate: bool,
}

/// Reads the privileges of a role; `None` if there is no such role.
///
/// # Errors
/// [`SlotError::Database`].
pub async fn of_role(client: &Client, role: &str) -> Result<Option<RoleRights>, SlotError> {
    let action = "reading a role's attributes";
    let parameters = [(&role as _, Type::TEXT)];
    let row = query::first(client, action, sql::ROLE_RIGHTS, &parameters).await?;
    let rights = |row: Row| {
        Ok(RoleRights {
            may_log_in: get(&row, "may_log_in")?,
            may_replicate: get(&row, "may_replicate")?,
        })
    };
    row.map(rights).transpose()
}

/// Returns the statement that makes the role `member` inherit the rights of the role `group`; `None` if `member` is no
/// member of `group`, or has the rights already.
///
/// # Errors
/// [`SlotError::Database`].
pub async fn inherit_statement(
    client: &Client,
    member: &str,
    group: &str,
) -> Result<Option<String>, SlotError> {
    let action = "reading a role's memberships";
    let parameters = [(&member as _, Type::TEXT), (&group as _, Type::TEXT)];
    let row = query::first(client, action, sql::NOT_INHERITED, &parameters).await?;
    let Some(row) = row else {
        return Ok(None);
    };
    let (member, group) = (quoted_identifier(member), quoted_identifier(group));
    Ok(Some(if get(&row, "by_membership")? {
        format!("grant {group} to {member} with inherit true")
    } else {
        format!("alter role {member} inherit")
    }))
}
