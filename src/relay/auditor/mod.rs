//! Finds committed rows that replication missed, and publishes them from their table. Moves each
//! table's floor up to where every row is resolved.
//!
//! The outbox is append-only and records are durable, so a row without a record is either in flight
//! or was never streamed. To tell which, the auditor notes the oldest running transaction, and then
//! the end of the WAL. Once the slot has confirmed that position, every streamed row of an older
//! transaction has its record. If such a row has none, it is a gap: the auditor publishes it, and
//! then moves the table's floor up to the noted transaction (`capture`).
//!
//! Rows go missing when the publication does not contain their table at their position in the WAL.
//! PostgreSQL does not report that. But each change of the publication or of a captured table leaves
//! a trace in the catalog, and so does a partition that is attached or detached:
//!
//! - If the trace has changed since the last audit, the auditor compares the whole table.
//! - Otherwise it compares the rows from the floor on, every few minutes, to find gaps without a
//!   trace.
//!
//! While the publication is wrong no floor moves, so a later audit always covers the gap.
//!
//! With `dispatch = exceptions` there is nothing to compare with, because published events have no
//! record. The floor then moves as long as the trace is unchanged. When it changes, or a partition is
//! attached that holds rows below the floor, the auditor ends the session. The next session begins
//! with a recovery that publishes every row from the floor on.
//!
//! Not here: watching the publication (`supervisor`), and a lost slot (`recovery`).

mod statements;

use std::sync::Arc;
use std::time::Duration;

use decoder::Lsn;
use slot_manager::SlotName;
use slot_manager::publication::{self, CapturedTable};
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::task::JoinHandle;

use super::from_table::{self, Interrupted, Places, SessionEnded, TableSender};
use super::recovery::blocked::Firsts;
use super::recovery::loss::Loss;
use super::recovery::unrecorded::Unrecorded;
use crate::capture::claim::{self, Captured};
use crate::capture::record::{self as captures, Resolved, current_snapshot};
use crate::capture::shape::{self, Tops};
use crate::capture::{Bounds, ScanWindow, scan};
use crate::error::{Code, Error, Result};
use crate::map::TableSettings;
use crate::metrics::Metrics;
use crate::postgres::{PatientSql, Sql, Target};
use crate::settings::Dispatch;
use crate::table::TableReader;

/// Time between two audits when every event has a record.
const INTERVAL: Duration = Duration::from_secs(300);
/// Time between two audits with `dispatch = exceptions`, where a recovery repeats everything since the last
/// audit. Also used after a comparison of whole tables until older transactions have ended, and as the
/// pause before a retry.
const SOON: Duration = Duration::from_secs(10);
/// Time between two looks at the slot while it has not confirmed the awaited position.
const AT_ONCE: Duration = Duration::from_secs(1);

const STATEMENT_TIMEOUT: Duration = Duration::from_secs(600);

/// What to audit.
#[derive(Debug)]
pub(super) struct AuditSubject {
    pub(super) target: Target,
    pub(super) slot: SlotName,
    pub(super) publication: String,
    pub(super) captured: Vec<CapturedTable>,
    pub(super) tables: Arc<[TableSettings]>,
    pub(super) project: Arc<str>,
    /// What the pipeline knows about each table; the auditor raises the floors here.
    pub(super) bounds: Arc<[Bounds]>,
    /// Which events get a record in this session.
    pub(super) dispatch: Dispatch,
    pub(super) instance: String,
    /// The walsender's pid.
    pub(super) walsender: i32,
    pub(super) metrics: Metrics,
}

/// How the first audit of a session begins.
#[derive(Debug)]
pub(super) struct FirstAudit {
    /// Compare everything, even if the publication is unchanged: the slot may have left events out.
    pub(super) everything: bool,
    /// Wait for this first: a recovery is publishing from the tables.
    pub(super) after: Option<oneshot::Receiver<()>>,
}

/// The running task; ends when dropped.
#[derive(Debug)]
pub(super) struct Auditor(JoinHandle<()>);

impl Drop for Auditor {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Starts the auditor. `hasten` wakes it at once, and it sends the rows that it finds to `events`.
/// The receiver gets an error if the session has to end; it closes if the task has died.
pub(super) fn start(
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

/// What the relay's row says about earlier audits.
#[derive(Debug)]
struct AuditHistory {
    had_one: bool,
    publication: Option<String>,
    /// Whether events may have been delivered without a record.
    repeats: bool,
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
    /// Delivered events belong to transactions before this one. `None` when the floor covers all of
    /// them.
    goal: Option<u64>,
    /// The floor that this session has last recorded.
    floor: u64,
    /// After a comparison of whole tables: the next transaction id at that time. Until all
    /// transactions before it have ended, audits follow quickly.
    horizon: Option<u64>,
    /// The next transaction id when this session began: events that earlier sessions delivered belong
    /// to older transactions.
    began_before: Option<u64>,
    broken: mpsc::Sender<Error>,
}

/// What an audit waits for.
#[derive(Debug, Clone, Copy)]
struct AuditWait {
    /// Every transaction older than this one had ended when the audit began.
    xmin: u64,
    /// The end of the WAL after that: those transactions lie before it.
    end: Lsn,
}

impl AuditState {
    /// Makes one step of an audit; returns the time until the next one.
    async fn round(&mut self, sql: &mut Option<PatientSql>) -> Result<Duration> {
        let sql = match sql {
            Some(sql) => sql,
            None => {
                let target = &self.subject.target;
                let session =
                    PatientSql::open(target, "postrider auditor", STATEMENT_TIMEOUT).await?;
                scan::prepare(&session).await?;
                sql.insert(session)
            }
        };
        let waiting = match self.waiting {
            Some(waiting) => waiting,
            None => {
                let waiting = sql.answer(self.begin(sql)).await?;
                *self.waiting.insert(waiting)
            }
        };
        let AuditSubject {
            slot,
            publication,
            captured,
            walsender,
            ..
        } = &self.subject;
        let looking = async {
            let earlier = statements::earlier(sql, slot).await?;
            // Inspect the publication after the slot: its state must be newer than the slot's
            // position.
            let reached = statements::is_confirmed(sql, slot, *walsender, waiting.end).await?;
            let state = publication::inspect(sql, publication, captured).await?;
            Ok::<_, Error>((earlier, reached, state))
        };
        let (earlier, reached, state) = sql.answer(looking).await?;
        if !state.problems().is_empty() {
            // The supervisor reports the problem, and wakes the auditor when it is solved.
            return Ok(SOON);
        }
        let fingerprint = state.fingerprint();
        let is_as_it_was = earlier.publication.as_deref() == Some(fingerprint);
        if earlier.repeats && !is_as_it_was {
            return sql.answer(self.end_session(sql)).await;
        }
        if !reached {
            return Ok(AT_ONCE);
        }
        let known = async {
            // Columns may be added while a relay runs.
            claim::refresh(sql, &self.subject.tables).await?;
            claim::known(sql, slot, &self.subject.tables).await
        };
        let captured = sql.answer(known).await?;
        let has_overlooked = async {
            let windows = captured
                .iter()
                .map(|captured| ScanWindow::unresolved(captured, true));
            for window in windows.filter(|_| earlier.repeats) {
                if statements::has_overlooked(sql, &window).await? {
                    return Ok(true);
                }
            }
            Ok::<_, Error>(false)
        };
        if sql.answer(has_overlooked).await? {
            return sql.answer(self.end_session(sql)).await;
        }
        let has_partitions = captured
            .iter()
            .any(|captured| !captured.new_partitions().is_empty());
        let is_whole = !is_as_it_was || self.everything;
        let is_higher = self.goal.is_some() && waiting.xmin > self.floor;
        let mut writes = is_higher || !earlier.had_one || has_partitions;
        writes |= is_whole && !earlier.repeats;
        if !earlier.repeats {
            writes |= self.compare(sql, &captured, waiting, is_whole).await?;
        }
        // An idle relay writes nothing.
        if writes {
            let writing = self.resolved(sql, &captured, waiting, fingerprint, &earlier);
            sql.answer(writing).await?;
            self.floor = waiting.xmin;
            self.goal = self.goal.filter(|goal| waiting.xmin < *goal);
        }
        self.waiting = None;
        self.everything = false;
        if is_whole {
            // Rows of a gap may be of transactions that are still running.
            let now = sql.answer(current_snapshot(&***sql)).await?;
            self.horizon = Some(now.xmax());
            return Ok(AT_ONCE);
        }
        self.horizon = self.horizon.filter(|horizon| waiting.xmin < *horizon);
        Ok(if earlier.repeats || self.horizon.is_some() {
            SOON
        } else {
            INTERVAL
        })
    }

    /// Notes the running transactions, and after that the end of the WAL.
    async fn begin(&mut self, sql: &Sql) -> Result<AuditWait> {
        if self.tops.is_none() {
            let found = claim::look(sql, &self.subject.tables).await?;
            self.tops = Some(shape::tops(sql, &found).await?);
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
            end: statements::wal_end(sql).await?,
        })
    }

    /// Publishes rows of ended transactions that have no record. Returns whether there were any, or
    /// whether the partitions of a table have changed.
    async fn compare(
        &mut self,
        sql: &PatientSql,
        captured: &[Captured],
        waiting: AuditWait,
        is_whole: bool,
    ) -> Result<bool> {
        let commit = from_table::place_before(waiting.end);
        let last = sql.answer(from_table::last_ordinal(sql, commit)).await?;
        let mut places = Places {
            commit,
            next_ordinal: last + 1,
        };
        let (mut found, mut has_changed) = (0, false);
        for (table, captured) in self.subject.tables.iter().zip(captured) {
            let Captured { record, shape } = captured;
            let known = record.partitions.as_deref();
            has_changed |= known != Some(&shape.partitions);
            // A partition that was filled elsewhere has rows of any transaction.
            let has_grown = known.is_some_and(|known| shape.has_grown_since(known));
            let window = if is_whole || has_grown {
                ScanWindow::whole(captured)
            } else if waiting.xmin <= record.floor {
                // No transaction has ended since the last audit.
                continue;
            } else {
                ScanWindow::recent(captured)
            };
            let window = ScanWindow {
                below_xid: Some(waiting.xmin),
                ..window
            };
            let resolving = TableReader::resolve(sql, table, &self.subject.project, captured);
            let reader = sql.answer(resolving).await?;
            let none = Firsts::default();
            let unrecorded = Unrecorded::of(sql, reader, table, window, &none).await?;
            let metrics = &self.subject.metrics;
            let sending = from_table::hand_over(unrecorded, &mut self.events, &mut places, || {
                metrics.events_from_table.inc();
            });
            let sent = sending.await;
            // Wait even if reading has failed: otherwise the next attempt would send the same rows
            // again.
            let settled = self.events.settled().await;
            found += match (sent, settled) {
                (Err(Interrupted::Failed(error)), _) => return Err(error),
                (Err(Interrupted::SessionEnded), _) | (_, Err(SessionEnded)) => {
                    return Err(ended());
                }
                (Ok(sent), Ok(())) => sent,
            };
            if window.goes_by_places() {
                sql.answer(shape::refuse_rewritten(sql, table, shape))
                    .await?;
            }
        }
        if found > 0 {
            let code = Code::PublicationGap;
            tracing::error!(
                code = code.name(),
                rows = found,
                hint = code.hint(),
                "found rows missing from the replication stream: published them from the table"
            );
        }
        Ok(found > 0 || has_changed)
    }

    /// Raises the floors.
    async fn resolved(
        &mut self,
        sql: &Sql,
        captured: &[Captured],
        waiting: AuditWait,
        publication: &str,
        earlier: &AuditHistory,
    ) -> Result<()> {
        // Rows up to these numbers belong to transactions that have ended.
        let tops = self.tops.take_if(|tops| waiting.xmin >= tops.next_xid);
        for (n, captured) in captured.iter().enumerate() {
            let top = tops.as_ref().and_then(|tops| tops.seqs.get(n)?.as_ref());
            let resolved = Resolved {
                identity: &captured.record.identity,
                floor: waiting.xmin,
                floor_seq: top.map(|top| (top.seq, top.numbering.as_str())),
                partitions: Some(&captured.shape.partitions),
            };
            let (slot, walsender) = (&self.subject.slot, self.subject.walsender);
            captures::resolve(sql, slot, walsender, &resolved).await?;
            if let Some(bounds) = self.subject.bounds.get(n) {
                bounds.raise_floor(waiting.xmin);
            }
        }
        // Switch back to full records only when the floor is above everything delivered without a
        // record.
        let is_full = self.subject.dispatch == Dispatch::Full
            && self.began_before.is_some_and(|next| waiting.xmin >= next);
        let dispatch = if is_full || !earlier.repeats {
            self.subject.dispatch
        } else {
            Dispatch::Exceptions
        };
        if earlier.repeats && dispatch == Dispatch::Full {
            captures::full_from_here(&**sql, &self.subject.slot).await?;
        }
        statements::audited(sql, &self.subject, publication, dispatch).await
    }

    async fn end_session(&self, sql: &Sql) -> Result<Duration> {
        statements::mark_broken(sql, &self.subject, Loss::PublicationChanged.name()).await?;
        let what = "the publication or a captured table was altered or recreated: publishing all \
                    rows without a known outcome from the tables";
        // If the session has ended already, nobody receives this.
        let _ = self.broken.try_send(Error::new(Code::PublicationGap, what));
        Ok(SOON)
    }
}

fn ended() -> Error {
    Error::new(
        Code::PostgresConnectionLost,
        "the replication session ended during the audit",
    )
}
