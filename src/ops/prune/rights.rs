//! Checks that our role has the rights to delete, before anything is deleted.

use slot_manager::privileges;

use crate::error::{Code, Error, Result};
use crate::postgres::Sql;
use crate::settings::Settings;
use crate::store::days;
use crate::store::privileges::{Purpose, missing_grants};

/// The party that wants to delete.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pruning {
    /// An operator, with `postrider prune`.
    Command { dry_run: bool },
    /// The relay, because of the setting `prune_after`.
    Relay,
}

/// Returns the GRANT that our role lacks for adding and dropping days. `None` if it lacks none, or if
/// `outbox.events` is not partitioned by `occurred_at`.
pub(crate) async fn missing_day_grant(sql: &Sql) -> Result<Option<String>> {
    // An error means that the schema or the functions are missing, which other checks report.
    if !days::exist(sql).await.unwrap_or(false) {
        return Ok(None);
    }
    Ok(privileges::missing_execute(sql, &days::FUNCTIONS).await?)
}

/// Checks that our role may read the tables and, unless this is a dry run, delete their rows.
///
/// # Errors
/// `privilege-missing`, with the GRANT; database errors.
pub(crate) async fn require_rights(sql: &Sql, settings: &Settings, who: Pruning) -> Result<()> {
    let purpose = if who == (Pruning::Command { dry_run: true }) {
        Purpose::Read
    } else {
        Purpose::Prune
    };
    let mut grants = missing_grants(sql, &settings.tables, purpose).await?;
    if grants.is_empty() {
        return Ok(());
    }
    grants.extend(missing_day_grant(sql).await?);
    let grants = grants.join("; ");
    let role = &sql.target().user;
    let what = format!("role {role} needs more rights; nothing was deleted");
    Err(Error::new(Code::PrivilegeMissing, what).hint(match who {
        Pruning::Command { .. } => format!(
            "run the command as the owner of the tables, or, as the owner, run: {grants}"
        ),
        Pruning::Relay => format!(
            "as the owner of the tables, run: {grants}; or run `postrider init --apply` with prune_after \
             set; or set prune_after = off"
        ),
    }))
}
