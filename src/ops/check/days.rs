//! Checks that somebody adds the daily partitions of `outbox.events`.

use slot_manager::{Finding, Severity};

use crate::ops::finding::{finding, finding_with_remedy};
use crate::postgres::Sql;
use crate::settings::Settings;
use crate::store::days;

/// More missing days than this, of the next eight, are a problem: each of several runs has failed.
const MISSING_MAX: usize = 3;

/// Nothing for a table without daily partitions, and where the functions of migration 19 are missing.
pub(super) async fn check(sql: &Sql, settings: &Settings) -> Option<Finding> {
    let mut tables = settings.tables.iter();
    tables.find(|table| table.table.to_string() == days::TABLE)?;
    if !days::exist(sql).await.ok()? {
        return None;
    }
    let missing = days::missing(sql).await.ok()?;
    let table = days::TABLE;
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
