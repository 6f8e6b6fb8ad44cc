//! Owns the writer of `outbox.dispatch`, and collects the resolved events until the pipeline takes them.

use std::time::Duration;

use tokio::sync::mpsc;

use super::Delivery;
use super::requests::Answer;
use crate::condition::Troubles;
use crate::error::{Code, Error, Result};
use crate::event::EventPosition;
use crate::settings::Settings;
use crate::store::dispatch::{DispatchWriter, ResolvedEvents, SlotReader, WriterEvent};
use crate::store::relay_row::RecordKeeping;

/// Minimum time that [`Delivery::drain`] gives the writer for the last dispatch rows, even if waiting for Pub/Sub has
/// used up the drain's time limit. If the drain's limit is shorter than this minimum, the writer gets at least that limit.
const WRITER_LIMIT: Duration = Duration::from_secs(3);

/// The writer of `outbox.dispatch`, and the events that are resolved.
pub(super) struct Recorder {
    pub(super) writer: DispatchWriter,
    written: mpsc::UnboundedReceiver<WriterEvent>,
    /// Which published events get a dispatch row.
    pub(super) keeping: RecordKeeping,
    /// Resolved events that the pipeline has not taken yet.
    pub(super) resolved: ResolvedEvents,
    /// Whether the writer's last attempt has failed.
    pub(super) cannot_record: bool,
    /// Whether the last log line about the writer says that the writer is failing.
    pub(super) log_says_failing: bool,
}

impl Recorder {
    pub(super) fn start(settings: &Settings, reader: SlotReader, troubles: &Troubles) -> Self {
        let (sender, written) = mpsc::unbounded_channel();
        let unwritten = troubles.unwritten();
        Self {
            writer: DispatchWriter::start(&settings.slot, reader, sender, unwritten),
            written,
            keeping: RecordKeeping::of(settings.dispatch, None),
            resolved: ResolvedEvents::default(),
            cannot_record: false,
            log_says_failing: false,
        }
    }

    /// Waits for the writer's next report. Cancel-safe.
    pub(super) async fn written(&mut self) -> Result<WriterEvent> {
        let ended = || Error::new(Code::Internal, "the dispatch writer ended");
        self.written.recv().await.ok_or_else(ended)
    }

    /// Adds an event that is resolved although it gets no dispatch row.
    pub(super) fn resolve(&mut self, event: EventPosition) {
        self.resolved.add(event);
    }

    pub(super) fn take_resolved(&mut self) -> ResolvedEvents {
        std::mem::take(&mut self.resolved)
    }
}

impl Delivery {
    /// Waits at most `limit` for the requests in flight, and records their outcomes, without starting new
    /// requests. Returns the resolved events.
    pub(crate) async fn drain(mut self, limit: Duration) -> ResolvedEvents {
        let deadline = tokio::time::Instant::now() + limit;
        while let Ok(Some(answer)) = tokio::time::timeout_at(deadline, self.attempts.answer()).await
        {
            // Drop failed requests, because the next session publishes their events again.
            if let Ok(Answer {
                request,
                result: Ok(ids),
                ..
            }) = answer
            {
                self.on_published(request, ids);
            }
        }
        let left = deadline.saturating_duration_since(tokio::time::Instant::now());
        let (mut recorder, metrics) = (self.outcomes.recorder, self.outcomes.metrics);
        let left = left.max(WRITER_LIMIT.min(limit));
        recorder.writer.finish(left).await;
        let mut recorded = recorder.resolved;
        while let Ok(event) = recorder.written.try_recv() {
            if let WriterEvent::Recorded(batch) = event {
                metrics.events_recorded.inc_by(batch.events as u64);
                recorded.extend(batch.resolved);
            }
        }
        recorded
    }
}
