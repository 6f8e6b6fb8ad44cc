//! Reads, decodes and maps the stream of a slot, but neither publishes nor records the events. For
//! benchmarks.
//!
//! This session uses the same replication session, decoder, mappers and watermark as `pipeline`, in the same way,
//! but stops after the mapping. With this session, `cargo xtask bench` separates the cost of reading from the cost
//! of delivery, and measures other publishers in place of ours.
//!
//! Each event counts as resolved as soon as the caller has it. Nothing here watches the publication or
//! prevents a second relay, so none of the relay's guarantees hold.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use decoder::Lsn;
use decoder::Oid;
use decoder::frame::Frame;
use replication::{Chunk, Confirmable, Source, StreamOptions, Watermark, frames};
use slot_manager::slots;

use crate::capture::intake::{Intake, IntakeStep, Streamed};
use crate::capture::session_records::SessionRecords;
use crate::capture::table;
use crate::delivery::flow_control::backlog::Backlog;
use crate::error::{Code, Error, Result};
use crate::event::OrderingKey;
use crate::metrics::Metrics;
use crate::postgres::connect;
use crate::settings::Settings;

const STATEMENT_TIMEOUT: Duration = Duration::from_secs(60);

/// Reads, maps and confirms the events of a slot. Publishing them is up to the caller. Only for measurements.
#[derive(Debug)]
pub struct MappedStream {
    source: Source,
    intake: Intake,
    watermark: Watermark,
    backlog: Backlog,
}

/// A mapped event, as the relay's lanes receive it.
#[derive(Debug)]
pub struct MappedEvent {
    /// The topic's full name.
    pub topic: Arc<str>,
    /// The ordering key, within which Pub/Sub keeps the order of messages.
    pub ordering_key: OrderingKey,
    /// The encoded `PubsubMessage`.
    pub message: Bytes,
}

impl MappedStream {
    /// Opens the configured slot at its current position.
    ///
    /// # Errors
    /// Connection errors; `slot-missing`, `slot-held`.
    pub async fn open(settings: &Settings) -> Result<Self> {
        let sql = connect(settings.database()?, "postrider", STATEMENT_TIMEOUT).await?;
        let slot = slots::find(&sql, &settings.slot).await?;
        let position = slot.and_then(|slot| slot.confirmed_flush_lsn);
        let position = position.ok_or_else(|| {
            let what = format!("there is no logical slot \"{}\"", settings.slot);
            Error::new(Code::SlotMissing, what)
        })?;
        let confirmed = Confirmable::by_slot(position);
        let options = StreamOptions {
            target: sql.target().clone(),
            slot: settings.slot.to_string(),
            publication: settings.publication.clone(),
            application_name: "postrider".into(),
            wal_sender_timeout: settings.wal_sender_timeout,
            confirmed,
        };
        let metrics = Metrics::default();
        let project = Arc::from(settings.project()?);
        Ok(Self {
            source: Source::open(options, || {}).await?,
            intake: Intake::new(
                settings
                    .tables
                    .iter()
                    .map(|table| Streamed {
                        columns: Vec::new(),
                        settings: table.clone(),
                        // The OID is unknown here, so the intake finds the table by its name.
                        oid: Oid(0),
                        always_has_inserted_xid: false,
                    })
                    .collect(),
                SessionRecords::default(),
                project,
                metrics,
            ),
            watermark: Watermark::new(confirmed),
            backlog: Backlog::default(),
        })
    }

    /// Waits for the next chunk of the stream, passes its events to `each` in order, and counts them as
    /// resolved. Returns the position that was confirmed after these events.
    ///
    /// # Errors
    /// An error that ends the session, or the error of a row that cannot be mapped.
    pub async fn next(&mut self, mut each: impl FnMut(MappedEvent)) -> Result<Lsn> {
        let (ended, chunks) = self.source.split();
        let chunk = tokio::select! {
            biased;
            error = ended => return Err(error.map_or_else(
                |_| Error::new(Code::Internal, "the replication thread ended unexpectedly"),
                Error::from,
            )),
            Some(chunk) = chunks.recv() => chunk,
        };
        self.on_chunk(&chunk, &mut each).await?;
        let confirmed = self.watermark.confirmable();
        self.source.confirm(confirmed);
        self.source.set_behind(self.backlog.is_behind());
        Ok(confirmed.lsn())
    }

    async fn on_chunk(&mut self, chunk: &Chunk, each: &mut impl FnMut(MappedEvent)) -> Result<()> {
        let mut last_sent_at = None;
        for frame in frames(chunk) {
            match frame? {
                Frame::XLogData {
                    payload, sent_at, ..
                } => {
                    last_sent_at = Some(sent_at);
                    self.on_message(payload, each).await?;
                }
                Frame::Keepalive { wal_end, .. } => self.watermark.keepalive(wal_end),
            }
        }
        if let Some((sent_at, committed)) = last_sent_at.zip(self.intake.last_commit_time()) {
            self.backlog.received(sent_at, committed, Instant::now());
        }
        Ok(())
    }

    async fn on_message(
        &mut self,
        payload: &[u8],
        each: &mut impl FnMut(MappedEvent),
    ) -> Result<()> {
        match self.intake.message(payload)? {
            IntakeStep::Nothing | IntakeStep::TableUnknown(_) | IntakeStep::ColumnUnknown(_) => {}
            IntakeStep::Begin(commit, commit_time, xid) => {
                self.watermark.begin(commit, commit_time, xid);
            }
            IntakeStep::Commit(end_lsn) => self.watermark.commit(end_lsn),
            IntakeStep::TypesUnknown(relation) => {
                let (described, known) = self.intake.described(relation)?;
                let target = self.source.target();
                let found = table::look_up_types_apart(target, described, known).await?;
                self.intake.learn(relation, found)?;
            }
            IntakeStep::Event {
                topic,
                ordering_key,
                event,
                ..
            } => {
                self.watermark.add_event();
                self.watermark.resolve(event.origin.position.commit, 1);
                each(MappedEvent {
                    topic,
                    ordering_key,
                    message: event.message,
                });
            }
            IntakeStep::Unmappable { error, .. } => {
                return Err(crate::mapping::MapError::Event(error).into());
            }
        }
        Ok(())
    }

    /// Reports the last position and ends the session.
    pub async fn close(self) {
        self.source.close().await;
    }
}
