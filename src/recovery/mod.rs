//! Recovers from a lost slot without losing data. The recovery creates a new slot, and reads from the tables every
//! unresolved row that the new slot does not stream. It publishes these rows, and then continues with the stream.
//! If the slot itself is fine, and only its stream might have left out rows, the recovery keeps the slot.
//!
//! The order of the steps makes this safe (docs/adr/0011-recovery.md):
//!
//! - The relay writes a durable mark into `outbox.relay` before it changes anything, and removes the mark when
//!   every row is resolved. If a session finds the mark, it continues the recovery or begins it again. It publishes
//!   only rows that may still be unresolved.
//! - The relay takes the slot before it sends the first row, and holds the slot until the end of the recovery. So
//!   there is only one sender.
//! - The relay reads the stream only after all rows from the tables are queued for their keys, so each key
//!   keeps its order across the seam. A row that has to wait, for example for its topic, holds up only its
//!   key.
//! - Rows of detached partitions are sent before all others. Somebody may have copied them into a captured
//!   table, so the recovery remembers their event ids and does not send them twice.
//! - The stream of a kept slot may contain rows that the recovery has read from the tables. The pipeline skips
//!   these rows in the stream, and confirms no position until all of them have an outcome
//!   (docs/adr/0041-recoveries-that-keep-the-slot.md).
//! - The recovery reads the tables with many short statements, which also see rows that were inserted since the
//!   recovery began. It sends a row only if the slot's snapshot shows the transaction that inserted the row. The
//!   stream contains all other rows.
//! - A first start that creates its slot is also a recovery. With `start = new` it usually reads no table,
//!   because capturing begins with the slot's snapshot (docs/adr/0040-capturing-begins-with-the-slot.md).
//!
//! [`foreign_records`] decides whether the records in the database may be used at all. [`slot_verdict`] decides
//! whether a recovery is needed, and [`slot`] creates or keeps its slot. `seam`
//! joins the tables and the stream. `read_rows` remembers which rows were read, and `progress` records how
//! far the recovery has got.
//!
//! Not here: finding the unrecorded rows of a table (`capture`), and delivering the events (`delivery`).

mod announcement;
pub(crate) mod foreign_records;
mod progress;
mod read_rows;
mod row_counter;
mod seam;
pub(crate) mod slot;
pub(crate) mod slot_verdict;
mod snapshot;

use std::sync::Arc;
use std::time::Duration;

use decoder::Lsn;
use slot_manager::{SlotName, slots};
use tokio::sync::oneshot;

use crate::capture::blocked::FirstQuarantined;
use crate::capture::claim::Captured;
use crate::capture::detached::{self, DetachedTable};
use crate::capture::from_table::{self, Interrupted, ScannedRow, SessionEnded, TableSender};
use crate::capture::positions::commit_before;
use crate::capture::session_records::SessionRecords;
use crate::capture::table::TableReader;
use crate::capture::unrecorded::Unrecorded;
use crate::capture::{ScanWindow, scan, shape};
use crate::condition::{Phase, RelayState};
use crate::error::Result;
use crate::event::EventPosition;
use crate::mapping::TableSettings;
use crate::metrics::Metrics;
use crate::postgres::{Sql, Target, connect_patiently};
use crate::store::capture_record::{self as captures, Resolved};
use crate::store::dispatch::{PredecessorGone, last_ordinal};
use crate::store::relay_row::{RecordKeeping, RelayMode, Unfinished, mark};
pub(crate) use announcement::Announcements;
use progress::{ProgressWriter, ReadingNotes};
use read_rows::ReadRows;
pub(crate) use read_rows::RowsFromTables;
use row_counter::RowCounter;
use seam::StepSender;
pub(crate) use seam::{Seam, SeamStep};
use slot::RecoverySlot;

/// Time between two checks whether the slot has confirmed a position.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// The slot and the tables to recover, and what the recovery needs to publish their rows.
#[derive(Debug)]
pub(crate) struct RecoverySubject {
    pub(crate) target: Target,
    pub(crate) slot: SlotName,
    /// Fingerprint of the publication, read while no relay held the slot, and before this session created a
    /// slot.
    pub(crate) publication: String,
    pub(crate) tables: Vec<TableSettings>,
    pub(crate) project: String,
    /// The shape and the capture record of each of `tables`, in the same order.
    pub(crate) captured: Vec<Captured>,
    /// All capture records, first those of `captured`.
    pub(crate) known: SessionRecords,
    pub(crate) records: RecordKeeping,
    pub(crate) instance: String,
    /// The walsender's pid.
    pub(crate) walsender: i32,
    pub(crate) state: Arc<RelayState>,
    pub(crate) metrics: Metrics,
}

/// Starts the task that sends rows from the tables into the pipeline: every unresolved row that the
/// slot's snapshot shows. The stream must be open already, so that no other relay can take the slot.
/// The returned receiver gets a message when the recovery is over.
pub(crate) async fn start(
    sql: &Sql,
    subject: RecoverySubject,
    slot: RecoverySlot,
    rows: TableSender,
    _nobody_adds_rows: &PredecessorGone,
) -> Result<(Seam, oneshot::Receiver<()>)> {
    let commit = commit_before(slot.consistent_point());
    let firsts = FirstQuarantined::read(sql).await?;
    let commits = firsts.commits_before().chain([commit]);
    let last_ordinal = last_ordinal(sql, commits).await?;
    if slot.begins_anew() {
        mark::write_unfinished(sql, &subject.slot, &subject.instance, &slot.point).await?;
    }
    let recorded = !subject.records.may_lack_records();
    let resolved_below = read_rows::resolved_below(&subject.captured, &subject.known);
    let recovery = Recovery {
        subject,
        next: EventPosition {
            commit,
            ordinal: last_ordinal + 1,
        },
        notes: ReadingNotes::new(),
        read: ReadRows::new(
            slot.point.repeated_before,
            recorded.then_some(&slot.point.snapshot),
            &resolved_below,
        ),
        point: slot.point,
        firsts,
        rows,
        counter: RowCounter::new(),
    };
    let (tell, told) = oneshot::channel();
    let seam = Seam::new(|steps| {
        tokio::spawn(async move {
            // If the session has ended, nobody receives the step or the error.
            let _ = match recovery.run(&steps).await {
                Ok(()) => {
                    let _ = tell.send(());
                    steps.send(Ok(SeamStep::Over)).await
                }
                Err(Interrupted::Failed(error)) => steps.send(Err(error)).await,
                Err(Interrupted::SessionEnded) => Ok(()),
            };
        })
    });
    Ok((seam, told))
}

struct Recovery {
    subject: RecoverySubject,
    /// The position for the next event.
    next: EventPosition,
    point: Unfinished,
    firsts: FirstQuarantined,
    rows: TableSender,
    read: ReadRows,
    notes: ReadingNotes,
    counter: RowCounter,
}

impl Recovery {
    async fn run(self, steps: &StepSender) -> Result<(), Interrupted> {
        let sql =
            connect_patiently(&self.subject.target, "postrider recovery", Duration::ZERO).await?;
        sql.commit_locally().await?;
        scan::prepare(&sql).await?;
        if !self.subject.records.may_lack_records() {
            return self.carry_out(&sql, steps).await;
        }
        let writer = ProgressWriter {
            notes: self.notes.clone(),
            slot: self.subject.slot.clone(),
            walsender: self.subject.walsender,
            tables: self.subject.tables.clone(),
            captured: self.subject.captured.clone(),
            below: self.point.snapshot.xmin(),
        };
        let rows = self.rows.another();
        let resolved_below = || rows.resolved_below();
        tokio::select! {
            biased;
            ended = self.carry_out(&sql, steps) => ended,
            never = writer.run(&sql, resolved_below) => match never {},
        }
    }

    async fn carry_out(mut self, sql: &Sql, steps: &StepSender) -> Result<(), Interrupted> {
        let (tables, captured) = (&self.subject.tables, &self.subject.captured);
        let detached = detached::find(sql, tables, captured).await?;
        self.read_detached(&detached, sql).await?;
        let tables = self.subject.captured.iter().enumerate();
        let to_read = tables.filter(|(_, captured)| slot::may_miss_rows(&self.point, captured));
        let to_read: Vec<usize> = to_read.map(|(n, _)| n).collect();
        for n in &to_read {
            let (table, captured) = (
                self.subject.tables[*n].clone(),
                self.subject.captured[*n].clone(),
            );
            let window = ScanWindow::unresolved(&captured, self.subject.records);
            self.read_table(&table, window, Some(*n), sql).await?;
        }
        if self.rows.queued().await == Err(SessionEnded) {
            return Err(Interrupted::SessionEnded);
        }
        let repeated = self.read.take_repeated();
        report(steps, SeamStep::Opened(repeated)).await?;
        if self.rows.settled().await == Err(SessionEnded) {
            return Err(Interrupted::SessionEnded);
        }
        report(steps, SeamStep::Settled).await?;
        if let Some(end) = self.point.repeated_before {
            self.wait_until_confirmed(sql, end).await?;
        }
        self.write_down(sql, &detached).await?;
        let (slot, rows) = (&self.subject.slot, self.counter.rows);
        if !to_read.is_empty() {
            tracing::warn!(
                %slot, rows, seconds = self.counter.began.elapsed().as_secs(),
                "recovered: every row committed since its table was captured has an outcome"
            );
        }
        tracing::info!(%slot, "streaming");
        self.subject.state.set(Phase::Streaming);
        Ok(())
    }

    /// Waits until the kept slot has confirmed the position `end`. The recovery mark must stay until then. The stream
    /// before `end` may contain rows that the recovery has already published from the tables. Without the mark, a
    /// session after a crash would only stream, and so repeat only the rows in the stream. For example, if the
    /// stream lacks row 2 of a key, consumers would receive the rows 1, 2, 3 and then 1, 3.
    async fn wait_until_confirmed(&self, sql: &Sql, end: Lsn) -> Result<()> {
        let (slot, walsender) = (&self.subject.slot, self.subject.walsender);
        loop {
            let confirmed = slots::confirmed_by_reader(sql, slot, walsender).await?;
            if confirmed.is_some_and(|confirmed| confirmed >= end) {
                return Ok(());
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Records that the recovery has resolved every row that its snapshot shows. Raises the floors of the tables to the
    /// snapshot's `xmin`, and removes the recovery mark from the relay's row.
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
            // This recovery has read these former partitions, so their entries in the capture record end here. The
            // auditor removes the other entries later.
            let left: Vec<u32> = of_table()
                .filter(|table| table.rows().is_some() && record.unread.contains_key(&table.oid))
                .map(|table| table.oid)
                .collect();
            let uncaptured = of_table()
                .filter(|table| table.rows().is_some() && table.is_uncaptured)
                .map(|table| (table.oid, floor))
                .collect();
            let resolved = Resolved {
                identity,
                floor,
                floor_seq: None,
                // Record the new partitions here only if published events may lack a record. Otherwise the auditor
                // records them, after it has compared their rows with the dispatch rows.
                partitions: records
                    .may_lack_records()
                    .then_some(&*captured.shape.partitions),
                left: &left,
                unread: &unread,
                uncaptured: &uncaptured,
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

    /// Publishes the rows of former partitions before all other rows. Somebody may have copied such rows into a
    /// captured table. The recovery remembers the event ids of the rows, and does not publish their copies.
    ///
    /// If there are more event ids than the recovery can remember, waits until all rows of former partitions have an
    /// outcome. With full records, each of these events then has a record, by which the recovery recognises a copy.
    async fn read_detached(
        &mut self,
        detached: &[DetachedTable],
        sql: &Sql,
    ) -> Result<(), Interrupted> {
        self.read.reads_former(true);
        for table in detached {
            table.warn_if_unreadable();
            if let Some(former) = table.rows() {
                let window = ScanWindow::unresolved(&former.captured, self.subject.records);
                self.read_table(&former.settings, former.bounded(window), None, sql)
                    .await?;
            }
        }
        self.read.reads_former(false);
        if self.read.lacks_some_former() && self.rows.settled().await == Err(SessionEnded) {
            return Err(Interrupted::SessionEnded);
        }
        Ok(())
    }

    /// Publishes the rows of one table. `number` is the index of the table in the settings; `None` for a former
    /// partition.
    async fn read_table(
        &mut self,
        table: &TableSettings,
        window: ScanWindow<'_>,
        number: Option<usize>,
        sql: &Sql,
    ) -> Result<(), Interrupted> {
        let captured = window.captured;
        let reader = TableReader::resolve(sql, table, &self.subject.project, captured).await?;
        let point = self.point.clone();
        let window = ScanWindow {
            shown_by: Some(&point.snapshot),
            // With a new slot, leave out rows that an earlier attempt of this recovery has resolved. A kept slot
            // streams these rows again, so the recovery must read and remember them.
            without_recovered: point.repeated_before.is_none(),
            ..window
        };
        let unrecorded = Unrecorded::of(sql, reader, table, window, &self.firsts).await?;
        let (counter, metrics) = (&mut self.counter, &self.subject.metrics);
        let read = &mut self.read;
        let notes = &self.notes;
        // The highest `seq` that was read. If no row was read, this is `i64::MIN`, and the progress of an earlier
        // recovery stays.
        let mut highest = captured.shape.numbered().map(|_| i64::MIN);
        let reads = |ordinal, seq: i64| {
            if let Some(highest) = &mut highest {
                *highest = seq.max(*highest);
            }
            if let Some(number) = number {
                notes.reads(ordinal, number, seq);
            }
        };
        let takes = |row: ScannedRow| {
            let is_new = read.add(row.id().into_bytes());
            if is_new && matches!(row, ScannedRow::Unresolved(_)) {
                counter.row();
                metrics.events_from_table.inc();
            }
            is_new
        };
        let next = &mut self.next;
        let rows = from_table::hand_over(unrecorded, &mut self.rows, next, takes, reads).await?;
        if number.is_none() || window.finds_rows_by_ctid() {
            shape::refuse_rewritten(sql, table, &captured.shape).await?;
        }
        if let Some(number) = number {
            detached::refuse_detached(sql, table, &captured.shape).await?;
            self.notes.has_read(self.next.ordinal, number, highest);
        }
        tracing::info!(table = %table.table, rows, "recovering: finished reading the table");
        Ok(())
    }
}

/// Reports a step to the pipeline.
async fn report(steps: &StepSender, step: SeamStep) -> Result<(), Interrupted> {
    let reported = steps.send(Ok(step)).await;
    reported.map_err(|_| Interrupted::SessionEnded)
}
