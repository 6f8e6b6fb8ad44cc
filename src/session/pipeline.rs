//! Runs the main loop of one session, which reads the stream, sends requests, processes their outcomes,
//! and confirms positions.
//!
//! One task owns all state, and waits in one `select!` for everything that can wake it. The branches are in
//! the order of their priority. The stream comes last, because it is the busiest and would starve the others.
//! During a recovery, the pipeline reads the stream only after all rows from the tables are queued for their
//! keys.
//!
//! The loop waits for the database only to look up:
//!
//! - the outcomes of moved rows, and of rows that earlier sessions may have recorded
//! - a table whose description in the stream has an unknown OID or column type, or lacks a column

mod moved_rows;
mod read_progress;
mod recovered_rows;
mod server_stop;
mod table_rows;

use std::time::{Duration, Instant};

use decoder::Oid;
use decoder::frame::Frame;
use replication::{Chunk, Confirmable, Source, Watermark, frames};
use tokio::sync::{mpsc, watch};

use self::moved_rows::standing;
pub(super) use self::read_progress::ReadProgress;
pub(super) use self::server_stop::ServerStop;
use self::server_stop::server_waits_in_vain;
use super::supervisor::Supervision;
use crate::capture::claim;
use crate::capture::earlier::OutcomeLookup;
use crate::capture::from_table::{self, TableRows};
use crate::capture::intake::{Intake, IntakeStep};
use crate::capture::moved::{MappedRow, MovedRow, MovedRows};
use crate::capture::table;
use crate::capture::unrecorded::stays_published;
use crate::delivery::flow_control::backlog::Backlog;
use crate::delivery::{Delivery, until};
use crate::error::{Code, Error, Result};
use crate::lanes::Serve;
use crate::metrics::Metrics;
use crate::recovery::{RowsFromTables, Seam, SeamStep};
use crate::store::dispatch::{Lookup, ResolvedEvents};

/// The state of one session.
pub(super) struct Pipeline {
    pub(super) source: Source,
    pub(super) intake: Intake,
    pub(super) publication: String,
    pub(super) watermark: Watermark,
    pub(super) delivery: Delivery,
    pub(super) earlier: OutcomeLookup,
    pub(super) moved: MovedRows,
    /// Rows that a recovery or the auditor has read from the tables, because the stream might not contain them.
    pub(super) from_table: TableRows,
    /// The seam between the tables and the stream in the running recovery; `None` if no recovery is running. The
    /// pipeline does not read the stream before the seam is open.
    pub(super) seam: Option<Seam>,
    /// While this is set, the relay confirms no later position. It is set during a recovery that keeps the
    /// slot, until all rows from the tables have an outcome.
    pub(super) held_at: Option<Confirmable>,
    /// The rows that a recovery has read from the tables and that the stream may still contain. `None` if
    /// there are none.
    pub(super) read_rows: Option<RowsFromTables>,
    /// Errors of the auditor: the stream may have left out rows, and only a recovery can publish them.
    pub(super) broken: mpsc::Receiver<Error>,
    pub(super) supervision: watch::Receiver<Supervision>,
    pub(super) server_stop: ServerStop,
    pub(super) backlog: Backlog,
    pub(super) progress: ReadProgress,
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
            // Read the clock before the lease check, because the timeout of the requests starts at this time.
            // If the process stalls between the check and sending, the requests still end before PostgreSQL
            // frees the slot.
            let now = Instant::now();
            if self.source.lease_is_over() {
                return Err(self.source.why_lease_is_over().await.into());
            }
            // Once the seam is open, every row from the tables is queued for its key. Only then may released
            // events and rows of the stream follow.
            let is_open = self.seam.as_ref().is_none_or(Seam::is_open);
            if is_open && self.earlier.is_over() {
                self.delivery.allow_releases();
            }
            let serve = |may_linger| self.backlog.serve(may_linger);
            self.delivery.send_requests(now, serve);
            self.source.confirm(self.confirmable());
            self.source.set_behind(self.backlog.is_behind());
            if !self.backlog.is_behind() {
                self.delivery.caught_up();
            }
            self.measure();
            let takes_events = self.delivery.takes_events();
            let takes_chunks = takes_events && is_open && !self.moved.any_waits_for_recovery();
            self.backlog.reads(takes_events, now);
            let server_stop_ends_at = self.server_stop_ends_at(now);
            let (ended, chunks) = self.source.split();
            tokio::select! {
                biased;
                _ = shutdown.wait_for(|stop| *stop) => return Ok(PipelineEnd::Shutdown),
                error = ended => return Err(error.map_or_else(
                    |_| ended_unexpectedly("the replication thread"),
                    Error::from,
                )),
                resolved = self.delivery.progress() => self.on_resolved(resolved?).await?,
                changed = self.supervision.changed() => {
                    changed.map_err(|_| ended_unexpectedly("the supervisor"))?;
                    if let Some(error) = self.on_supervision() {
                        return Err(error);
                    }
                }
                () = until(server_stop_ends_at), if server_stop_ends_at.is_some() => {
                    return Err(server_waits_in_vain());
                }
                told = self.broken.recv() => {
                    return Err(told.unwrap_or_else(|| ended_unexpectedly("the auditor")));
                }
                step = next_step(&mut self.seam), if self.seam.is_some() => {
                    self.on_step(step?).await?;
                }
                Some(batch) = self.from_table.recv(), if takes_events => {
                    let has_more = from_table::has_more(&batch);
                    self.backlog.received_from_table(has_more, Instant::now());
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

    /// Sends the events in the queues before the session ends with an error. These events precede the event that
    /// has caused the error, so the error need not hold them up.
    fn send_what_came_before(&mut self) {
        let now = Instant::now();
        if !self.source.lease_is_over() {
            self.delivery.send_requests(now, |_| Serve::All);
        }
    }

    async fn on_resolved(&mut self, resolved: ResolvedEvents) -> Result<()> {
        if !resolved.is_empty() {
            self.server_stop.advances();
        }
        if !resolved.from_tables.is_empty() {
            self.from_table.resolve(&resolved.from_tables);
        }
        for (commit, events) in resolved.commits {
            self.watermark.resolve(commit, events);
            if self.moved.any_waits() && !self.watermark.is_unresolved(commit) {
                self.take_all_that_waited_for(commit).await?;
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
                    wal_start,
                    payload,
                    sent_at: at,
                    ..
                } => {
                    (sent_at, keepalive) = (Some(at), false);
                    last_sent_at = Some(at);
                    self.server_stop.advances();
                    let step = self.intake.message(payload)?;
                    self.progress.message(wal_start, &step);
                    self.on_message(step).await?;
                }
                Frame::Keepalive {
                    wal_end,
                    sent_at: at,
                    ..
                } => {
                    (keepalive, last_sent_at) = (true, Some(at));
                    self.earlier.passed(wal_end);
                    self.is_past(wal_end);
                    self.server_stop.sent(wal_end);
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

    async fn on_message(&mut self, step: IntakeStep) -> Result<()> {
        match step {
            IntakeStep::Nothing => {}
            IntakeStep::Begin(commit, commit_time, xid) => {
                self.watermark.begin(commit, commit_time, xid);
                if let Some(sent) = &mut self.read_rows {
                    sent.begin(xid);
                }
            }
            IntakeStep::Commit(end_lsn) => {
                self.watermark.commit(end_lsn);
                self.is_past(end_lsn);
            }
            IntakeStep::Event { record, event, .. }
                if self.was_read_from_a_table(record, &event.origin.event_id) => {}
            IntakeStep::Unmappable { record, error, .. }
                if self.was_read_from_a_table(record, &error.known.event_id) => {}
            IntakeStep::TypesUnknown(relation) => self.look_types_up(relation).await?,
            IntakeStep::TableUnknown(relation) => self.refuse_unclaimed(relation).await?,
            IntakeStep::ColumnUnknown(relation) => self.refuse_incomplete(relation).await?,
            IntakeStep::Event {
                topic,
                ordering_key,
                mut event,
                moved,
                ..
            } => {
                let (at, event_id) = (event.origin.position, &event.origin.event_id);
                let (found, position) = self.look_up(at, event_id).await?;
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
                ..
            } => {
                let (at, event_id) = (error.at.position, &error.known.event_id);
                let (found, position) = self.look_up(at, event_id).await?;
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

    /// Reads the column types of a captured table from the catalogue, because the stream contains only the
    /// types' oids.
    async fn look_types_up(&mut self, relation: Oid) -> Result<()> {
        let (described, known) = self.intake.described(relation)?;
        let found = table::look_up_types_apart(self.source.target(), described, known).await?;
        match self.intake.learn(relation, found)? {
            IntakeStep::TableUnknown(relation) => self.refuse_unclaimed(relation).await,
            IntakeStep::ColumnUnknown(relation) => self.refuse_incomplete(relation).await,
            _ => Ok(()),
        }
    }

    /// Returns an error, which ends the session, if the stream lacks an optional column of the relation. (For example,
    /// the publication left it out for a while.) The values of this column can only be read from the table.
    async fn refuse_incomplete(&self, relation: Oid) -> Result<()> {
        let Some(table) = self.intake.table_of(relation) else {
            return Ok(());
        };
        let now = table::columns_apart(self.source.target(), &self.publication, table).await?;
        self.intake.refuse_incomplete(relation, &now)
    }

    /// Handles a table that the stream describes under a configured name, but with another OID than the session claimed
    /// under this name. There are two cases:
    ///
    /// - The described table has the name now. Returns an error, which ends the session. The next session claims this
    ///   table, because only a claim decides which topics and event ids the rows get.
    /// - The described table was dropped or renamed after its rows were written. The session can publish the rows,
    ///   unless they lack a column ([`refuse_incomplete`](Self::refuse_incomplete)).
    async fn refuse_unclaimed(&self, relation: Oid) -> Result<()> {
        let (described, _) = self.intake.described(relation)?;
        claim::refuse_current(self.source.target(), described).await?;
        self.refuse_incomplete(relation).await
    }

    /// Waits for the requests in flight, records their outcomes, and confirms the position that they allow. Starts
    /// no new requests. Returns the last confirmed position.
    pub(super) async fn drain(self, limit: Duration) -> Confirmable {
        let Self {
            delivery,
            mut watermark,
            held_at,
            source,
            ..
        } = self;
        for (commit, events) in delivery.drain(limit).await.commits {
            watermark.resolve(commit, events);
        }
        let confirmed = held_at.unwrap_or(watermark.confirmable());
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
        let unresolved = self.delivery.events_in_memory() as f64 + self.progress.unread_events();
        self.metrics.unresolved_events.set(Some(unresolved));
    }
}

async fn next_step(seam: &mut Option<Seam>) -> Result<SeamStep> {
    match seam {
        Some(seam) => seam.next_step().await,
        None => std::future::pending().await,
    }
}
