//! Checks that the daily partitions of `outbox.events` are added in time, and that a relay that prunes
//! has the right to add and drop them.

use slot_manager::{Finding, Severity};

use crate::error::Code;
use crate::ops::finding::{finding, finding_with_remedy};
use crate::ops::prune::missing_day_grant;
use crate::postgres::Sql;
use crate::settings::Settings;
use crate::store::days;

/// Of the partitions of today and the next seven days, this many may be missing without a warning. If more are
/// missing, nothing has added partitions for several days.
const MISSING_MAX: usize = 3;

/// Checks the daily partitions. Returns `None` if `outbox.events` is not captured or has no daily partitions,
/// or if a statement fails, for example because the functions of migration 19 do not exist.
pub(super) async fn check(sql: &Sql, settings: &Settings) -> Option<Finding> {
    let mut tables = settings.tables.iter();
    tables.find(|table| table.table.to_string() == days::TABLE)?;
    if !days::exist(sql).await.ok()? {
        return None;
    }
    let table = days::TABLE;
    if settings.prune_after.is_some()
        && let Some(grant) = missing_day_grant(sql).await.ok()?
    {
        return Some(finding_with_remedy(
            Severity::Warning,
            Code::PrivilegeMissing.name(),
            format!("the relay may not add or drop the daily partitions of {table}"),
            format!(
                "as the owner of the table: {grant}; or run `postrider init --apply` with prune_after set"
            ),
        ));
    }
    let missing = days::missing(sql).await.ok()?;
    Some(match missing.first() {
        Some(first) if missing.len() > MISSING_MAX => finding_with_remedy(
            Severity::Warning,
            "day-missing",
            format!(
                "{table} has no daily partition for {first}, and for later days: their events go into the default partition"
            ),
            "set prune_after, or run `postrider prune` or `postrider init --apply` every day; each of them adds \
             the next days",
        ),
        _ => {
            let what = format!("{table} has daily partitions for the next days");
            finding(Severity::Ok, "days", what)
        }
    })
}
