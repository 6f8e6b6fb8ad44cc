//! Checks that a role may delete, before anything is deleted.

use slot_manager::privileges::{self, NeededPrivileges};

use crate::error::{Code, Error, Result};
use crate::postgres::Sql;
use crate::settings::Settings;
use crate::store::days;

/// Who wants to delete.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pruning {
    /// Somebody who runs the command.
    Command { dry_run: bool },
    /// The relay, by the setting `prune_after`.
    Relay,
}

/// The GRANT that our role lacks for adding and dropping days. `None` if the table has no daily partitions.
pub(crate) async fn missing_day_grant(sql: &Sql) -> Result<Option<String>> {
    // This fails if the schema or the functions are missing. Other checks report that.
    if !days::exist(sql).await.unwrap_or(false) {
        return Ok(None);
    }
    let own = privileges::on_functions(sql, &days::FUNCTIONS).await?;
    Ok((!own.are_granted).then(|| {
        format!(
            "GRANT EXECUTE ON FUNCTION {} TO {}",
            days::FUNCTIONS.join(", "),
            slot_manager::quoted_identifier(&own.role)
        )
    }))
}

/// # Errors
/// `privilege-missing`, with the GRANT; `schema-missing` when a table does not exist.
pub(crate) async fn require_rights(sql: &Sql, settings: &Settings, who: Pruning) -> Result<()> {
    let mut tables: Vec<String> = settings
        .tables
        .iter()
        .map(|table| table.table.to_string())
        .collect();
    tables.push("outbox.dispatch".to_owned());
    let (needed, rights) = if who == (Pruning::Command { dry_run: true }) {
        (NeededPrivileges::Select, "SELECT")
    } else {
        (NeededPrivileges::SelectAndDelete, "SELECT, DELETE")
    };
    let own = privileges::on_tables(sql, &tables, needed).await?;
    if own.are_granted {
        return Ok(());
    }
    let role = own.role;
    let tables = tables.join(", ");
    let role_sql = slot_manager::quoted_identifier(&role);
    let mut grant = format!("GRANT {rights} ON {tables} TO {role_sql}");
    if let Some(of_days) = missing_day_grant(sql).await? {
        grant = format!("{grant}; {of_days}");
    }
    let what = format!("role {role} needs {rights} on {tables}; nothing was deleted");
    Err(Error::new(Code::PrivilegeMissing, what).hint(match who {
        Pruning::Command { .. } => format!(
            "run the command as the owner of the tables, or {grant}; GRANT SELECT ON outbox.capture, \
             outbox.relay TO {role_sql}; GRANT USAGE ON SCHEMA outbox TO {role_sql}"
        ),
        Pruning::Relay => format!(
            "as the owner of the tables: {grant}; or run `postrider init --apply` with prune_after set; \
             or set prune_after = off"
        ),
    }))
}
