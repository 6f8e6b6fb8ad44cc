//! Checks that this role may delete, before anything is deleted.

use crate::error::{Code, Error, Result};
use crate::postgres::Sql;
use crate::settings::Settings;

const MAY: &str = "\
    select current_user::text, coalesce(bool_and( \
        pg_catalog.has_table_privilege(name::regclass, 'select') \
        and ($2 or pg_catalog.has_table_privilege(name::regclass, 'delete'))), true) \
    from pg_catalog.unnest($1::text[]) name";

/// # Errors
/// `privilege-missing`, with the GRANT; `schema-missing` when a table does not exist.
pub(super) async fn check(sql: &Sql, settings: &Settings, dry_run: bool) -> Result<()> {
    let mut tables: Vec<String> = settings
        .tables
        .iter()
        .map(|table| table.table.to_string())
        .collect();
    tables.push("outbox.dispatch".to_owned());
    let row = sql.query_one(MAY, &[&tables, &dry_run]).await?;
    let (role, may): (String, bool) = (row.get(0), row.get(1));
    if may {
        return Ok(());
    }
    let rights = if dry_run { "SELECT" } else { "SELECT, DELETE" };
    let tables = tables.join(", ");
    let role_sql = slot_manager::quoted_identifier(&role);
    let what = format!("role {role} needs {rights} on {tables}; nothing was deleted");
    Err(Error::new(Code::PrivilegeMissing, what).hint(format!(
        "run the command as the owner of the tables, not as the role of the relay, which never deletes; \
         or GRANT {rights} ON {tables} TO {role_sql}; GRANT SELECT ON outbox.capture, outbox.relay TO \
         {role_sql}; GRANT USAGE ON SCHEMA outbox TO {role_sql}"
    )))
}
