//! Recovers from a lost slot without losing data: creates a new slot, publishes from the tables all
//! unresolved rows that the new slot will not bring, and then continues with the stream.
//!
//! The order of the steps makes this safe (docs/adr/0011-recovery.md):
//!
//! - The mark in `outbox.relay` is durable before anything changes, and is removed when every row is
//!   resolved. A relay that starts in between continues or repeats the recovery, and publishes only rows
//!   that are still unrecorded.
//! - The relay holds the slot from before the first row is sent until the end, so there is one sender.
//! - The stream is read only after all rows from the tables are queued for their keys, so each key keeps
//!   its order across the seam. A row that has to wait, for example for its topic, holds up only its key.
//! - Rows of detached partitions are sent before all others. Somebody may have copied them into a captured
//!   table, so the recovery remembers their event ids and does not send them twice.
//! - The tables are read in short statements. The recovery sends only rows whose inserting transaction
//!   the slot's snapshot shows, no matter when the rows are read.
//! - A first start is a recovery that usually reads no table: the capture of its tables begins with the
//!   slot's snapshot (docs/adr/0040-capturing-begins-with-the-slot.md).
//!
//! [`loss`] decides whether a recovery is needed, and [`slot`] creates its slot.
//!
//! Not here: finding the unrecorded rows of a table (`capture`), and delivering the events (`delivery`).

pub(crate) mod loss;
pub(crate) mod slot;
mod snapshot;

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use slot_manager::SlotName;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use uuid::Uuid;

use crate::capture::blocked::FirstQuarantined;
use crate::capture::claim::Captured;
use crate::capture::detached::{self, DetachedTable};
use crate::capture::from_table::{self, Interrupted, SessionEnded, TableSender};
use crate::capture::positions::{BEFORE_ALL, commit_before};
use crate::capture::table::TableReader;
use crate::capture::unrecorded::Unrecorded;
use crate::capture::{ScanWindow, scan, shape};
use crate::condition::{Phase, RelayState};
use crate::error::{Code, Error, Result};
use crate::event::EventPosition;
use crate::mapping::TableSettings;
use crate::metrics::Metrics;
use crate::postgres::{Sql, Target, connect_patiently};
use crate::store::capture_record::{self as captures, Resolved};
use crate::store::dispatch::{PredecessorGone, last_ordinal};
use crate::store::relay_row::{RecordKeeping, RelayMode, Unfinished, mark};
use slot::RecoverySlot;

const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Maximum number of rows of former partitions whose event ids are remembered.
const MAX_REMEMBERED: usize = 100_000;

/// The seam between the tables and the stream. The stream is read once the seam is open.
#[derive(Debug)]
pub(crate) struct Seam {
    is_open: bool,
    /// Receives the report that the seam is open. `None` once the report has arrived.
    opened: Option<oneshot::Receiver<()>>,
    over: oneshot::Receiver<Result<()>>,
    task: JoinHandle<()>,
}

/// A step of the recovery that the pipeline has to know about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SeamStep {
    /// All rows from the tables are queued for their keys: the stream may be read.
    Opened,
    /// All rows from the tables are resolved, and the recovery is over.
    Over,
}

impl Seam {
    pub(crate) fn is_open(&self) -> bool {
        self.is_open
    }

    /// Waits for the next step. Cancel-safe.
    ///
    /// # Errors
    /// An error that ends the session. The next session continues the recovery, or begins again with a
    /// new slot.
    pub(crate) async fn next_step(&mut self) -> Result<SeamStep> {
        if let Some(opened) = &mut self.opened {
            self.is_open = opened.await.is_ok();
            self.opened = None;
            if self.is_open {
                return Ok(SeamStep::Opened);
            }
        }
        let over = (&mut self.over).await;
        let over =
            over.unwrap_or_else(|_| Err(Error::new(Code::Internal, "the recovery task ended")));
        over.map(|()| SeamStep::Over)
    }
}

impl Drop for Seam {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// What to recover.
#[derive(Debug)]
pub(crate) struct RecoverySubject {
    pub(crate) target: Target,
    pub(crate) slot: SlotName,
    /// Fingerprint of the publication at the start of the session, before it created a slot.
    pub(crate) publication: String,
    pub(crate) tables: Vec<TableSettings>,
    pub(crate) project: String,
    /// The shape and the capture record of each of `tables`, in the same order.
    pub(crate) captured: Vec<Captured>,
    pub(crate) records: RecordKeeping,
    pub(crate) instance: String,
    /// The walsender's pid.
    pub(crate) walsender: i32,
    pub(crate) state: Arc<RelayState>,
    pub(crate) metrics: Metrics,
}

/// Starts the task that sends every unresolved row that the slot's snapshot shows into the pipeline. The
/// stream must be open already, so that no other relay can take the slot. The returned receiver reports
/// when the recovery is over.
pub(crate) async fn start(
    sql: &Sql,
    subject: RecoverySubject,
    slot: RecoverySlot,
    rows: TableSender,
    _nobody_adds_rows: &PredecessorGone,
) -> Result<(Seam, oneshot::Receiver<()>)> {
    let commit = commit_before(slot.consistent_point());
    let last_ordinal = last_ordinal(sql, commit)
        .await?
        .max(last_ordinal(sql, BEFORE_ALL).await?);
    let firsts = FirstQuarantined::read(sql, subject.records).await?;
    if slot.is_new {
        mark::write_unfinished(sql, &subject.slot, &subject.instance, &slot.point).await?;
    }
    let recovery = Recovery {
        subject,
        next: EventPosition {
            commit,
            ordinal: last_ordinal + 1,
        },
        point: slot.point,
        firsts,
        rows,
        sent: SentBefore::default(),
        progress: Progress::new(),
    };
    let (open, opened) = oneshot::channel();
    let (end, over) = oneshot::channel();
    let (tell, told) = oneshot::channel();
    let task = tokio::spawn(async move {
        // If the session has ended, nobody receives this.
        let _ = match recovery.run(open).await {
            Ok(()) => {
                let _ = tell.send(());
                end.send(Ok(()))
            }
            Err(Interrupted::Failed(error)) => end.send(Err(error)),
            Err(Interrupted::SessionEnded) => Ok(()),
        };
    });
    let seam = Seam {
        is_open: false,
        opened: Some(opened),
        over,
        task,
    };
    Ok((seam, told))
}

/// The task that reads the tables.
struct Recovery {
    subject: RecoverySubject,
    /// The position for the next event.
    next: EventPosition,
    point: Unfinished,
    firsts: FirstQuarantined,
    rows: TableSender,
    /// The rows of former partitions that were sent.
    sent: SentBefore,
    progress: Progress,
}

impl Recovery {
    async fn run(mut self, open: oneshot::Sender<()>) -> Result<(), Interrupted> {
        let sql =
            connect_patiently(&self.subject.target, "postrider recovery", Duration::ZERO).await?;
        scan::prepare(&sql).await?;
        let (tables, captured) = (&self.subject.tables, &self.subject.captured);
        let detached = detached::find(&sql, tables, captured).await?;
        self.read_detached(&detached, &sql).await?;
        let tables = self.subject.captured.iter().enumerate();
        let to_read = tables.filter(|(_, captured)| slot::may_miss_rows(&self.point, captured));
        let to_read: Vec<usize> = to_read.map(|(n, _)| n).collect();
        for n in &to_read {
            let (table, captured) = (
                self.subject.tables[*n].clone(),
                self.subject.captured[*n].clone(),
            );
            let window = ScanWindow::unresolved(&captured, self.subject.records);
            self.read(&table, window, &sql).await?;
        }
        if self.rows.queued().await == Err(SessionEnded) {
            return Err(Interrupted::SessionEnded);
        }
        let _ = open.send(());
        if self.rows.settled().await == Err(SessionEnded) {
            return Err(Interrupted::SessionEnded);
        }
        self.write_down(&sql, &detached).await?;
        let (slot, rows) = (&self.subject.slot, self.progress.rows);
        if !to_read.is_empty() {
            tracing::warn!(
                %slot, rows, seconds = self.progress.began.elapsed().as_secs(),
                "recovered: every row committed since its table was captured has an outcome"
            );
        }
        tracing::info!(%slot, "streaming");
        self.subject.state.set(Phase::Streaming);
        Ok(())
    }

    /// Raises the floors and removes the mark: everything that the snapshot shows is resolved.
    async fn write_down(&self, sql: &Sql, detached: &[DetachedTable]) -> Result<()> {
        let (slot, records) = (&self.subject.slot, self.subject.records);
        let floor = self.point.snapshot.xmin();
        for (n, captured) in self.subject.captured.iter().enumerate() {
            let record = &captured.record;
            let identity = &record.identity;
            let of_table = || detached.iter().filter(|table| table.number == n);
            let unread = of_table()
                .filter(|table| table.unreadable().is_some())
                .map(|table| (table.oid, record.floor))
                .collect();
            // The auditor removes the others from the list.
            let left: Vec<u32> = of_table()
                .filter(|table| table.rows().is_some() && record.unread.contains_key(&table.oid))
                .map(|table| table.oid)
                .collect();
            let resolved = Resolved {
                identity,
                floor,
                floor_seq: None,
                // If all events have a record, the auditor compares new partitions and records them.
                partitions: records
                    .may_lack_records()
                    .then_some(&*captured.shape.partitions),
                left: &left,
                unread: &unread,
            };
            captures::resolve(sql, slot, self.subject.walsender, &resolved).await?;
        }
        if records.becomes_complete() {
            captures::full_from_here(&**sql, slot).await?;
        }
        let mode = RelayMode {
            records: records.without_earlier(),
            publication: &self.subject.publication,
        };
        if !mark::recovered(sql, slot, self.point.consistent_point, mode).await? {
            tracing::warn!(
                %slot,
                "another recovery was requested meanwhile: the next session recovers again"
            );
        }
        Ok(())
    }

    /// Publishes the rows of former partitions before all other rows. If there are too many to remember, waits
    /// until they are recorded.
    async fn read_detached(
        &mut self,
        detached: &[DetachedTable],
        sql: &Sql,
    ) -> Result<(), Interrupted> {
        self.sent.remembers = true;
        for table in detached {
            table.warn_if_unreadable();
            if let Some(former) = table.rows() {
                let window = ScanWindow::unresolved(&former.captured, self.subject.records);
                self.read(&former.settings, former.bounded(window), sql)
                    .await?;
            }
        }
        self.sent.remembers = false;
        if self.sent.lacks_some && self.rows.settled().await == Err(SessionEnded) {
            return Err(Interrupted::SessionEnded);
        }
        Ok(())
    }

    /// Publishes the rows of one table.
    async fn read(
        &mut self,
        table: &TableSettings,
        window: ScanWindow<'_>,
        sql: &Sql,
    ) -> Result<(), Interrupted> {
        let captured = window.captured;
        let reader = TableReader::resolve(sql, table, &self.subject.project, captured).await?;
        let point = self.point.clone();
        let window = ScanWindow {
            shown_by: Some(&point.snapshot),
            ..window
        };
        let unrecorded = Unrecorded::of(sql, reader, table, window, &self.firsts).await?;
        let (progress, metrics) = (&mut self.progress, &self.subject.metrics);
        let before = &mut self.sent;
        let sending = from_table::hand_over(unrecorded, &mut self.rows, &mut self.next, |id| {
            let is_new = before.takes(id);
            if is_new {
                progress.row();
                metrics.events_from_table.inc();
            }
            is_new
        });
        let rows = sending.await?;
        if window.goes_by_places() {
            shape::refuse_rewritten(sql, table, &captured.shape).await?;
        }
        tracing::info!(table = %table.table, rows, "recovering: finished reading the table");
        Ok(())
    }
}

/// The event ids of rows that were sent from former partitions.
#[derive(Debug, Default)]
struct SentBefore {
    ids: HashSet<Uuid>,
    /// Whether rows of former partitions are being sent.
    remembers: bool,
    /// Whether there were more rows than are remembered.
    lacks_some: bool,
}

impl SentBefore {
    /// Whether a row must be sent, because it was not sent before.
    fn takes(&mut self, id: Uuid) -> bool {
        if !self.remembers || self.ids.len() >= MAX_REMEMBERED {
            self.lacks_some |= self.remembers;
            return !self.ids.contains(&id);
        }
        self.ids.insert(id)
    }
}

struct Progress {
    began: Instant,
    logged: Instant,
    rows: u64,
}

impl Progress {
    fn new() -> Self {
        let now = Instant::now();
        Self {
            began: now,
            logged: now,
            rows: 0,
        }
    }

    fn row(&mut self) {
        self.rows += 1;
        // Check the clock only every 256 rows: a check for each row would cost more than the row itself.
        if self.rows.is_multiple_of(256) && self.logged.elapsed() >= LOG_INTERVAL {
            self.logged = Instant::now();
            let rows = self.rows;
            tracing::info!(rows, "recovering: publishing rows from the tables");
        }
    }
}
