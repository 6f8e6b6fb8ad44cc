//! Opens a session. Each step returns a value that a later step needs, so the compiler makes sure that no
//! step is left out or runs too early. The values are, in order: [`OurDatabase`], [`FreeSlot`],
//! [`SlotFacts`], [`Decision`], [`ReadySlot`], [`StreamOpen`], [`PredecessorGone`]. Up to the decision, the
//! session changes nothing in the database, except that it may note problems in the relay's row.
//!
//! Not here: the facts (`database`, `standby`), the decision (`plan`), and the loop (`pipeline`).

use std::sync::Arc;
use std::time::Duration;

use decoder::Lsn;
use replication::{Confirmable, Source, StreamOptions, Watermark};
use slot_manager::Cluster;
use slot_manager::publication::PublicationState;
use tokio::sync::{Notify, watch};

use super::database::OurDatabase;
use super::pipeline::{Pipeline, ReadProgress, ServerStop};
use super::plan::{self, Decision, SlotFacts};
use super::standby::FreeSlot;
use super::supervisor::{self, Supervision, Supervisor};
use super::{SessionRunner, parts, stuck};
use crate::audit::{self, Auditor};
use crate::capture::claim::{self, CaptureMoment, CaptureStart, Captured};
use crate::capture::earlier::OutcomeLookup;
use crate::capture::moved::MovedRows;
use crate::capture::session_records::SessionRecords;
use crate::capture::shape::FoundTable;
use crate::capture::{Bounds, from_table, tops};
use crate::condition::Phase;
use crate::delivery::flow_control::backlog::Backlog;
use crate::error::{Code, Error, Result};
use crate::postgres::{Sql, WatchedSession};
use crate::recovery;
use crate::recovery::slot::{self, RecoverySlot};
use crate::recovery::slot_verdict::{RecoveryCause, SlotVerdict};
use crate::store::dispatch::{EarlierOutcomes, PredecessorGone, SlotReader, wait_for_predecessor};
use crate::store::relay_row::{self, Audit, RecordKeeping, RelayMode, ServedSlot, mark};

/// Statement timeout of the pipeline's look-ups. Short, because the pipeline does nothing else while it waits
/// for a look-up.
const LOOK_UP_TIMEOUT: Duration = Duration::from_secs(5);

/// How long to wait for the error with which a stream ended. Short, because the slot is already free, and the
/// server sends the error before it frees the slot.
const FINAL_WRITE_LIMIT: Duration = Duration::from_secs(1);

/// The tasks that run alongside the pipeline. Dropping this value ends them.
pub(super) type SideTasks = (Supervisor, Auditor);

/// A slot from which the session can stream, and the tables that the session has claimed.
struct ReadySlot {
    confirmed: Lsn,
    audit: Audit,
    /// The slot of the recovery with which the session begins; `None` if no recovery is needed. A recovery reads the
    /// tables, and publishes the rows that the stream of the slot might lack.
    recovery: Option<RecoverySlot>,
    records: RecordKeeping,
    captured: Vec<Captured>,
    /// The publication. It was read when the slot was free, and before this session created a slot.
    publication: PublicationState,
}

/// The open stream of a slot that we hold. The source reads a few chunks ahead, and then waits until the
/// pipeline takes them. The supervisor already renews the proof of the lease, because the remaining steps may
/// take long.
struct StreamOpen {
    source: Source,
    reader: SlotReader,
    supervisor: Supervisor,
    supervision: watch::Receiver<Supervision>,
    /// Wakes the auditor.
    hasten: Arc<Notify>,
    ready: ReadySlot,
}

impl SessionRunner {
    /// Opens a session, and reports what the session waits for.
    pub(super) async fn open(&self) -> Result<(Pipeline, SideTasks)> {
        let opener = WatchedSession::default();
        let opened = tokio::select! {
            opened = self.take_steps(&opener) => opened,
            never = self.report_what_opening_waits_for(&opener) => match never {},
        };
        self.metrics.troubles.opening_continues();
        opened
    }

    async fn take_steps(&self, opener: &WatchedSession) -> Result<(Pipeline, SideTasks)> {
        let (settings, publication) = (&self.settings, &self.publication);
        let database = OurDatabase::connect(settings, publication, &self.greeting, opener).await?;
        let views = (&*self.state, &self.metrics);
        let free = FreeSlot::wait(
            &database,
            &settings.slot,
            publication,
            &self.instance,
            views,
        )
        .await?;
        let facts = SlotFacts::gather(&database, &free, settings).await?;
        let decision = plan::decide(&facts, settings)?;
        let ready = self.make_ready(&database, facts, decision, &free).await?;
        let stream = self.open_stream(&database, ready).await?;
        let (slot, limit) = (&settings.slot, settings.publish_timeout);
        let gone = PredecessorGone::wait(&database.sql, slot, &stream.reader, limit).await?;
        self.begin(database, stream, &gone).await
    }

    fn served<'a>(&'a self, cluster: &'a Cluster) -> ServedSlot<'a> {
        ServedSlot {
            slot: &self.settings.slot,
            cluster,
            instance: &self.instance,
        }
    }

    /// Carries out the decision: creates a slot if a recovery needs a new one, and claims the tables.
    ///
    /// # Errors
    /// `slot-missing`, `slot-lost` and `slot-recreated` when `slot_on_loss` is `stop`; `slot-held`,
    /// `slot-busy`, `slot-foreign`, `table-captured`; the errors of [`slot::everything_is_readable`] if a
    /// recovery cannot read all tables; database errors.
    async fn make_ready(
        &self,
        database: &OurDatabase,
        facts: SlotFacts<'_>,
        decision: Decision,
        free: &FreeSlot,
    ) -> Result<ReadySlot> {
        let settings = &self.settings;
        match &decision.begin {
            SlotVerdict::Stream { .. } => facts.log_failover(),
            SlotVerdict::Continue { .. } => {}
            SlotVerdict::Keep { reason, .. } | SlotVerdict::Recover(reason) => {
                let keeps_slot = decision.begin.kept_from().is_some();
                self.prepare_recovery(database, (reason, keeps_slot), decision.stop)
                    .await?;
            }
        }
        let OurDatabase { sql, .. } = database;
        // PostgreSQL creates a slot only after all running transactions have ended. So first wait for a
        // transaction that the previous relay may have left open.
        wait_for_predecessor(sql, &settings.slot, settings.publish_timeout).await?;
        let kept_from = decision.begin.kept_from();
        let mut moment = None;
        let (confirmed, audit, recovery) = match decision.begin {
            SlotVerdict::Stream { confirmed, audit } => (confirmed, audit, None),
            SlotVerdict::Continue {
                confirmed,
                audit,
                unfinished,
            } => {
                self.state.set(Phase::Recovering);
                let from = (unfinished, confirmed);
                let slot = slot::continued(sql, &settings.slot, from, &self.metrics).await?;
                (confirmed, audit, Some(slot))
            }
            SlotVerdict::Keep { reason, .. } | SlotVerdict::Recover(reason) => {
                let (slot, begins) = self.recovery_slot(sql, &facts, &reason, kept_from).await?;
                moment = Some(begins);
                let confirmed = kept_from.unwrap_or(slot.consistent_point());
                (confirmed, Audit::Continue, Some(slot))
            }
        };
        // Claim the tables after creating the slot, so that the capture of new tables begins exactly
        // where the slot begins. A crash between the two steps is harmless: because of the recovery mark,
        // the next session creates another slot.
        let begin = CaptureStart {
            start: settings.start,
            tables: &settings.tables,
            publication: facts.publication,
            is_first: decision.is_first,
            since_lsn: None,
            moment: moment.as_ref(),
            is_session: true,
        };
        let has_new_slot = begin.moment.is_some() && kept_from.is_none();
        let captured = self.claim(sql, facts.found, begin, has_new_slot).await?;
        if let Some(slot) = &recovery {
            slot.wait_until_readable(sql, &captured).await?;
        }
        Ok(ReadySlot {
            confirmed,
            audit,
            recovery,
            records: decision.records,
            captured,
            publication: free.publication.clone(),
        })
    }

    /// Keeps the slot, or creates a new one. Also returns where the capture of new tables begins.
    async fn recovery_slot(
        &self,
        sql: &Sql,
        facts: &SlotFacts<'_>,
        reason: &RecoveryCause,
        kept_from: Option<Lsn>,
    ) -> Result<(RecoverySlot, CaptureMoment)> {
        let (settings, metrics) = (&self.settings, &self.metrics);
        let announcements = &self.announcements;
        // Set the phase first, because the next steps may wait minutes for open transactions.
        self.state.set(Phase::Recovering);
        let tops = tops::tops(sql, &facts.found).await?;
        let slot = if kept_from.is_some() {
            slot::keep(sql, settings, reason, announcements, metrics).await?
        } else {
            let reason = (reason, facts.slot);
            slot::create(
                sql,
                settings,
                &self.instance,
                reason,
                announcements,
                metrics,
            )
            .await?
        };
        let since = slot.snapshot().clone();
        Ok((slot, CaptureMoment { since, tops }))
    }

    async fn claim(
        &self,
        sql: &Sql,
        found: Vec<FoundTable>,
        begin: CaptureStart<'_>,
        has_new_slot: bool,
    ) -> Result<Vec<Captured>> {
        let slot = &self.settings.slot;
        let claimed = claim::claim(sql, slot, found, begin, &self.instance).await;
        if let Err(error) = &claimed
            && error.code() == Code::TableCaptured
            && has_new_slot
        {
            slot::discard(sql, slot).await;
        }
        claimed
    }

    /// Checks that the recovery is allowed and possible, and marks the slot for recovery. Changes nothing
    /// else.
    async fn prepare_recovery(
        &self,
        OurDatabase { sql, cluster, .. }: &OurDatabase,
        (reason, keeps_slot): (&RecoveryCause, bool),
        stop: Option<Error>,
    ) -> Result<()> {
        if let Some(error) = stop {
            return Err(error);
        }
        slot::everything_is_readable(sql, &self.settings).await?;
        if keeps_slot && matches!(reason, RecoveryCause::Unfinished(_)) {
            // An earlier session has set the mark. Setting it again would erase the position of the
            // unfinished recovery, and we need that position to keep this slot.
            return Ok(());
        }
        // Mark the slot before creating it. If we created the slot first and then crashed, the next session
        // would take it for a slot that `init` or `slot create` has made.
        mark::mark_recovering(sql, self.served(cluster), reason.name()).await
    }

    /// Opens the stream, and checks that the stream reads the slot that `ready` describes. Until our stream has
    /// begun, another relay can replace this slot with a new slot of the same name.
    async fn open_stream(
        &self,
        OurDatabase { sql, cluster, .. }: &OurDatabase,
        ready: ReadySlot,
    ) -> Result<StreamOpen> {
        let (settings, confirmed) = (&self.settings, ready.confirmed);
        let options = StreamOptions {
            target: sql.target().clone(),
            slot: settings.slot.to_string(),
            publication: settings.publication.clone(),
            application_name: self.instance.clone(),
            wal_sender_timeout: settings.wal_sender_timeout,
            confirmed: Confirmable::by_slot(confirmed),
        };
        let last_status = self.metrics.last_status.clone();
        let opened = Source::open(options, move || last_status.now()).await;
        let mut source = opened
            .map_err(Error::from)
            .map_err(|error| match error.code() {
                // The slot was usable a moment ago, so somebody has changed it. The next session checks it again.
                Code::SlotMissing | Code::SlotLost => changed().caused_by(error),
                _ => error,
            })?;
        let (_, walsender) = source.lease_proof();
        let reader = SlotReader::of(sql, self.served(cluster), walsender, confirmed).await?;
        let Some(reader) = reader else {
            // If the stream has already ended, return the stream's error, because it names the cause more
            // precisely.
            return Err(
                match source.end_within(FINAL_WRITE_LIMIT).await.map(Error::from) {
                    Some(end) if stuck::recurs_at_its_position(&end) => {
                        self.stuck(sql.target(), confirmed, end).await
                    }
                    Some(end) => end,
                    None => changed(),
                },
            );
        };
        let hasten = Arc::new(Notify::new());
        let watched = self.watch_subject(cluster, &source);
        let (publication, metrics) = (ready.publication.clone(), self.metrics.clone());
        let (supervisor, supervision) =
            supervisor::start(watched, publication, metrics, hasten.clone());
        Ok(StreamOpen {
            source,
            reader,
            supervisor,
            supervision,
            hasten,
            ready,
        })
    }

    /// Takes over from the previous relay: reads the recorded events and the quarantine, and starts the
    /// recovery, the auditor and the delivery.
    async fn begin(
        &self,
        database: OurDatabase,
        stream: StreamOpen,
        gone: &PredecessorGone,
    ) -> Result<(Pipeline, SideTasks)> {
        let (settings, metrics) = (&self.settings, &self.metrics);
        let (sql, cluster) = (database.sql, database.cluster);
        let (ready, reader) = (stream.ready, stream.reader);
        let (confirmed, records) = (ready.confirmed, ready.records);
        let recorded = EarlierOutcomes::after(&sql, confirmed, records, gone).await?;
        let quarantine = parts::quarantine(&sql, settings.on_bad_event, gone).await?;
        let mode = RelayMode {
            records: records.without_earlier(),
            publication: database.publication.fingerprint(),
        };
        let captured = parts::as_captured(&ready.captured, &database.publication);
        let served = self.served(&cluster);
        relay_row::take(&sql, served, confirmed, ready.audit, mode, captured).await?;
        let known = SessionRecords::read(&sql, &ready.captured).await?;
        let tables = (&*ready.captured, &ready.publication);
        let intake = parts::intake(settings, tables, known.clone(), metrics)?;
        let bounds: Arc<[Bounds]> = known.iter().map(Bounds::of).collect();
        let claimed = ready.captured.iter().map(|one| one.shape.oid).collect();
        let (rows, from_table) = from_table::channel();
        let repeats_rows = ready
            .recovery
            .as_ref()
            .is_some_and(RecoverySlot::repeats_rows);
        let (seam, recovered) = if let Some(slot) = ready.recovery {
            let (publication, tables) = (&ready.publication, (ready.captured, known));
            let subject = self.recovery_subject(&reader, publication, tables, records)?;
            let (seam, over) = recovery::start(&sql, subject, slot, rows.another(), gone).await?;
            (Some(seam), Some(over))
        } else {
            let (server, host) = (cluster.major_version(), reader.target().address());
            tracing::info!(slot = %settings.slot, %confirmed, server, host, "streaming");
            (None, None)
        };
        // From here on, the pipeline uses this SQL session, and must not wait long for a statement.
        sql.limit_statements(LOOK_UP_TIMEOUT).await?;
        let audit = audit::FirstAudit {
            everything: ready.audit == Audit::Everything,
            after: recovered,
        };
        let subject = self.audit_subject(&reader, (claimed, bounds.clone()), records)?;
        let (auditor, broken) = audit::start(subject, audit, stream.hasten, rows);
        let (target, budget) = (reader.target().clone(), settings.in_flight_bytes);
        let attempt = (!records.records_published()).then_some(settings.publish_timeout);
        let pipeline = Pipeline {
            source: stream.source,
            intake,
            publication: settings.publication.clone(),
            watermark: Watermark::new(Confirmable::by_slot(confirmed)),
            held_at: repeats_rows.then_some(Confirmable::by_slot(confirmed)),
            read_rows: None,
            delivery: self.delivery(quarantine, reader, confirmed)?,
            earlier: OutcomeLookup::new(recorded, sql, metrics.clone()),
            moved: MovedRows::new(target, bounds, records, budget, metrics.clone()),
            supervision: stream.supervision,
            server_stop: ServerStop::new(attempt),
            from_table,
            seam,
            broken,
            backlog: Backlog::default(),
            metrics: metrics.clone(),
            progress: ReadProgress::default(),
        };
        Ok((pipeline, (stream.supervisor, auditor)))
    }
}

fn changed() -> Error {
    let what = "the slot has changed while it was being opened";
    Error::new(Code::SlotBusy, what).hint("no action needed: the relay checks the slot again")
}
