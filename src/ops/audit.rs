//! Compares the captured tables with outbox.dispatch, and changes nothing.
//!
//! A row without a record *waits* if the slot may still stream it, and is *missing* if the slot has
//! passed it. The slot has passed a row in two cases:
//!
//! - Its transaction is below the floor of its table. The relay raises the floor above a row only after it
//!   has resolved the row or compared it with the records.
//! - Its transaction had ended when the audit began, and the slot has confirmed the position at which
//!   the WAL ended at that moment. The relay confirms a position only after all records up to it are
//!   durable (guarantee G4). This case does not apply while a recovery is due or running, because the
//!   recovery publishes older rows from the tables.
//!
//! If published events may lack a record (`dispatch = exceptions`), the audit cannot tell a missing row
//! from a published one. It then counts a row without a record as published once the slot has passed
//! it.
//!
//! An event in quarantine may have no row in the compared tables. `quarantined` counts such events, so that the audit
//! never says that every event has an outcome while an event is in quarantine.
//!
//! The relay's auditor (`crate::audit`) makes the same comparison for rows above the floor, and publishes
//! the missing rows.

mod quarantined;

use std::time::Duration;

use serde::Serialize;
use slot_manager::{QualifiedName, cluster};

use super::progress;
use super::walk::{self, NAMED, TableWalk, WalkAction, WalkedPage};
use crate::capture::claim::{self, Captured};
use crate::capture::detached::{self, DetachedTable};
use crate::capture::table::{TableReader, altered_since};
use crate::error::Result;
use crate::ops::since::Since;
use crate::postgres::{Sql, current_snapshot, require_primary};
use crate::recovery::foreign_records::ForeignRecords;
use crate::settings::Settings;
use crate::store::relay_row::{self, RecordKeeping};
pub(crate) use quarantined::{FormerTableAudit, QuarantinedElsewhere};

const PAGE_ROWS: u32 = 5_000;

/// The longest time that the audit waits for the slot to pass the rows that existed when the audit began. If
/// the slot does not pass them in this time, a row without a record counts as waiting, unless its transaction
/// is below the floor.
const WAIT: Duration = Duration::from_secs(10);

/// The result of an audit. Programs depend on its JSON form.
#[derive(Debug, Serialize)]
pub(crate) struct AuditReport {
    pub(crate) result: AuditResult,
    /// The relay's record keeping: `full` or `exceptions`.
    #[serde(rename = "dispatch")]
    pub(crate) records: RecordKeeping,
    /// Whether the slot has confirmed all rows that existed when the audit began, and no recovery is due or
    /// running.
    pub(crate) slot_has_passed: bool,
    pub(crate) tables: Vec<TableAudit>,
    /// Events in quarantine whose rows are in none of the `tables`.
    pub(crate) quarantined_elsewhere: QuarantinedElsewhere,
    /// Former tables that the audit cannot read, and whose rows might not have an outcome.
    pub(crate) unreadable: Vec<UnreadableTable>,
}

/// A former table that the audit cannot read.
#[derive(Debug, Serialize)]
pub(crate) struct UnreadableTable {
    pub(crate) table: String,
    pub(crate) why: String,
    /// What the operator has to do.
    pub(crate) remedy: String,
}

/// The result of the audit, ordered from best to worst.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum AuditResult {
    /// Every event has a final outcome.
    Complete,
    /// Events wait, are in quarantine, or might be in a table that cannot be read.
    Waiting,
    /// The slot has passed rows that have no record.
    Missing,
}

/// The number of rows in one table, and the number of rows in each state.
#[derive(Debug, Default, Serialize)]
pub(crate) struct TableAudit {
    pub(crate) table: String,
    pub(crate) rows: u64,
    pub(crate) published: EventCount,
    /// Events without a record that the slot has passed. They may have been published without a record, so
    /// they count as published.
    pub(crate) published_without_record: EventCount,
    pub(crate) discarded: EventCount,
    pub(crate) quarantined: EventCount,
    /// Events that an operator has released, from quarantine or for a replay, and that are not published yet.
    pub(crate) released: EventCount,
    pub(crate) waiting: EventCount,
    pub(crate) missing: EventCount,
    /// Rows that were committed before the capture of the table began. They are never published.
    pub(crate) not_captured: EventCount,
    /// Rows without an id. The relay quarantines them under their commit LSN and ordinal.
    pub(crate) without_id: EventCount,
    /// Events that the relay has sent again after a request without a definite answer. Pub/Sub may have
    /// stored these events more than once. Replays and requests that Pub/Sub refused do not count.
    pub(crate) sent_again: u64,
    pub(crate) first_ids_sent_again: Vec<String>,
    /// Events with `published` records under more than one commit LSN. Pub/Sub has stored these events more
    /// than once.
    pub(crate) recorded_twice: u64,
    pub(crate) first_ids_recorded_twice: Vec<String>,
}

/// A number of events, and the names of the first few.
#[derive(Debug, Default, Serialize)]
pub(crate) struct EventCount {
    pub(crate) events: u64,
    pub(crate) first_ids: Vec<String>,
    /// Time of the oldest event, RFC 3339.
    pub(crate) oldest: Option<String>,
}

/// The progress of the slot, as far as the audit knows it.
#[derive(Debug, Clone, Copy)]
struct Passed {
    /// Every transaction below this number has ended, and the slot has passed its rows. 0 if the audit cannot
    /// prove this for any transaction.
    below_xid: u64,
    records: RecordKeeping,
}

/// Compares all captured tables. After each page, calls `progress` with the name of the table and the number of
/// rows of this table that were compared so far.
///
/// # Errors
/// `foreign-cluster` if the records come from a later state of the server, because their floors then prove nothing;
/// `publication-drift` if a table is missing; `column-missing`; database errors.
pub(crate) async fn run(
    sql: &Sql,
    settings: &Settings,
    since: Option<&Since>,
    mut progress: impl FnMut(&str, u64),
) -> Result<AuditReport> {
    require_primary(sql).await?;
    refuse_later_records(sql, settings).await?;
    walk::prepare(sql).await?;
    let since = match since {
        Some(since) => Some(since.resolve(sql).await?),
        None => None,
    };
    let passed = wait_for_slot(sql, settings).await?;
    let captured =
        claim::as_if_claimed(sql, &settings.slot, &settings.tables, settings.start).await?;
    let detached = detached::find(sql, &settings.tables, &captured).await?;
    let former = detached.iter().filter_map(DetachedTable::rows);
    let former = former.map(|rows| (&rows.settings, &rows.captured, rows.not_of_another_sql()));
    let current = settings.tables.iter().zip(&captured);
    let current = current.map(|(table, captured)| (table, captured, None));
    let in_quarantine = quarantined::count(sql, since.as_ref()).await?;
    let mut tables = Vec::new();
    for (table, captured, only) in current.chain(former) {
        // Only topic names contain the project, and the audit uses no topics, so any project will do.
        let project = settings.project().unwrap_or("none");
        let reader = TableReader::resolve(sql, table, project, captured).await?;
        let mut walk = TableWalk::new(
            captured,
            &reader,
            PAGE_ROWS,
            verdict_sql(captured, passed),
            WalkAction::Read,
        );
        only.iter().for_each(|only| walk.restrict_to(only));
        if let Some(since) = &since
            && let Some(seq) = since.first_seq(sql, captured, &reader).await?
        {
            walk.skip_to_seq(seq);
        }
        let mut audit = TableAudit {
            table: table.table.to_string(),
            ..TableAudit::default()
        };
        while let Some(page) = walk.next(sql).await.map_err(altered_since)? {
            audit.add(page);
            progress(&audit.table, audit.rows);
        }
        tables.push(audit);
    }
    let unreadable = detached.iter().filter_map(DetachedTable::unreadable);
    let mut unreadable: Vec<_> = unreadable.map(UnreadableTable::new).collect();
    let (since, skipped) = (since.as_ref(), &mut unreadable);
    let compared = (tables.as_slice(), in_quarantine);
    let elsewhere = quarantined::find(sql, settings, &captured, since, compared, skipped).await?;
    let mut results: Vec<_> = tables.iter().map(TableAudit::result).collect();
    if elsewhere.is_any() || !unreadable.is_empty() {
        results.push(AuditResult::Waiting);
    }
    Ok(AuditReport {
        result: results.into_iter().max().unwrap_or(AuditResult::Complete),
        records: passed.records,
        slot_has_passed: passed.below_xid > 0,
        tables,
        quarantined_elsewhere: elsewhere,
        unreadable,
    })
}

/// Refuses records of a later state of the server. The audit of a copy is allowed: the records of a copy belong to
/// its rows.
async fn refuse_later_records(sql: &Sql, settings: &Settings) -> Result<()> {
    let slot = &settings.slot;
    let cluster = cluster::inspect(sql).await?;
    let earlier = relay_row::read(sql, slot).await?;
    match ForeignRecords::find(sql, slot, earlier.as_ref(), &cluster).await? {
        Some(later @ ForeignRecords::Later(_)) => Err(later.error(slot)),
        Some(ForeignRecords::Copy { .. }) | None => Ok(()),
    }
}

impl UnreadableTable {
    fn new((table, why, remedy): (&QualifiedName, &str, &str)) -> Self {
        Self {
            table: table.to_string(),
            why: why.to_owned(),
            remedy: remedy.to_owned(),
        }
    }
}

/// Waits up to [`WAIT`] until the slot has passed the current end of the WAL.
async fn wait_for_slot(sql: &Sql, settings: &Settings) -> Result<Passed> {
    // All transactions below this number have ended, so their commits lie before the end of the WAL
    // that we read next.
    let ended = current_snapshot(&**sql).await?.xmin();
    let end = cluster::wal_end(sql).await?;
    let (_, has_passed) = progress::wait_until_confirmed(sql, &settings.slot, end, WAIT).await?;
    let earlier = relay_row::read(sql, &settings.slot).await?;
    let is_recovering = earlier
        .as_ref()
        .is_some_and(|earlier| earlier.recovering.is_some());
    Ok(Passed {
        below_xid: if has_passed && !is_recovering {
            ended
        } else {
            0
        },
        records: RecordKeeping::of(settings.dispatch, earlier.as_ref()),
    })
}

/// Returns an SQL expression for the verdict on a row, which is the name of a field of [`TableAudit`].
fn verdict_sql(captured: &Captured, passed: Passed) -> String {
    let record = &captured.record;
    let below = passed.below_xid.max(record.floor);
    // The verdict on a row without a record depends on the id of its transaction. The first case that applies decides:
    // 1. Below `without_record`: published. Rows of these transactions may have been published without a record.
    // 2. Below `missing` or below the floor: missing. The slot has passed the row, so the row should have a record.
    // 3. Otherwise: waiting.
    // Some tables and partitions have not been compared by the relay yet (`is_uncompared`). About their rows,
    // `without_record` and the floor prove nothing, so only `missing` counts.
    let (without_record, missing) = if passed.records.may_lack_records() {
        (below, 0)
    } else {
        (record.recorded_from, passed.below_xid)
    };
    format!(
        "case when r.id is null then 'without_id' \
             when r.records > 0 then r.state \
             when not r.is_ours then 'not_captured' \
             when r.xid < '{without_record}'::xid8 and not r.is_uncompared \
                 then 'published_without_record' \
             when r.xid < '{missing}'::xid8 or r.xid < '{}'::xid8 and not r.is_uncompared then 'missing' \
             else 'waiting' end",
        record.floor,
    )
}

/// Adds names until there are [`NAMED`] of them.
fn add_names(names: &mut Vec<String>, more: Vec<String>) {
    let room = NAMED.saturating_sub(names.len());
    names.extend(more.into_iter().take(room));
}

impl TableAudit {
    fn add(&mut self, page: WalkedPage) {
        self.rows += page.rows;
        for group in page.groups {
            self.sent_again += group.sent_again.events;
            add_names(&mut self.first_ids_sent_again, group.sent_again.names);
            self.recorded_twice += group.recorded_twice.events;
            add_names(
                &mut self.first_ids_recorded_twice,
                group.recorded_twice.names,
            );
            let count = match group.verdict.as_str() {
                "published" => &mut self.published,
                "published_without_record" => &mut self.published_without_record,
                "discarded" => &mut self.discarded,
                "quarantined" => &mut self.quarantined,
                "released" => &mut self.released,
                "missing" => &mut self.missing,
                "not_captured" => &mut self.not_captured,
                "without_id" => &mut self.without_id,
                _ => &mut self.waiting,
            };
            count.events += group.rows;
            add_names(&mut count.first_ids, group.names);
            count.oldest = match (count.oldest.take(), group.oldest) {
                (Some(a), Some(b)) => Some(a.min(b)),
                (a, b) => a.or(b),
            };
        }
    }

    fn result(&self) -> AuditResult {
        let waits = [&self.waiting, &self.quarantined, &self.released];
        if self.missing.events > 0 {
            AuditResult::Missing
        } else if waits.iter().any(|count| count.events > 0) {
            AuditResult::Waiting
        } else {
            AuditResult::Complete
        }
    }
}
