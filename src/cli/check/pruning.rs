//! Checks that a relay with `prune_after` may delete, and that daily partitions are added ahead.

use slot_manager::{Finding, Severity, table};

use crate::cli::findings::{finding, finding_with_remedy, from_error};
use crate::error::{Code, Result};
use crate::ops::prune::{Pruning, require_rights};
use crate::postgres::Sql;
use crate::settings::Settings;

/// The findings; none if the relay does not prune and the outbox has no daily partitions.
pub(super) async fn check(sql: &Sql, settings: &Settings) -> Result<Vec<Finding>> {
    let mut findings = Vec::new();
    if settings.prune_after.is_some() {
        findings.extend(rights(sql, settings).await);
    }
    findings.extend(partitions(sql).await?);
    Ok(findings)
}

/// Whether the relay may delete. Without the right it still delivers.
async fn rights(sql: &Sql, settings: &Settings) -> Option<Finding> {
    match require_rights(sql, settings, Pruning::Relay).await {
        Ok(()) => {
            let what = "the relay may delete old rows, as prune_after says";
            Some(finding(Severity::Ok, "pruning", what))
        }
        Err(error) if error.code() == Code::PrivilegeMissing => Some(Finding {
            severity: Severity::Warning,
            ..from_error(&error)
        }),
        // Other checks report missing tables.
        Err(_) => None,
    }
}

/// Whether tomorrow has a partition: the one that ends between one and two days from now. `None` if the
/// outbox has no daily partitions.
async fn partitions(sql: &Sql) -> Result<Option<Finding>> {
    let until_today = table::day_partitions(sql, "now() + interval '1 day'").await?;
    let until_tomorrow = table::day_partitions(sql, "now() + interval '2 days'").await?;
    if until_tomorrow.is_empty() {
        return Ok(None);
    }
    if until_tomorrow.len() > until_today.len() {
        let what = "outbox.events has a partition for tomorrow";
        return Ok(Some(finding(Severity::Ok, "partitions-ahead", what)));
    }
    Ok(Some(finding_with_remedy(
        Severity::Warning,
        "partitions-missing",
        "outbox.events has no partition for tomorrow: its rows go to the default partition, where pruning \
         deletes them in steps",
        "set prune_after and run `postrider init --apply`, or run `postrider prune` every day as the owner \
         of the tables",
    )))
}
