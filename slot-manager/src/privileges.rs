//! What roles may do.

use tokio_postgres::types::Type;
use tokio_postgres::{Client, Row};

use crate::slot::get;
use crate::sql::table as sql;
use crate::{SlotError, query};

/// Our role, and whether it has the privileges that a command needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OwnPrivileges {
    /// Our role.
    pub role: String,
    /// Whether the role has all needed privileges.
    pub are_granted: bool,
}

/// Which privileges are needed on a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NeededPrivileges {
    /// SELECT.
    Select,
    /// SELECT and DELETE.
    SelectAndDelete,
}

/// Returns our role, and whether it has the needed privileges on all `tables`. The names are quoted
/// as in SQL.
///
/// # Errors
/// [`SlotError::Database`], also when a table does not exist.
pub async fn on_tables(
    client: &Client,
    tables: &[String],
    needed: NeededPrivileges,
) -> Result<OwnPrivileges, SlotError> {
    let action = "reading the role's grants";
    let is_select_enough = needed == NeededPrivileges::Select;
    let parameters = [
        (&tables as _, Type::TEXT_ARRAY),
        (&is_select_enough as _, Type::BOOL),
    ];
    let row = query::single(client, action, sql::HAS_PRIVILEGES, &parameters).await?;
    Ok(OwnPrivileges {
        role: get(&row, "role")?,
        are_granted: get(&row, "are_granted")?,
    })
}

/// Returns our role, and whether it may call all `functions`, such as `outbox.add_day(date)`. Those that do
/// not exist are left out.
///
/// # Errors
/// [`SlotError::Database`], also when the role may not use the schema of a function.
pub async fn on_functions(client: &Client, functions: &[&str]) -> Result<OwnPrivileges, SlotError> {
    let action = "reading the role's grants";
    let parameters = [(&functions as _, Type::TEXT_ARRAY)];
    let row = query::single(client, action, sql::MAY_EXECUTE, &parameters).await?;
    Ok(OwnPrivileges {
        role: get(&row, "role")?,
        are_granted: get(&row, "are_granted")?,
    })
}

/// The rights of a role that matter to a relay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RoleRights {
    /// Whether the role may log in.
    pub may_log_in: bool,
    /// Whether the role may use replication slots.
    pub may_replicate: bool,
}

/// The rights of a role; `None` when there is no such role.
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
