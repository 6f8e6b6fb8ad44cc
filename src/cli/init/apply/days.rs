//! Adds the daily partitions of today and the next days. If the command line asks for daily partitions but
//! the existing table has none, reports this.

use std::time::Duration;

use slot_manager::{Finding, Severity};

use crate::cli::findings::{finding, finding_with_remedy};
use crate::cli::init::script::Partition;
use crate::error::Result;
use crate::ops::prune::{AddedDays, add_ahead};
use crate::postgres::Sql;
use crate::store::days;

/// Maximum number of attempts to add days. An attempt fails if another session, such as another `init`, holds a
/// lock.
const ATTEMPTS: u32 = 3;
/// Pause between two attempts.
const PAUSE: Duration = Duration::from_secs(1);

/// Adds the missing days to `outbox.events`, if it has daily partitions. `wanted` is the partitioning that the
/// command line asks for.
pub(in crate::cli::init) async fn days(
    sql: &Sql,
    wanted: Option<Partition>,
) -> Result<Vec<Finding>> {
    if !days::exist(sql).await? {
        return Ok(wanted.map(|_| not_partitioned()).into_iter().collect());
    }
    let AddedDays {
        mut added,
        mut notes,
    } = add_ahead(sql).await?;
    for _ in 1..ATTEMPTS {
        if notes.is_empty() {
            break;
        }
        tokio::time::sleep(PAUSE).await;
        let again = add_ahead(sql).await?;
        added.extend(again.added);
        notes = again.notes;
    }
    let mut findings = Vec::new();
    if let (Some(first), Some(last)) = (added.first(), added.last()) {
        let what = format!("outbox.events has new daily partitions: {first} to {last}");
        findings.push(finding(Severity::Ok, "days", what));
    }
    findings.extend(notes.into_iter().map(|note| {
        let remedy = "events of a day without a partition go into the default partition, and are delivered; \
                      run this again later";
        finding_with_remedy(Severity::Warning, "day-missing", note, remedy)
    }));
    Ok(findings)
}

fn not_partitioned() -> Finding {
    finding_with_remedy(
        Severity::Warning,
        "not-partitioned",
        "outbox.events already exists, and is not partitioned by occurred_at",
        "init partitions the table only when it creates it; docs/how-to/operations.md, Daily partitions, shows \
         how to replace the table",
    )
}
