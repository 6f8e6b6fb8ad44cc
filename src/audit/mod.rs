//! Finds committed rows that replication missed, and publishes them from their table. Moves each
//! table's floor up to the oldest transaction that may have unresolved rows.
//!
//! The outbox is append-only and records are durable, so an unrecorded row is either in flight or was
//! never streamed. To tell which, the auditor notes the oldest running transaction, and then the end of
//! the WAL. Once the slot has confirmed that position, every streamed row of an older transaction has a
//! record. A row of an older transaction without a record is a gap: the auditor publishes the row, and
//! then moves the table's floor up to the noted transaction (`capture`).
//!
//! Rows go missing when the publication does not contain their table at their position in the WAL.
//! PostgreSQL does not report such rows. But each change of the publication or of a captured table leaves
//! a trace in the catalog, and so does a partition that is attached or detached:
//!
//! - If the publication or a table has changed since the last audit, the auditor compares all rows of the
//!   tables. If a partition with rows was attached, the auditor compares all rows of that table.
//! - Otherwise the auditor compares the rows from the floor on, every few minutes, to find gaps without a
//!   trace.
//!
//! While the publication is wrong no floor moves, so a later audit always covers the gap.
//!
//! When published events may lack a record, there is nothing to compare with. The auditor then raises
//! the floors as long as no trace changes. If the publication or a table has changed, or a partition is
//! attached that holds rows below the floor, the auditor ends the session. The next session begins with
//! a recovery that publishes every row from the floor on.
//!
//! Not here: watching the publication (`session`), a lost slot (`recovery`), and finding the unrecorded
//! rows of a table (`capture`).

mod compare;
mod former;
mod statements;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use decoder::Lsn;
use slot_manager::publication::{self, CapturedTable, PublicationState};
use slot_manager::{SlotName, cluster};
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::task::JoinHandle;

use crate::capture::claim::{self, Captured};
use crate::capture::detached::{self, DetachedTable};
use crate::capture::from_table::TableSender;
use crate::capture::tops::{self, Tops};
use crate::capture::{Bounds, ScanWindow, scan};
use crate::error::{Code, Error, Result};
use crate::mapping::TableSettings;
use crate::metrics::Metrics;
use crate::postgres::{Sql, Target, connect_patiently, current_snapshot};
use crate::recovery::loss::Loss;
use crate::store::relay_row::RecordKeeping;
use crate::store::relay_row::audits::{self, AuditHistory};

/// Time between two audits when every event has a record.
const INTERVAL: Duration = Duration::from_secs(300);
/// Time between two audits when published events may lack a record. A recovery then repeats everything
/// since the last audit. Also the time between audits after a comparison of whole tables until older
/// transactions have ended, the pause before a retry, and the pause while the publication is wrong.
const SOON: Duration = Duration::from_secs(10);
/// Poll interval while the slot has not confirmed the awaited position. Also the pause after a
/// comparison of whole tables.
const AT_ONCE: Duration = Duration::from_secs(1);

const STATEMENT_TIMEOUT: Duration = Duration::from_secs(600);

/// What to audit.
#[derive(Debug)]
pub(crate) struct AuditSubject {
    pub(crate) target: Target,
    pub(crate) slot: SlotName,
    pub(crate) publication: String,
    pub(crate) captured: Vec<CapturedTable>,
    pub(crate) tables: Arc<[TableSettings]>,
    pub(crate) project: Arc<str>,
    /// The bounds of each table, shared with the pipeline. The auditor raises the floors here.
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
    /// Compare whole tables, even if the publication is unchanged, because the slot may have left events
    /// out.
    pub(crate) everything: bool,
    /// Reports that the running recovery is over. The first audit waits for this; `None` without a
    /// recovery.
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

/// Starts the auditor. `hasten` wakes the auditor at once. The auditor sends the rows that it finds to
/// `events`. The returned receiver gets an error if the session has to end, and closes if the task has
/// died.
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
            // The recovery failed, and the session ends with its error.
            return std::future::pending().await;
        }
        let mut audit = AuditState {
            everything: start.everything,
            subject,
            events,
            waiting: None,
            tops: None,
            delivered: None,
            goal: None,
            floor: 0,
            horizon: None,
            began_before: None,
            detached_before: BTreeMap::new(),
            broken,
        };
        let mut sql = None;
        loop {
            let pause = match audit.round(&mut sql).await {
                Ok(pause) => pause,
                Err(error) => {
                    tracing::warn!(
                        code = %error.code(), hint = error.hint_text(),
                        "cannot compare the tables with outbox.dispatch, retrying in {SOON:?}: {error}"
                    );
                    sql = None;
                    SOON
                }
            };
            tokio::select! {
                () = hasten.notified() => {}
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
    /// The position that the slot must confirm before the next comparison.
    waiting: Option<AuditWait>,
    tops: Option<Tops>,
    /// Number of delivered events when the last audit began.
    delivered: Option<u64>,
    /// Target floor: a transaction id above every delivered event's transaction. `None` once the recorded
    /// floor has reached the target.
    goal: Option<u64>,
    /// The floor that this session has last recorded.
    floor: u64,
    /// The next transaction id at the time of the last comparison of whole tables. Until all transactions
    /// below this id have ended, audits follow each other quickly ([`SOON`]). `None` after that.
    horizon: Option<u64>,
    /// The next transaction id when the first audit of this session began. Events that earlier sessions
    /// delivered belong to older transactions.
    began_before: Option<u64>,
    /// By OID of a former partition: the next transaction id when this session first found the partition
    /// detached. All its rows belong to older transactions.
    detached_before: BTreeMap<u32, u64>,
    broken: mpsc::Sender<Error>,
}

/// What an audit waits for.
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
    scan::prepare(&sql).await?;
    Ok(sql)
}

/// Whether a partition was attached that has rows below the floor of its table, or rows that were written
/// before it was attached.
async fn any_overlooked(
    sql: &Sql,
    tables: &[TableSettings],
    captured: &[Captured],
    records: RecordKeeping,
) -> Result<bool> {
    for (table, captured) in tables.iter().zip(captured) {
        let window = ScanWindow::unresolved(captured, records);
        if statements::has_overlooked(sql, table, &window).await? {
            return Ok(true);
        }
    }
    Ok(false)
}

impl AuditState {
    /// Makes one step of an audit. Returns the time until the next step.
    async fn round(&mut self, sql: &mut Option<Sql>) -> Result<Duration> {
        let sql = match sql {
            Some(sql) => sql,
            None => sql.insert(open(&self.subject.target).await?),
        };
        let waiting = match self.waiting {
            Some(waiting) => waiting,
            None => {
                let waiting = self.begin(sql).await?;
                *self.waiting.insert(waiting)
            }
        };
        let (earlier, reached, state) = self.survey(sql, waiting.end).await?;
        if !state.problems().is_empty() {
            // The supervisor reports the problem, and wakes the auditor when the problem is solved.
            return Ok(SOON);
        }
        let fingerprint = state.fingerprint();
        let is_as_it_was = earlier.publication.as_deref() == Some(fingerprint);
        let records = earlier.records;
        if records.may_lack_records() && !is_as_it_was {
            return self.end_session(sql).await;
        }
        if !reached {
            return Ok(AT_ONCE);
        }
        let (captured, detached) = self.tables(sql).await?;
        if records.may_lack_records()
            && (former::any_became_readable(&captured, &detached)
                || any_overlooked(sql, &self.subject.tables, &captured, records).await?)
        {
            return self.end_session(sql).await;
        }
        let has_partitions = captured
            .iter()
            .any(|captured| !captured.new_partitions().is_empty());
        let is_whole = !is_as_it_was || self.everything;
        let former = self
            .former(sql, &captured, &detached, waiting, !is_whole)
            .await?;
        let is_higher = self.goal.is_some() && waiting.xmin > self.floor;
        let mut writes = is_higher || !earlier.had_one || has_partitions || former.any_change();
        if !records.may_lack_records() {
            writes |= is_whole;
            writes |= self
                .compare(sql, &captured, &detached, waiting, is_whole)
                .await?;
        }
        // An idle relay writes nothing.
        if writes {
            self.resolved(sql, &captured, &former, waiting, fingerprint, &earlier)
                .await?;
            self.floor = waiting.xmin;
            self.goal = self.goal.filter(|goal| waiting.xmin < *goal);
        }
        self.waiting = None;
        self.everything = false;
        if is_whole {
            // Rows of a gap may belong to transactions that are still running.
            let now = current_snapshot(&**sql).await?;
            self.horizon = Some(now.xmax());
            return Ok(AT_ONCE);
        }
        self.horizon = self.horizon.filter(|horizon| waiting.xmin < *horizon);
        let is_soon = self.horizon.is_some() || former.any_waits;
        Ok(if records.may_lack_records() || is_soon {
            SOON
        } else {
            INTERVAL
        })
    }

    /// Reads the captured tables and their former partitions.
    async fn tables(&self, sql: &Sql) -> Result<(Vec<Captured>, Vec<DetachedTable>)> {
        let AuditSubject { slot, tables, .. } = &self.subject;
        // Columns may be added while a relay runs.
        claim::refresh(sql, tables).await?;
        let captured = claim::known(sql, slot, tables).await?;
        let detached = detached::find(sql, tables, &captured).await?;
        Ok((captured, detached))
    }

    /// Reads the results of earlier audits, whether the slot has confirmed `end`, and the state of the
    /// publication.
    async fn survey(&self, sql: &Sql, end: Lsn) -> Result<(AuditHistory, bool, PublicationState)> {
        let AuditSubject {
            slot,
            publication,
            captured,
            records,
            walsender,
            ..
        } = &self.subject;
        let earlier = audits::earlier(sql, slot, *records).await?;
        // Read the publication after the slot's position, so that the publication's state is the newer of
        // the two.
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

    async fn end_session(&self, sql: &Sql) -> Result<Duration> {
        let AuditSubject { slot, instance, .. } = &self.subject;
        audits::mark_broken(sql, slot, instance, Loss::PublicationChanged.name()).await?;
        let what = "the publication or a captured table was altered or recreated: publishing all \
                    rows without a known outcome from the tables";
        // If the session has ended already, nobody receives this.
        let _ = self.broken.try_send(Error::new(Code::PublicationGap, what));
        Ok(SOON)
    }
}
