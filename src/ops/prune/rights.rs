//! Checks that this role may delete, before anything is deleted.

use slot_manager::privileges::{self, NeededPrivileges};

use crate::error::{Code, Error, Result};
use crate::postgres::Sql;
use crate::settings::Settings;

/// # Errors
/// `privilege-missing`, with the GRANT; `schema-missing` when a table does not exist.
pub(super) async fn check(sql: &Sql, settings: &Settings, dry_run: bool) -> Result<()> {
    let mut tables: Vec<String> = settings
        .tables
        .iter()
        .map(|table| table.table.to_string())
        .collect();
    tables.push("outbox.dispatch".to_owned());
    let (needed, rights) = if dry_run {
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
    let what = format!("role {role} needs {rights} on {tables}; nothing was deleted");
    Err(Error::new(Code::PrivilegeMissing, what).hint(format!(
        "run the command as the owner of the tables, not as the role of the relay, which never deletes; \
         or GRANT {rights} ON {tables} TO {role_sql}; GRANT SELECT ON outbox.capture, outbox.relay TO \
         {role_sql}; GRANT USAGE ON SCHEMA outbox TO {role_sql}"
    )))
}
