//! Decides which rows of an outbox table may be deleted, and walks them chunk by chunk along the index
//! on `seq`. `ops::walk` contains the statement that deletes them.

use super::distance::PruneDistance;
use super::proof::PruneProof;
use super::{FailedAttempts, KeptRows, OnPruneStep, PruneContext, PruneStep, PrunedTable};
use crate::capture::claim::Captured;
use crate::capture::table::TableReader;
use crate::error::Result;
use crate::mapping::TableSettings;
use crate::ops::walk::{TableWalk, WalkAction, WalkedPage};
use crate::store::dispatch::pruning::{self, GO};

/// Deletes all rows that may be deleted, or counts them. Returns false if `on_step` stopped the run.
pub(super) async fn prune(
    context: &PruneContext<'_>,
    table: &TableSettings,
    captured: &Captured,
    pruned: &mut PrunedTable,
    on_step: &mut OnPruneStep<'_>,
) -> Result<bool> {
    let (sql, request) = (context.sql, context.request);
    // Only topic names contain the project, and pruning uses no topics, so any project will do.
    let project = context.settings.project().unwrap_or("none");
    let reader = TableReader::resolve(sql, table, project, captured).await?;
    let action = if request.is_dry_run() {
        WalkAction::Read
    } else {
        WalkAction::Delete
    };
    let verdict = verdict_sql(context, captured);
    let mut walk = TableWalk::new(captured, &reader, request.chunk, verdict, action);
    let distance = PruneDistance::find(context, captured, &reader).await;
    let mut examined = 0;
    loop {
        let mut failed = FailedAttempts::default();
        let page = loop {
            match walk.next(sql).await {
                Ok(page) => break page,
                Err(error) => failed.again(error).await?,
            }
        };
        let Some(page) = page else {
            return Ok(true);
        };
        examined += page.rows;
        let is_young = is_young(&page);
        let deleted = page.deleted;
        pruned.add(page);
        let step = PruneStep {
            what: &pruned.table,
            examined,
            deleted: pruned.rows,
            share: distance.as_ref().map(|way| way.share(walk.last_seq())),
        };
        if !on_step(&step) {
            return Ok(false);
        }
        // Rows are read in the order of their insertion, so all later rows are young too.
        if is_young && !walk.is_by_blocks() {
            walk.end_numbered();
        }
        if deleted > 0 {
            tokio::time::sleep(request.pause).await;
        }
    }
}

/// Whether the walk has reached the rows that are younger than the retention. One young record does not prove
/// this: an old row has a young record if it waited long for its topic.
fn is_young(page: &WalkedPage) -> bool {
    page.count(GO) == 0 && page.count("young") * 2 > page.rows
}

/// Returns an SQL expression for the verdict on a row.
pub(super) fn verdict_sql(context: &PruneContext<'_>, captured: &Captured) -> String {
    let record = &captured.record;
    let cutoff = context.cutoff.sql();
    let floor = record.floor;
    // Rows of transactions below `without_record` might have been published without a record. The relay may
    // still publish a row again if its event is at or above the confirmed position, or if its transaction is
    // at or above the floor.
    let (without_record, is_unconfirmed, is_above_floor) = match &context.proof {
        PruneProof::Slot {
            confirmed, repeats, ..
        } => (
            if *repeats {
                floor
            } else {
                record.recorded_from
            },
            format!("r.commit_lsn >= '{confirmed}'::pg_lsn"),
            format!("r.xid >= '{floor}'::xid8"),
        ),
        PruneProof::RecordsOnly { .. } => (0, "false".to_owned(), "false".to_owned()),
    };
    format!(
        "case when r.records = 0 and r.at >= {cutoff} then 'young' \
             when r.records = 0 and r.is_ours and r.xid < '{without_record}'::xid8 \
                 and not r.is_uncompared and r.id is not null \
                 then case when r.at is null then 'without_time' else '{GO}' end \
             when r.records = 0 and not r.is_ours then 'not_captured' \
             when r.records = 0 then 'waiting' \
             when r.state in ('quarantined', 'released') then 'quarantined' \
             when r.dispatched_at >= {cutoff} then 'young' \
             when {is_unconfirmed} then 'unconfirmed' \
             when {is_above_floor} then 'above_floor' \
             else '{GO}' end"
    )
}

/// Returns the SQL condition that a real run keeps the outbox row `e`, by the rules of [`verdict_sql`]. `w` is the
/// record of the row.
///
/// The condition is valid only if the record is older than the retention, and its event is published or discarded.
/// Pruning keeps all other records, whether their outbox rows stay or not.
pub(super) fn stays_sql(context: &PruneContext<'_>, captured: &Captured) -> String {
    let PruneProof::Slot { confirmed, .. } = &context.proof else {
        return "false".to_owned();
    };
    let record = &captured.record;
    format!(
        "({xid} >= '{floor}'::xid8 or {other})",
        xid = captured.inserted_xid_sql(),
        floor = record.floor,
        other = pruning::other_record_stays_sql(*confirmed, context.cutoff.sql()),
    )
}

/// Returns the earlier of two times, which are in RFC 3339.
pub(super) fn earlier(a: Option<String>, b: Option<String>) -> Option<String> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

impl PrunedTable {
    /// Counts the rows of a page.
    pub(super) fn add(&mut self, page: WalkedPage) {
        for group in page.groups {
            let KeptRows {
                quarantined,
                waiting,
                unconfirmed,
                above_floor,
                not_captured,
                without_time,
            } = &mut self.kept;
            let count = match group.verdict.as_str() {
                GO => {
                    self.oldest = earlier(self.oldest.take(), group.oldest);
                    &mut self.rows
                }
                "quarantined" => quarantined,
                "unconfirmed" => unconfirmed,
                "above_floor" => above_floor,
                "not_captured" => not_captured,
                "without_time" => without_time,
                "waiting" => waiting,
                _ => continue,
            };
            *count += group.rows;
        }
    }
}
