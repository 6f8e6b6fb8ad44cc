//! Opens a session. Each step returns a value that a later step needs, so no step can be left out or come
//! too early. The values are, in order: [`OurDatabase`], [`FreeSlot`], [`SlotFacts`], [`Decision`],
//! [`ReadySlot`], [`StreamOpen`], [`PredecessorGone`]. The steps up to the decision change nothing in
//! the database.
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
use super::pipeline::Pipeline;
use super::plan::{self, Decision, SlotFacts};
use super::standby::FreeSlot;
use super::supervisor::{self, Supervision, Supervisor};
use super::{SessionRunner, parts, stuck};
use crate::audit::{self, Auditor};
use crate::capture::claim::{self, CaptureMoment, CaptureStart, Captured};
use crate::capture::earlier::OutcomeLookup;
use crate::capture::intake::Intake;
use crate::capture::moved::MovedRows;
use crate::capture::shape::FoundTable;
use crate::capture::{Bounds, from_table, tops};
use crate::condition::Phase;
use crate::delivery::flow_control::backlog::Backlog;
use crate::error::{Code, Error, Result};
use crate::postgres::Sql;
use crate::recovery;
use crate::recovery::loss::{Loss, SlotVerdict};
use crate::recovery::slot::{self, RecoverySlot};
use crate::store::dispatch::{PredecessorGone, RecordedEvents, SlotReader, wait_for_predecessor};
use crate::store::relay_row::{self, Audit, RecordKeeping, RelayMode, ServedSlot, mark};

/// Statement timeout of look-ups for which the stream has to wait.
const LOOK_UP_TIMEOUT: Duration = Duration::from_secs(5);

/// How long to wait for the error with which a stream ended. The server sends the error before it frees
/// the slot.
const LAST_WORD_LIMIT: Duration = Duration::from_secs(1);

/// The tasks that run alongside the pipeline. Dropping this value ends them.
pub(super) type SideTasks = (Supervisor, Auditor);

/// A slot from which the session can stream, and the tables that the session has claimed.
struct ReadySlot {
    confirmed: Lsn,
    audit: Audit,
    /// The slot of a recovery; `None` if no recovery is needed. Rows that this slot does not stream come
    /// from the tables.
    recovery: Option<RecoverySlot>,
    records: RecordKeeping,
    captured: Vec<Captured>,
    /// The publication at the start of this session, before it created a slot.
    publication: PublicationState,
}

/// The open stream of a slot that we hold. Nothing reads the stream until the session has begun, which
/// may take long. Meanwhile the supervisor renews the proof of the lease.
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
    /// Opens a session.
    pub(super) async fn open(&self) -> Result<(Pipeline, SideTasks)> {
        let (settings, publication) = (&self.settings, &self.publication);
        let database = OurDatabase::connect(settings, publication, &self.greeting).await?;
        let free = FreeSlot::wait(&database, &settings.slot, publication, &self.state).await?;
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
    /// recovery could not read all tables; errors of a statement.
    async fn make_ready(
        &self,
        database: &OurDatabase,
        facts: SlotFacts<'_>,
        decision: Decision,
        free: &FreeSlot,
    ) -> Result<ReadySlot> {
        let (settings, metrics) = (&self.settings, &self.metrics);
        match &decision.begin {
            SlotVerdict::Stream { .. } => facts.log_failover(),
            SlotVerdict::Continue { .. } => {}
            SlotVerdict::Recover(loss) => {
                self.prepare_recovery(database, loss, decision.stop).await?;
            }
        }
        let OurDatabase { sql, .. } = database;
        // To create a slot, PostgreSQL waits for all running transactions, and the previous relay may
        // have left a transaction open.
        wait_for_predecessor(sql, &settings.slot, settings.publish_timeout).await?;
        let mut moment = None;
        let (confirmed, audit, recovery) = match decision.begin {
            SlotVerdict::Stream { confirmed, audit } => (confirmed, audit, None),
            SlotVerdict::Continue {
                confirmed,
                audit,
                unfinished,
            } => {
                self.state.set(Phase::Recovering);
                let kept = slot::kept(&settings.slot, unfinished, metrics);
                (confirmed, audit, Some(kept))
            }
            SlotVerdict::Recover(loss) => {
                // Creating the slot may take minutes.
                self.state.set(Phase::Recovering);
                let tops = tops::tops(sql, &facts.found).await?;
                let lost = (&loss, facts.slot);
                let new = slot::create(sql, settings, &self.instance, lost, metrics).await?;
                let since = new.snapshot().clone();
                moment = Some(CaptureMoment { since, tops });
                (new.consistent_point(), Audit::Continue, Some(new))
            }
        };
        // Claim the tables after creating the slot, so that the capture of new tables begins exactly where
        // the slot begins. A crash in between is harmless: because of the mark, the next session creates
        // another slot.
        let begin = CaptureStart {
            start: settings.start,
            tables: &settings.tables,
            publication: facts.publication,
            is_first: decision.is_first,
            since_lsn: None,
            moment: moment.as_ref(),
        };
        let captured = self.claim(sql, facts.found, begin).await?;
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

    async fn claim(
        &self,
        sql: &Sql,
        found: Vec<FoundTable>,
        begin: CaptureStart<'_>,
    ) -> Result<Vec<Captured>> {
        let slot = &self.settings.slot;
        let claimed = claim::claim(sql, slot, found, begin, &self.instance).await;
        if let Err(error) = &claimed
            && error.code() == Code::TableCaptured
            && begin.moment.is_some()
        {
            slot::discard(sql, slot).await;
        }
        claimed
    }

    /// Checks that the recovery is allowed and possible, and marks the slot. Changes nothing else.
    async fn prepare_recovery(
        &self,
        OurDatabase { sql, cluster, .. }: &OurDatabase,
        loss: &Loss,
        stop: Option<Error>,
    ) -> Result<()> {
        if let Some(error) = stop {
            return Err(error);
        }
        slot::everything_is_readable(sql, &self.settings).await?;
        // Mark the slot before creating it. If we created the slot first and then crashed, the next session
        // would take it for a slot that a command has made.
        mark::mark_recovering(sql, self.served(cluster), loss.name()).await
    }

    /// Opens the stream, and checks that the slot is still the slot for which the decision was made.
    /// Until the stream has begun, another relay may replace the slot by a new slot of the same name.
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
                // The slot was usable a moment ago. The next session checks it again.
                Code::SlotMissing | Code::SlotLost => changed().caused_by(error),
                _ => error,
            })?;
        let (_, walsender) = source.lease_proof();
        let reader = SlotReader::of(sql, self.served(cluster), walsender, confirmed).await?;
        let Some(reader) = reader else {
            // If the stream has already ended, its error is more precise about the cause.
            return Err(
                match source.end_within(LAST_WORD_LIMIT).await.map(Error::from) {
                    Some(end) if stuck::is_of_this_place(&end) => {
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
        let recorded = RecordedEvents::after(&sql, confirmed, records, gone).await?;
        let quarantine = parts::quarantine(&sql, settings.on_bad_event, gone).await?;
        let mode = RelayMode {
            records: records.without_earlier(),
            publication: parts::as_captured(&ready.captured, &database.publication),
        };
        relay_row::take(&sql, self.served(&cluster), confirmed, ready.audit, mode).await?;
        let intake = Intake::new(
            parts::streamed(settings, &ready.captured),
            settings.project()?.into(),
            metrics.clone(),
        );
        let bounds: Arc<[Bounds]> = ready.captured.iter().map(Bounds::of).collect();
        let (rows, from_table) = from_table::channel();
        let (seam, recovered) = if let Some(slot) = ready.recovery {
            let (publication, captured) = (&ready.publication, ready.captured);
            let subject = self.recovery_subject(&reader, publication, captured, records)?;
            let (seam, over) = recovery::start(&sql, subject, slot, rows.another(), gone).await?;
            (Some(seam), Some(over))
        } else {
            let (server, host) = (cluster.major_version(), reader.target().address());
            tracing::info!(slot = %settings.slot, %confirmed, server, host, "streaming");
            (None, None)
        };
        // From here on the pipeline uses this SQL session, and the pipeline must not wait for long.
        sql.limit_statements(LOOK_UP_TIMEOUT).await?;
        let audit = audit::FirstAudit {
            everything: ready.audit == Audit::Everything,
            after: recovered,
        };
        let subject = self.audit_subject(&reader, bounds.clone(), records)?;
        let (auditor, broken) = audit::start(subject, audit, stream.hasten, rows);
        let target = reader.target().clone();
        let pipeline = Pipeline {
            source: stream.source,
            intake,
            watermark: Watermark::new(Confirmable::by_slot(confirmed)),
            delivery: self.delivery(quarantine, reader, confirmed)?,
            earlier: OutcomeLookup::new(recorded, sql, metrics.clone()),
            moved: MovedRows::new(
                target,
                bounds,
                records,
                self.settings.in_flight_bytes,
                metrics.clone(),
            ),
            supervision: stream.supervision,
            from_table,
            seam,
            broken,
            backlog: Backlog::default(),
            metrics: metrics.clone(),
        };
        Ok((pipeline, (stream.supervisor, auditor)))
    }
}

fn changed() -> Error {
    let what = "the slot has changed while it was being opened";
    Error::new(Code::SlotBusy, what).hint("no action needed: the relay checks the slot again")
}
