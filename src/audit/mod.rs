//! Finds committed rows that the stream has left out (a gap), and publishes them from their table. After that, raises
//! each table's floor to the oldest transaction that may have unresolved rows.
//!
//! **Comparison.** The outbox is append-only and records are durable. So a committed row without a record belongs to
//! one of three kinds: its event is in memory, or the pipeline has not read the row yet, or the stream has left the row
//! out. To find the rows of the third kind, an audit has these steps:
//!
//! 1. Note the oldest running transaction, and then the end of the WAL. All transactions older than the noted
//!    transaction have ended, so their rows come before the noted end.
//! 2. Wait until the pipeline has read the stream up to the noted end.
//! 3. Ask the pipeline for a list of the unresolved events in memory (`delivery::census`).
//! 4. Publish each row of an older transaction that has no record and whose event is not in the list.
//!
//! The auditor need not wait until the events in the list are resolved. So an event that waits, for example because its
//! topic is missing, delays no comparison.
//!
//! **Floors.** The auditor raises the floors to the noted transaction once the slot has confirmed the noted end of the
//! WAL, and every row that the auditor has sent has its outcome. Until then, the auditor keeps looking for new gaps.
//!
//! **Traces.** The stream leaves a row out if the publication does not contain the row's table at the row's position in
//! the WAL. PostgreSQL does not report such rows. But each change of the publication or of a captured table leaves a
//! trace in the catalogue, and so does attaching or detaching a partition:
//!
//! - If the publication or a table has changed since the last audit, the auditor compares all rows of the
//!   tables. If a partition with rows was attached, the auditor compares all rows of that table.
//! - Otherwise the auditor compares only the rows from the floor on, every few minutes, to find gaps that
//!   have left no trace.
//!
//! While the publication is wrong, the auditor raises no floor, so a later audit compares all rows of the gap. A
//! transaction that was open during this time may commit more rows of the gap later, with any `seq`. So after the
//! auditor has found a trace, it compares the tables at once, and again when these transactions have ended. Only then
//! does it raise the floors (`gap`).
//!
//! If a configured name belongs to another table than when the session began, the auditor ends the session, so that
//! the next session claims the tables under their present names.
//!
//! When published events may lack a record, the auditor cannot compare rows with records. It raises the
//! floors as long as it finds no new trace. It also ends the session in these cases:
//!
//! - The publication or a table has changed.
//! - A partition with older rows was attached.
//! - The relay can now read a former partition that it could not read before.
//!
//! The next session begins with a recovery, which publishes every row from the floor on and keeps the slot if
//! possible.
//!
//! Not here: watching the publication (`session`), a lost slot (`recovery`), and finding the unrecorded
//! rows of a table (`capture`).

mod compare;
mod conclusion;
mod ending;
mod failing;
mod former;
mod gap;
mod statements;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use decoder::Lsn;
use slot_manager::publication::{self, CapturedTable, PublicationState};
use slot_manager::{SlotName, cluster};
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::task::JoinHandle;

use crate::capture::claim::{self, Captured};
use crate::capture::detached::{self, DetachedTable};
use crate::capture::from_table::TableSender;
use crate::capture::tops::{self, Tops};
use crate::capture::{Bounds, scan};
use crate::error::{Error, Result};
use crate::event::EventPosition;
use crate::mapping::TableSettings;
use crate::metrics::Metrics;
use crate::postgres::{Sql, Target, connect_patiently, current_snapshot};
use crate::store::relay_row::RecordKeeping;
use crate::store::relay_row::audits::{self, AuditHistory};
use crate::throttled_log::ThrottledLog;
use conclusion::ComparedTables;
use failing::FailingAudits;
use gap::PossibleGap;

/// Time between two audits when every event has a record. It is long, because these audits only look for the rare
/// gaps that have left no trace in the catalogue.
const INTERVAL: Duration = Duration::from_secs(300);
/// Time between two audits when published events may lack a record. It is short, because a recovery without
/// complete records publishes again all events since the last audit. The auditor also pauses this long before a
/// retry, while the publication is wrong, and while it waits for older transactions to end.
const SOON: Duration = Duration::from_secs(10);
/// Time between two checks whether the pipeline has read, or the slot has confirmed, the awaited position. Also the
/// pause after an audit has found a new trace of a gap.
const AT_ONCE: Duration = Duration::from_secs(1);
/// How often a waiting audit looks for new partitions, and notes them in the capture record. If somebody detaches a
/// partition before it is noted, the relay does not look for its rows, for example after a lost slot.
const NOTE_INTERVAL: Duration = Duration::from_secs(5);

const STATEMENT_TIMEOUT: Duration = Duration::from_secs(600);

/// The slot and the tables to audit, and what the auditor needs to publish missing rows.
#[derive(Debug)]
pub(crate) struct AuditSubject {
    pub(crate) target: Target,
    pub(crate) slot: SlotName,
    pub(crate) publication: String,
    pub(crate) captured: Vec<CapturedTable>,
    pub(crate) tables: Arc<[TableSettings]>,
    /// The OIDs that `tables` had when the session claimed them, in the same order.
    pub(crate) claimed: Vec<u32>,
    pub(crate) project: Arc<str>,
    /// The bounds of each table, shared with the pipeline. The auditor raises the floors in these bounds.
    pub(crate) bounds: Arc<[Bounds]>,
    /// Which events get a record in this session.
    pub(crate) records: RecordKeeping,
    pub(crate) instance: String,
    /// The walsender's pid.
    pub(crate) walsender: i32,
    pub(crate) metrics: Metrics,
}

/// How the first audit of a session begins.
#[derive(Debug)]
pub(crate) struct FirstAudit {
    /// Whether to compare whole tables although the publication is unchanged. Set if the slot may have left
    /// events out.
    pub(crate) everything: bool,
    /// Gets a message when the running recovery is over, so that the first audit can begin. `None` if no recovery
    /// runs.
    pub(crate) after: Option<oneshot::Receiver<()>>,
}

/// The running task. Dropping this value ends the task.
#[derive(Debug)]
pub(crate) struct Auditor(JoinHandle<()>);

impl Drop for Auditor {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Starts the auditor. A notification of `hasten` makes it drop an audit that waits, and begin another one as soon as
/// the present step has ended. It sends the missing rows to `events`. The returned receiver gets an error if the
/// session has to end, and closes if the task has died.
pub(crate) fn start(
    subject: AuditSubject,
    start: FirstAudit,
    hasten: Arc<Notify>,
    events: TableSender,
) -> (Auditor, mpsc::Receiver<Error>) {
    let (broken, told) = mpsc::channel(1);
    let auditor = Auditor(tokio::spawn(async move {
        if let Some(after) = start.after
            && after.await.is_err()
        {
            // The recovery has failed and ends the session with its error. Until then, the auditor does nothing.
            return std::future::pending().await;
        }
        let mut audit = AuditState {
            everything: start.everything,
            subject,
            events,
            waiting: None,
            compared: None,
            took: Duration::ZERO,
            settling: None,
            next: EventPosition::default(),
            tops: None,
            delivered: None,
            goal: None,
            floor: 0,
            gap: None,
            noted_at: None,
            compared_to: 0,
            began_before: None,
            detached_before: BTreeMap::new(),
            // Assume a trace of a gap until the first audit has compared the publication with the recorded one.
            has_trace: true,
            failing: None,
            log: ThrottledLog::default(),
            broken,
        };
        let mut sql = None;
        loop {
            let pause = match audit.round(&mut sql).await {
                Ok(pause) => {
                    audit.continues();
                    pause
                }
                Err(error) => {
                    audit.failed(error).await;
                    sql = None;
                    SOON
                }
            };
            tokio::select! {
                // The publication or a table has changed, so rows may be missing.
                () = hasten.notified() => audit.starts_over(),
                () = tokio::time::sleep(pause) => {}
            }
        }
    }));
    (auditor, told)
}

struct AuditState {
    subject: AuditSubject,
    events: TableSender,
    everything: bool,
    /// The position up to which the pipeline must read the stream before the present audit can compare the tables.
    /// `None` between two audits.
    waiting: Option<AuditWait>,
    /// What the present audit has found, if it has compared the tables and cannot raise the floors yet.
    compared: Option<ComparedTables>,
    /// Duration of the latest comparison.
    took: Duration,
    /// Gets a message when every row that the auditor has sent is resolved. `None` if this has happened, or if the
    /// auditor has sent no row.
    settling: Option<oneshot::Receiver<()>>,
    /// The position for the next event from a table.
    next: EventPosition,
    tops: Option<Tops>,
    /// Number of delivered events when the last audit began.
    delivered: Option<u64>,
    /// The floor to reach: a transaction id above the transaction of every delivered event. `None` once the
    /// recorded floor has reached this goal, so that an idle relay writes nothing.
    goal: Option<u64>,
    /// The last floor that this session has recorded.
    floor: u64,
    /// A gap that may exist, because the auditor has found a trace of it in the catalogue. `None` without a trace.
    gap: Option<PossibleGap>,
    /// When the auditor last looked for new partitions.
    noted_at: Option<Instant>,
    /// This session has compared all rows of transactions below this id.
    compared_to: u64,
    /// The next transaction id when the first audit of this session began. Every event that an earlier
    /// session delivered belongs to an older transaction.
    began_before: Option<u64>,
    /// For each former partition, by its OID: the next transaction id when this session first found the
    /// partition detached. All rows of the partition belong to older transactions.
    detached_before: BTreeMap<u32, u64>,
    /// Whether the stream may have left out rows, for example because the publication or a table has changed.
    has_trace: bool,
    /// The audits that have failed since the last success. `None` if there are none.
    failing: Option<FailingAudits>,
    log: ThrottledLog,
    broken: mpsc::Sender<Error>,
}

/// The position and transaction to which an audit refers.
#[derive(Debug, Clone, Copy)]
struct AuditWait {
    /// The oldest transaction that was running when the audit began, or the next transaction id if none
    /// was running. All older transactions had ended.
    xmin: u64,
    /// The end of the WAL, read after `xmin`. Every transaction older than `xmin` ended before this
    /// position.
    end: Lsn,
}

async fn open(target: &Target) -> Result<Sql> {
    let sql = connect_patiently(target, "postrider auditor", STATEMENT_TIMEOUT).await?;
    sql.commit_locally().await?;
    scan::prepare(&sql).await?;
    Ok(sql)
}

impl AuditState {
    /// Performs one step of an audit. Returns the time until the next step.
    async fn round(&mut self, sql: &mut Option<Sql>) -> Result<Duration> {
        let sql = match sql {
            Some(sql) => sql,
            None => sql.insert(open(&self.subject.target).await?),
        };
        let waiting = match self.waiting {
            Some(waiting) => waiting,
            None => self.begin(sql).await?,
        };
        self.waiting = Some(waiting);
        let (earlier, reached, state) = self.survey(sql, waiting.end).await?;
        if !state.problems().is_empty() {
            // The publication is wrong. The supervisor reports the problem, and wakes the auditor when it is solved.
            self.starts_over();
            return Ok(SOON);
        }
        let fingerprint = state.fingerprint();
        let is_as_it_was = earlier.publication.as_deref() == Some(fingerprint);
        self.has_trace = !is_as_it_was || self.everything;
        let records = earlier.records;
        if !is_as_it_was && self.ends_after_change(sql, records).await? {
            return Ok(SOON);
        }
        let compared = self.compared.take();
        if let Some(compared) = compared.filter(|compared| compared.is_of(fingerprint)) {
            return self.conclude(sql, waiting, compared, reached).await;
        }
        self.shows_gap(&earlier, fingerprint);
        if self.noted_at.is_none_or(|at| at.elapsed() >= NOTE_INTERVAL) {
            claim::note_partitions(sql, &self.subject.slot, &self.subject.tables).await?;
            self.noted_at = Some(Instant::now());
        }
        let Some(in_memory) = self.in_memory(records, waiting.end, reached).await? else {
            return Ok(AT_ONCE);
        };
        let (captured, detached) = self.tables(sql).await?;
        if self
            .needs_recovery(sql, &captured, &detached, records)
            .await?
        {
            return self.end_session(sql).await;
        }
        let change = self.has_trace.then_some(fingerprint);
        let noted = self.notes_gap(sql, change, &captured, records, waiting);
        if noted.await? {
            self.waiting = None;
            return Ok(AT_ONCE);
        }
        let former = self
            .former(sql, &captured, &detached, waiting, !self.has_trace)
            .await?;
        let mut partitions = captured.iter().map(Captured::new_partitions);
        let mut writes = !earlier.had_one || partitions.any(|new| !new.is_empty());
        if !records.may_lack_records() {
            writes |= self.gap.is_some();
            writes |= self
                .compare(sql, &captured, &detached, waiting, in_memory)
                .await?;
        }
        let compared = ComparedTables {
            captured,
            former,
            earlier,
            publication: fingerprint.to_owned(),
            writes,
            at: Instant::now(),
        };
        self.succeeded();
        self.conclude(sql, waiting, compared, reached).await
    }

    /// Begins the present audit again, because the stream may have left out more rows.
    fn starts_over(&mut self) {
        (self.has_trace, self.gap) = (true, None);
        (self.waiting, self.compared) = (None, None);
    }

    /// Reads the captured tables and their former partitions.
    async fn tables(&self, sql: &Sql) -> Result<(Vec<Captured>, Vec<DetachedTable>)> {
        let AuditSubject { slot, tables, .. } = &self.subject;
        // Columns may be added while a relay runs, so first bring the capture records up to date.
        claim::refresh(sql, slot, tables).await?;
        let captured = claim::known(sql, slot, tables).await?;
        let detached = detached::find(sql, tables, &captured).await?;
        Ok((captured, detached))
    }

    /// Reads the results of earlier audits, whether the slot has confirmed `end`, and the state of the
    /// publication.
    async fn survey(
        &self,
        sql: &Sql,
        end: Lsn,
    ) -> Result<(AuditHistory, Option<bool>, PublicationState)> {
        let AuditSubject {
            slot,
            publication,
            captured,
            records,
            walsender,
            ..
        } = &self.subject;
        let earlier = audits::earlier(sql, slot, *records).await?;
        // Read the publication after the slot's position. The audit then notices every change that was made
        // before the slot confirmed `end`.
        let reached = statements::is_confirmed(sql, slot, *walsender, end).await?;
        let state = publication::inspect(sql, publication, captured).await?;
        Ok((earlier, reached, state))
    }

    /// Begins an audit: notes the oldest running transaction, and after that the end of the WAL.
    async fn begin(&mut self, sql: &Sql) -> Result<AuditWait> {
        if self.tops.is_none() {
            let found = claim::find_tables(sql, &self.subject.tables).await?;
            self.tops = Some(tops::tops(sql, &found).await?);
        }
        let delivered = self.subject.metrics.delivered();
        let has_new = self.delivered.replace(delivered) != Some(delivered);
        let now = current_snapshot(&**sql).await?;
        if has_new {
            self.goal = Some(now.xmax());
        }
        self.began_before.get_or_insert(now.xmax());
        Ok(AuditWait {
            xmin: now.xmin(),
            end: cluster::wal_end(sql).await?,
        })
    }
}
