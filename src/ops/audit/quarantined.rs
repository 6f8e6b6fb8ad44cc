//! Finds the events in quarantine whose rows are in no table that the audit has compared.
//!
//! The audit compares rows with records. So an event in quarantine would stay unseen if its row is in a former table
//! that the audit no longer reads, such as a partition that was detached long ago, or if its row was deleted. So the
//! audit also counts the records. If there are more records in quarantine than rows, this module looks the rows up
//! in the settled tables (`capture::detached`).

use decoder::Lsn;
use serde::Serialize;

use super::{TableAudit, UnreadableTable};
use crate::capture::claim::Captured;
use crate::capture::detached::{self, DetachedRows};
use crate::capture::table::TableReader;
use crate::error::Result;
use crate::ops::prune::records::exists_sql;
use crate::ops::since::SinceTime;
use crate::postgres::Sql;
use crate::settings::Settings;
use crate::store::dispatch::quarantine_commands::count_unpublished;

/// The events in quarantine whose rows are in no table that the audit has compared.
#[derive(Debug, Default, Serialize)]
pub(crate) struct QuarantinedElsewhere {
    /// The settled tables that have such rows.
    pub(crate) former_tables: Vec<FormerTableAudit>,
    /// The events in quarantine whose row was found nowhere. 0 with `--since`.
    pub(crate) without_row: u64,
}

/// A settled table, and the number of events in quarantine whose rows are in it.
#[derive(Debug, Serialize)]
pub(crate) struct FormerTableAudit {
    pub(crate) table: String,
    pub(crate) quarantined: u64,
}

impl QuarantinedElsewhere {
    pub(super) fn is_any(&self) -> bool {
        self.without_row > 0 || !self.former_tables.is_empty()
    }
}

/// Counts the events in quarantine; if `since` is given, only those that were committed since then.
///
/// # Errors
/// Database errors.
pub(super) async fn count(sql: &Sql, since: Option<&SinceTime>) -> Result<u64> {
    count_unpublished(sql, &recent(since)).await
}

/// An SQL condition: the record `w` was committed since `since`.
fn recent(since: Option<&SinceTime>) -> String {
    since.map_or_else(
        || "true".to_owned(),
        |since| format!("w.committed_at >= {}", since.sql()),
    )
}

/// Counts the events in quarantine that `tables` do not contain. Adds settled tables that cannot be searched for these
/// events to `unreadable`. `before` is the result of [`count`] from before the tables were compared. The lower of the two
/// counts is used, so that events that enter or leave quarantine meanwhile are not reported as events without a row.
///
/// # Errors
/// Database errors.
pub(super) async fn find(
    sql: &Sql,
    settings: &Settings,
    captured: &[Captured],
    since: Option<&SinceTime>,
    (tables, before): (&[TableAudit], u64),
    unreadable: &mut Vec<UnreadableTable>,
) -> Result<QuarantinedElsewhere> {
    let all = recent(since);
    let compared = tables
        .iter()
        .map(|table| table.quarantined.events + table.released.events);
    let total = count(sql, since).await?.min(before);
    let mut found = QuarantinedElsewhere {
        without_row: total.saturating_sub(compared.sum()),
        ..QuarantinedElsewhere::default()
    };
    if found.without_row == 0 {
        return Ok(found);
    }
    let mut skipped = Vec::new();
    for table in detached::find_settled(sql, &settings.tables, captured).await? {
        skipped.extend(table.unreadable().map(UnreadableTable::new));
        if found.without_row == 0 {
            break;
        }
        let Some((rows, settled)) = table.rows().zip(table.settled) else {
            continue;
        };
        let name = rows.settings.table.to_string();
        match in_table(sql, settings, rows, settled, &all).await {
            Ok(Ok(0)) => {}
            Ok(Ok(events)) => {
                found.without_row = found.without_row.saturating_sub(events);
                found.former_tables.push(FormerTableAudit {
                    table: name,
                    quarantined: events,
                });
            }
            Ok(Err(remedy)) => skipped.push(UnreadableTable {
                table: name,
                why: "an index is missing".to_owned(),
                remedy,
            }),
            // The command must not fail because of a table that is no longer captured, for example because somebody
            // archives the table and holds a lock on it.
            Err(error) => skipped.push(UnreadableTable {
                table: name,
                why: error.to_string(),
                remedy: "run the audit again".to_owned(),
            }),
        }
    }
    // With `--since`, tables are compared by `occurred_at`, but records are counted by the time of the commit. The
    // difference of the two counts means nothing.
    if since.is_some() {
        found.without_row = 0;
    } else {
        unreadable.append(&mut skipped);
    }
    Ok(found)
}

/// Counts the events in quarantine whose rows are in this table. The inner error says what to do so that the rows can
/// be looked up.
async fn in_table(
    sql: &Sql,
    settings: &Settings,
    rows: &DetachedRows,
    settled: Lsn,
    all: &str,
) -> Result<Result<u64, String>> {
    let captured = &rows.captured;
    let project = settings.project().unwrap_or("none");
    let reader = TableReader::resolve(sql, &rows.settings, project, captured).await?;
    let is_its_row = format!("{} = w.event_id", reader.event_id_sql());
    let exists = match exists_sql(sql, captured, &reader, &is_its_row).await? {
        Ok(exists) => exists,
        Err(remedy) => return Ok(Err(remedy)),
    };
    let condition = format!("{all} and w.commit_lsn < '{settled}'::pg_lsn and {exists}");
    Ok(Ok(count_unpublished(sql, &condition).await?))
}
