//! Hands the outcomes of events to the writer of `outbox.dispatch`, and resolves the events once their
//! rows are durable.

use std::time::Duration;

use replication::CommitLsn;
use tokio::sync::mpsc;

use super::Delivery;
use super::requests::Answer;
use crate::error::{Code, Error, Result};
use crate::event::{EventRef, Standing};
use crate::settings::Settings;
use crate::store::dispatch::{DispatchWriter, Record, SlotReader, WriterEvent, Written};
use crate::store::relay_row::RecordKeeping;

/// Minimum time for writing dispatch rows when a session ends. With this minimum, the answers that
/// arrived are recorded even if another answer never arrives.
const WRITER_LIMIT: Duration = Duration::from_secs(3);

/// The writer of `outbox.dispatch`, and the events that are resolved.
pub(super) struct Recorder {
    writer: DispatchWriter,
    written: mpsc::UnboundedReceiver<WriterEvent>,
    /// Whether published events get a row.
    pub(super) keeping: RecordKeeping,
    /// Events that are resolved but not yet reported, counted per transaction.
    resolved: Written,
    /// Whether the writer's last attempt has failed.
    cannot_record: bool,
}

impl Recorder {
    pub(super) fn start(settings: &Settings, reader: SlotReader) -> Self {
        let (sender, written) = mpsc::unbounded_channel();
        Self {
            writer: DispatchWriter::start(&settings.slot, reader, sender),
            written,
            keeping: RecordKeeping::of(settings.dispatch, None),
            resolved: Written::default(),
            cannot_record: false,
        }
    }

    /// The writer's next report. Cancel-safe.
    pub(super) async fn written(&mut self) -> Result<WriterEvent> {
        let ended = || Error::new(Code::Internal, "the dispatch writer ended");
        self.written.recv().await.ok_or_else(ended)
    }

    /// Counts an event of this transaction as resolved, without a row.
    pub(super) fn resolve(&mut self, commit: CommitLsn) {
        self.resolved.count(commit);
    }

    /// Takes the number of newly resolved events per transaction.
    pub(super) fn take_resolved(&mut self) -> Vec<(CommitLsn, u64)> {
        std::mem::take(&mut self.resolved.commits)
    }
}

impl Delivery {
    /// Whether events that get no row may be resolved at once. They may not be resolved while a
    /// record is still being written, because the record may belong to a released event that comes
    /// before these events. If a crash lost this record, the released event would be published
    /// again, after the events behind it.
    pub(super) fn resolves_at_once(&self, events: &[EventRef]) -> bool {
        let is_released = |event: &EventRef| event.standing == Standing::Released;
        self.quarantine.is_settled() && !events.iter().any(is_released)
    }

    /// Hands outcomes to the writer.
    pub(super) fn record(&mut self, record: Record) {
        self.quarantine.handed(&record);
        self.flow.take_texts(record.text_bytes());
        self.recorder.writer.record(record);
    }

    pub(super) fn on_written(&mut self, event: WriterEvent) -> Result<()> {
        match event {
            WriterEvent::Recorded(Written {
                commits,
                events,
                text_bytes,
                records,
            }) => {
                self.flow.give_back_records(events);
                self.flow.give_back_texts(text_bytes);
                self.metrics.events_recorded.inc_by(events as u64);
                self.quarantine.durable(records);
                self.recorder.resolved.commits.extend(commits);
                if std::mem::take(&mut self.recorder.cannot_record) {
                    self.metrics.troubles.can_record();
                    tracing::info!("outcomes are recorded again");
                }
                Ok(())
            }
            WriterEvent::Retrying(error) => {
                self.recorder.cannot_record = true;
                self.metrics.troubles.cannot_record(&error);
                if let Some(since_last) = self.log.due(error.code()) {
                    tracing::warn!(
                        code = %error.code(), hint = error.hint_text(), since_last,
                        "cannot write outbox.dispatch, retrying: {error}"
                    );
                }
                Ok(())
            }
            WriterEvent::Failed(error) => Err(error),
        }
    }

    /// Waits for requests in flight and records their outcomes; starts no new requests. Returns the number of
    /// resolved events per transaction.
    pub(crate) async fn drain(mut self, limit: Duration) -> Vec<(CommitLsn, u64)> {
        let deadline = tokio::time::Instant::now() + limit;
        while let Ok(Some(answer)) = tokio::time::timeout_at(deadline, self.attempts.answer()).await
        {
            // The next session publishes the events of a failed request again.
            if let Ok(Answer {
                request,
                result: Ok(ids),
            }) = answer
            {
                self.on_published(request, ids);
            }
        }
        let left = deadline.saturating_duration_since(tokio::time::Instant::now());
        let mut recorder = self.recorder;
        let left = left.max(WRITER_LIMIT.min(limit));
        recorder.writer.finish(left).await;
        let mut recorded = recorder.resolved.commits;
        while let Ok(event) = recorder.written.try_recv() {
            if let WriterEvent::Recorded(batch) = event {
                self.metrics.events_recorded.inc_by(batch.events as u64);
                recorded.extend(batch.commits);
            }
        }
        recorded
    }
}
