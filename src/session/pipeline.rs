//! Runs the main loop of one session, which reads the stream, sends requests, takes in their outcomes,
//! and confirms positions.
//!
//! One task owns all state. One `select!` has everything that can wake the task, by priority: shutdown,
//! the end of the replication session, progress of the delivery, the supervisor, the auditor, progress
//! of a recovery, rows from the tables, the end of a pause in a backlog, and last the stream, which is
//! the busiest. During a recovery, the stream is read only after all rows from the tables are queued
//! for their keys.
//!
//! The loop waits for the database only to look up moved rows and rows recorded by earlier sessions, to
//! ask the catalog for a type that the stream names for the first time, and to find out why the lease is
//! over.

mod moved_rows;

use std::time::{Duration, Instant};

use bytes::Bytes;
use decoder::Oid;
use decoder::frame::Frame;
use replication::{Chunk, CommitLsn, Confirmable, Source, Watermark, frames};
use tokio::sync::{mpsc, watch};

use self::moved_rows::standing;
use super::supervisor::Supervision;
use crate::capture::earlier::OutcomeLookup;
use crate::capture::from_table::{FromTable, TableRows};
use crate::capture::intake::{Intake, IntakeStep};
use crate::capture::moved::{MappedRow, MovedRow, MovedRows};
use crate::capture::table;
use crate::capture::unrecorded::stays_published;
use crate::delivery::flow_control::backlog::Backlog;
use crate::delivery::{Delivery, until};
use crate::error::{Code, Error, Result};
use crate::lanes::Serve;
use crate::mapping::MapError;
use crate::metrics::Metrics;
use crate::recovery::{Seam, SeamStep};
use crate::store::dispatch::Lookup;

/// The state of one session.
pub(super) struct Pipeline {
    pub(super) source: Source,
    pub(super) intake: Intake,
    pub(super) watermark: Watermark,
    pub(super) delivery: Delivery,
    pub(super) earlier: OutcomeLookup,
    pub(super) moved: MovedRows,
    /// Rows that the stream does not bring. A recovery or the auditor reads them from their tables.
    pub(super) from_table: TableRows,
    /// The seam of the running recovery; `None` if none runs. The stream is read once the seam is open.
    pub(super) seam: Option<Seam>,
    /// Errors of the auditor: the stream may have left out rows, and only a recovery can publish them.
    pub(super) broken: mpsc::Receiver<Error>,
    pub(super) supervision: watch::Receiver<Supervision>,
    pub(super) backlog: Backlog,
    pub(super) metrics: Metrics,
}

fn ended_unexpectedly(task: &str) -> Error {
    Error::new(Code::Internal, format!("{task} ended unexpectedly"))
}

/// Why the loop ended without an error.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum PipelineEnd {
    Shutdown,
}

impl Pipeline {
    /// Runs until shutdown, or until an error ends the session.
    pub(super) async fn run(
        &mut self,
        shutdown: &mut watch::Receiver<bool>,
    ) -> Result<PipelineEnd> {
        loop {
            // Read the clock before the lease check. The timeout of requests starts at this time, even
            // if the process stalls in between.
            let now = Instant::now();
            if self.source.lease_is_over() {
                return Err(self.source.why_lease_is_over().await.into());
            }
            // Once the seam is open, every row from the tables is queued for its key.
            let is_open = self.seam.as_ref().is_none_or(Seam::is_open);
            if is_open && self.earlier.is_over() {
                self.delivery.allow_releases();
            }
            let serve = |may_linger| self.backlog.serve(may_linger);
            self.delivery.send_requests(now, serve);
            self.source.confirm(self.watermark.confirmable());
            self.source.set_behind(self.backlog.is_behind());
            if !self.backlog.is_behind() {
                self.delivery.caught_up();
            }
            self.measure();
            let takes_events = self.delivery.takes_events();
            let takes_chunks = takes_events && is_open && !self.moved.any_waits_for_recovery();
            self.backlog.reads(takes_events, now);
            let (ended, chunks) = self.source.split();
            tokio::select! {
                biased;
                _ = shutdown.wait_for(|stop| *stop) => return Ok(PipelineEnd::Shutdown),
                error = ended => return Err(error.map_or_else(
                    |_| ended_unexpectedly("the replication thread"),
                    Error::from,
                )),
                recorded = self.delivery.progress() => self.on_recorded(recorded?).await?,
                changed = self.supervision.changed() => {
                    changed.map_err(|_| ended_unexpectedly("the supervisor"))?;
                    if *self.supervision.borrow_and_update() == Supervision::ServerStopping {
                        let what = "PostgreSQL is shutting down";
                        return Err(Error::new(Code::PostgresStopping, what));
                    }
                }
                told = self.broken.recv() => {
                    return Err(told.unwrap_or_else(|| ended_unexpectedly("the auditor")));
                }
                step = next_step(&mut self.seam), if self.seam.is_some() => match step? {
                    SeamStep::Opened => {}
                    SeamStep::Over => {
                        self.seam = None;
                        self.decide_all_that_waited_for_recovery().await?;
                    }
                },
                Some(batch) = self.from_table.recv(), if takes_events => {
                    self.on_table_rows(batch)?;
                }
                _ = until(self.backlog.pause_ends()), if self.backlog.is_behind() => {
                    self.backlog.paused();
                }
                Some(chunk) = chunks.recv(), if takes_chunks => {
                    if let Err(error) = self.on_chunk(&chunk).await {
                        self.send_what_came_before();
                        return Err(error);
                    }
                }
            }
        }
    }

    /// Sends the queued events, because they came before the event that ends the session.
    fn send_what_came_before(&mut self) {
        let now = Instant::now();
        if !self.source.lease_is_over() {
            self.delivery.send_requests(now, |_| Serve::All);
        }
    }

    async fn on_recorded(&mut self, commits: Vec<(CommitLsn, u64)>) -> Result<()> {
        for (commit, events) in commits {
            if self.from_table.resolve(commit, events) {
                continue;
            }
            self.watermark.resolve(commit, events);
            if self.moved.any_waits() && !self.watermark.is_unresolved(commit) {
                self.take_all_that_waited_for(commit).await?;
            }
        }
        Ok(())
    }

    fn on_table_rows(&mut self, batch: Vec<FromTable>) -> Result<()> {
        for row in batch {
            match row {
                FromTable::Event(row) => {
                    self.from_table.taken();
                    self.delivery.take(row.topic, row.ordering_key, row.event);
                }
                FromTable::Unmappable(MapError::Event(error)) if error.fault.is_of_the_row() => {
                    self.from_table.taken();
                    self.delivery.take_unmappable(error, Bytes::new())?;
                }
                FromTable::Unmappable(error) => {
                    self.send_what_came_before();
                    return Err(error.into());
                }
                FromTable::Queued(answer) => {
                    // The task that asked may have ended.
                    let _ = answer.send(());
                }
                FromTable::Settle(answer) => self.from_table.settle(answer),
            }
        }
        Ok(())
    }

    async fn on_chunk(&mut self, chunk: &Chunk) -> Result<()> {
        self.metrics.received_bytes.inc_by(chunk.len() as u64);
        let (mut sent_at, mut keepalive, mut last_sent_at) = (None, false, None);
        for frame in frames(chunk) {
            match frame? {
                Frame::XLogData {
                    payload,
                    sent_at: at,
                    ..
                } => {
                    (sent_at, keepalive) = (Some(at), false);
                    last_sent_at = Some(at);
                    self.on_message(payload).await?;
                }
                Frame::Keepalive {
                    wal_end,
                    sent_at: at,
                    ..
                } => {
                    (keepalive, last_sent_at) = (true, Some(at));
                    self.earlier.passed(wal_end);
                    if self.supervision.borrow().publication_is_right() {
                        self.watermark.keepalive(wal_end);
                    }
                }
            }
        }
        let now = Instant::now();
        if let Some(sent_at) = last_sent_at {
            self.metrics.server_clock.heard(sent_at, now);
        }
        if let (Some(sent_at), Some(committed)) = (sent_at, self.intake.last_commit_time()) {
            self.backlog.received(sent_at, committed, now);
        }
        if keepalive {
            self.backlog.keepalive();
        }
        Ok(())
    }

    async fn on_message(&mut self, payload: &[u8]) -> Result<()> {
        match self.intake.message(payload)? {
            IntakeStep::Nothing => {}
            IntakeStep::Begin(commit, commit_time, xid) => {
                self.watermark.begin(commit, commit_time, xid);
            }
            IntakeStep::Commit(end_lsn) => self.watermark.commit(end_lsn),
            IntakeStep::TypesUnknown(relation) => self.look_types_up(relation).await?,
            IntakeStep::TableUnknown(relation) => self.refuse_unclaimed(relation).await?,
            IntakeStep::Event {
                topic,
                ordering_key,
                mut event,
                moved,
            } => {
                let (at, event_id) = (event.origin.position, &event.origin.event_id);
                let (found, position) = self.earlier.look_up(at, event_id).await?;
                event.origin.position = position;
                if let (Some(moved), Lookup::New) = (moved, found) {
                    let row = MappedRow::Event {
                        topic,
                        ordering_key,
                        event,
                    };
                    return self.on_moved(MovedRow { moved, row }).await;
                }
                if found == Lookup::Done {
                    return Ok(());
                }
                event.origin.standing = standing(found);
                self.watermark.add_event();
                self.delivery.take(topic, ordering_key, event);
            }
            IntakeStep::Unmappable {
                mut error,
                payload,
                moved,
            } => {
                let (at, event_id) = (error.at.position, &error.known.event_id);
                let (found, position) = self.earlier.look_up(at, event_id).await?;
                error.at.position = position;
                match (found, moved) {
                    (Lookup::New, Some(moved)) => {
                        let row = MappedRow::Unmappable { error, payload };
                        return self.on_moved(MovedRow { moved, row }).await;
                    }
                    (Lookup::Done, _) => {}
                    (Lookup::Repeated, _) => stays_published(&error.known.event_id, &error),
                    (Lookup::New, None) => {
                        self.watermark.add_event();
                        self.delivery.take_unmappable(error, payload)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Reads the column types of a captured table from the catalog, because the stream contains only the
    /// types' oids.
    async fn look_types_up(&mut self, relation: Oid) -> Result<()> {
        let (described, known) = self.intake.described(relation)?;
        let found = table::look_up_types_apart(self.source.target(), described, known).await?;
        match self.intake.learn(relation, found)? {
            IntakeStep::TableUnknown(relation) => self.refuse_unclaimed(relation).await,
            _ => Ok(()),
        }
    }

    /// Ends the session if this relation is the current table and not an earlier one. The next session
    /// claims the table, and so decides about its event ids.
    async fn refuse_unclaimed(&self, relation: Oid) -> Result<()> {
        let (described, _) = self.intake.described(relation)?;
        if !table::is_current_apart(self.source.target(), described).await? {
            return Ok(());
        }
        let what = format!(
            "table {}.{} was created again",
            described.namespace, described.name
        );
        let hint = "no action needed: a new session captures its rows";
        Err(Error::new(Code::SlotBusy, what).hint(hint))
    }

    /// Waits for the requests in flight, records their outcomes and confirms them. Starts no new
    /// requests. Returns the last confirmed position.
    pub(super) async fn drain(self, limit: Duration) -> Confirmable {
        let Self {
            delivery,
            mut watermark,
            source,
            ..
        } = self;
        for (commit, events) in delivery.drain(limit).await {
            watermark.resolve(commit, events);
        }
        let confirmed = watermark.confirmable();
        source.confirm(confirmed);
        tracing::info!(confirmed = %confirmed.lsn(), "closing the session");
        source.close().await;
        confirmed
    }

    fn measure(&mut self) {
        self.delivery.measure();
        self.metrics
            .oldest_pending
            .set(self.watermark.oldest_pending());
    }
}

async fn next_step(seam: &mut Option<Seam>) -> Result<SeamStep> {
    match seam {
        Some(seam) => seam.next_step().await,
        None => std::future::pending().await,
    }
}
